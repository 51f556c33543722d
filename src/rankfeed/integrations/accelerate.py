"""Accelerate: makes an Accelerator place, measure and save a rankfeed loader, and not shard it again.

``Accelerator.prepare`` acts on torch's DataLoader alone: it returns a :class:`rankfeed.Loader` unchanged, and does
not know its end, its position or its smaller last steps. :func:`accelerated` provides these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from rankfeed._util.imports import need
from rankfeed._util.validate import check_bool, check_int, invalid
from rankfeed.errors import ArgumentError, StateError, listed
from rankfeed.integrations._compat import ActiveEpoch
from rankfeed.loading import Loader
from rankfeed.loading.device import to_device
from rankfeed.plan import Cursor
from rankfeed.sources import Source


def accelerated(loader: Loader, accelerator: Any, *, checkpoint: bool = True) -> AcceleratedLoader:
    """Connect a loader to an Accelerator.

    ``accelerator.prepare`` returns it unchanged, and ``split_batches``, ``dispatch_batches`` and ``even_batches``
    do not apply: ``batch_size`` is per rank, each sample is delivered once, all ranks take the same number of
    steps.

    - Batches are moved to the accelerator's device, unless ``device_placement=False``.
    - ``accelerator.accumulate`` steps the optimizer at the end of an epoch.
    - ``accelerator.gather_for_metrics`` returns each sample once, in every step and with every ``tail``: padding
      is left out, and ranks may have different numbers of rows. (This method and ``skip_first_batches`` are
      replaced on this accelerator; for other loaders they work as before.)
    - ``accelerator.save_state`` and ``load_state`` include the position in the data and the step count of
      ``accumulate``, also for another number of ranks. So a script that resumes calls this in the same order.
    - ``accelerator.skip_first_batches`` goes to a step of the epoch in constant time.

    Args:
        loader: not iterated so far, or at a loaded position.
        accelerator: an ``accelerate.Accelerator``.
        checkpoint: whether its position is part of checkpoints. False for a loader that is created repeatedly,
            such as one for each evaluation: checkpoints need the same number of objects on loading.

    Raises:
        ArgumentError: no :class:`rankfeed.Loader`, or one of a stream, whose last batch is not known in advance;
            its ranks are not those of the accelerator.

    Examples:
        >>> import rankfeed as rf
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> source = rf.from_dataset([{"x": float(i)} for i in range(5)])
        >>> loader = accelerator.prepare(accelerated(rf.Loader(source, batch_size=2), accelerator))
        >>> for batch in loader:
        ...     accelerator.gather_for_metrics(batch["x"]).tolist(), accelerator.gradient_state.end_of_dataloader
        ([0.0, 1.0], False)
        ([2.0, 3.0], False)
        ([4.0], True)
    """
    if not isinstance(loader, Loader):
        raise ArgumentError(
            "only a rankfeed.Loader can be used with an Accelerator this way",
            expected="rankfeed.Loader",
            found=type(loader).__name__,
            remedy="create one: rankfeed.Loader(rankfeed.from_dataset(dataset), batch_size=...)",
        )
    if loader.is_stream:
        raise ArgumentError(
            "the loader of a stream does not know its last batch in advance, as an Accelerator needs",
            expected="a rankfeed.Loader with a length",
            found=repr(loader.source),
            remedy="iterate it directly, created with device=accelerator.device; for checkpoints call "
            "accelerator.register_for_checkpointing(loader)",
        )
    if isinstance(accelerator, type) or not hasattr(accelerator, "gather_for_metrics"):
        raise invalid("accelerator", "an accelerate.Accelerator", accelerator)
    checkpoint = check_bool("checkpoint", checkpoint)
    meshes = getattr(accelerator, "parallelism_config", None)
    peers = 1 if meshes is None else meshes.non_data_parallel_size
    check_ranks(loader, accelerator.num_processes, accelerator.process_index, peers)
    connected = AcceleratedLoader(loader, accelerator)
    if checkpoint:
        accelerator.register_for_checkpointing(_LoaderCheckpoint(connected))
    if getattr(accelerator.gather_for_metrics, "func", None) is not gather_for_metrics:
        accelerator.gather_for_metrics = partial(gather_for_metrics, accelerator, accelerator.gather_for_metrics)
        accelerator.skip_first_batches = partial(_skip_first_batches, accelerator.skip_first_batches)
    return connected


def check_ranks(loader: Loader, processes: int, process: int, peers: int) -> None:
    """Check that the loader's ranks are a job's processes, of which ``peers`` each read the same samples."""
    expected, topology = processes // peers, loader.topology
    if topology.world_size != expected or (peers == 1 and topology.rank != process):
        remedy = "leave out the loader's topology"
        if peers > 1:
            remedy = "give the loader topology=rankfeed.Topology.from_mesh(mesh, its data-parallel dimensions)"
        raise ArgumentError(
            "the loader's ranks are not those of the accelerator",
            expected=f"{expected} ranks that read different samples",
            found=f"rank {topology.rank} of {topology.world_size}",
            where=f"process {process} of {processes}",
            remedy=remedy,
        )


class AcceleratedLoader:
    """What :func:`accelerated` returns; has all other attributes of the :class:`rankfeed.Loader`."""

    def __init__(self, loader: Loader, accelerator: Any) -> None:
        self.loader = loader
        loader.is_integrated = True
        #: The source: its length is that of an epoch over all ranks.
        self.dataset: Source = loader.source
        self.accelerator = accelerator
        #: The end of the epoch that a loaded state was taken at; the loader is at the start of the next.
        self.ended: Cursor | None = None

    @property
    def sampler(self) -> Any:
        """Not available: only code that rebuilds the loader as a DataLoader reads it."""
        raise ArgumentError(
            "this loader has no sampler, and cannot be rebuilt as a DataLoader",
            remedy="use accelerator.skip_first_batches(loader, n), not accelerate.skip_first_batches",
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of an object that is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        loader, gradients = self.loader, self.accelerator.gradient_state
        device = self.accelerator.device if self.accelerator.device_placement and loader.device is None else None
        if loader.progress.is_loaded:
            loader.set_epoch(loader.epoch)  # the next one, after a loaded state of the end of one
        batches = iter(loader)
        for batch in ActiveEpoch(loader.schedule_at(loader.progress.cursor)).count(batches, gradients):
            yield batch if device is None else to_device(batch, device)

    def skip_first_batches(self, num_batches: int) -> AcceleratedLoader:
        """Go to a step of the current epoch, counted from its start, in constant time.

        A loaded position at this step is kept, so a script may load a state and skip too.

        Raises:
            ArgumentError: the epoch has fewer steps.
        """
        steps = check_int("num_batches", num_batches, at_least=0)
        loader, ended = self.loader, self.ended
        cursor: Cursor = loader.progress.cursor
        if ended is not None and cursor == ended.next_epoch() and steps == ended.steps:
            cursor = ended  # the script's epoch is the one that has ended
        if steps < cursor.steps:
            cursor = Cursor(cursor.epoch)
        schedule, skipped = loader.schedule_at(cursor), steps - cursor.steps
        if skipped > len(schedule):
            raise ArgumentError(
                "the epoch has fewer batches than are to be skipped",
                expected=f"at most {cursor.steps + len(schedule)}",
                found=steps,
            )
        loader.progress.go_to(cursor.after(schedule, skipped))
        return self


class _LoaderCheckpoint:
    """What ``save_state`` saves: written by the main process, the same on every rank."""

    def __init__(self, connected: AcceleratedLoader) -> None:
        self._connected = connected

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._connected.loader.state_dict(), "accumulate_step": self._connected.accelerator.step}

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, Mapping) or set(state) != {"loader", "accumulate_step"}:
            raise StateError(
                "the checkpoint has no state of this loader at its index",
                remedy="call accelerated() and register_for_checkpointing() in the order of the script that saved;"
                " loaders that are created repeatedly need checkpoint=False",
            )
        loader = self._connected.loader
        loader.load_state_dict(state["loader"])
        end = loader.progress.cursor
        # A checkpoint at the last batch is taken before the loader moves on to the next epoch.
        self._connected.ended = end if loader.epoch > end.epoch else None
        loader.set_epoch(loader.epoch)
        # Accelerate saves it per rank: a new rank would count from 0, and step the optimizer at other batches than
        # its peers, so that they would wait for each other.
        self._connected.accelerator.step = state["accumulate_step"]


def _skip_first_batches(original: Any, dataloader: Any, num_batches: int = 0) -> Any:
    if isinstance(dataloader, AcceleratedLoader):
        return dataloader.skip_first_batches(num_batches)
    return original(dataloader, num_batches)


def gather_for_metrics(accelerator: Any, original: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Accelerate's own, except in a last step where ranks have different numbers of rows, or padding rows."""
    # It would gather tensors of different sizes, which aborts a process under gloo and is undefined under NCCL,
    # and drop padding only from the end.
    epoch = accelerator.gradient_state.active_dataloader
    if not isinstance(epoch, ActiveEpoch) or epoch.step < 0:
        return original(input_data, use_gather_object)
    shares = epoch.shares
    if all(share == (shares[0][0], shares[0][0]) for share in shares):
        return original(input_data, use_gather_object)
    if len(shares) != accelerator.num_processes:
        raise ArgumentError(
            "metrics of ranks that share their samples cannot be gathered from all processes",
            expected=f"{accelerator.num_processes} ranks with their own samples",
            found=len(shares),
            remedy="gather over the data-parallel group of the mesh",
        )
    operations = need("accelerate.utils.operations", extra="accelerate")
    tensors: list[torch.Tensor] = []
    try:
        operations.recursively_apply(tensors.append, input_data, error_on_other_type=True)
    except TypeError:
        use_gather_object = True
    if use_gather_object:
        rows, samples = shares[accelerator.process_index]
        has_rows = not isinstance(input_data, Mapping) and hasattr(input_data, "__len__")
        is_rows = samples < rows and has_rows and len(input_data) == rows  # sets and deques cannot be sliced
        return original(input_data[:samples] if is_rows else input_data, True)
    # As objects: no rank can decide alone which of its tensors have one entry for each row.
    ranks = operations.gather_object([[values.detach().cpu().clone() for values in tensors]])
    values = iter([_joined(values, shares) for values in zip_longest(*ranks, fillvalue=torch.empty(0))])
    return operations.recursively_apply(lambda tensor: next(values).to(tensor.device), input_data)


def _joined(ranks: Sequence[torch.Tensor], shares: Sequence[tuple[int, int]]) -> torch.Tensor:
    """One tensor of all ranks, without padding rows if it has one entry for each row."""
    lengths = [tuple(values.shape[:1]) for values in ranks]
    if lengths == [(rows,) for rows, _ in shares]:
        return torch.cat([values[:samples] for values, (_, samples) in zip(ranks, shares, strict=True)])
    if lengths.count(lengths[0]) == len(lengths):
        return torch.cat([torch.atleast_1d(values) for values in ranks])
    raise ArgumentError(
        "a tensor for metrics has neither one entry for each row of the batch nor one length on all ranks",
        expected=f"{_by_rank([rows for rows, _ in shares])}, or one length",
        found=f"shapes {_by_rank([tuple(values.shape) for values in ranks])}",
        remedy="gather the whole batch: padding is left out here; in a Trainer, leave the prediction out "
        "(ignore_keys)",
    )


def _by_rank(values: Sequence[Any]) -> str:
    return listed([f"{value} on rank {rank}" for rank, value in enumerate(values)], most=16)
