"""Accelerate: a loader that an Accelerator places, measures and saves, and does not shard again.

``Accelerator.prepare`` acts on torch's DataLoader alone: it returns a :class:`rankfeed.Loader` unchanged, and does
not know its end, its position or its smaller last steps. :func:`accelerated` provides these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from rankfeed._util.validate import check_bool, check_int, invalid
from rankfeed.errors import ArgumentError, StateError, listed
from rankfeed.loading import Loader
from rankfeed.loading.device import to_device
from rankfeed.plan import Schedule
from rankfeed.sources import Source
from rankfeed.sources.extras import need


def accelerated(loader: Loader, accelerator: Any, *, checkpoint: bool = True) -> AcceleratedLoader:
    """Connect a loader to an Accelerator.

    ``accelerator.prepare`` returns it unchanged, and ``split_batches``, ``dispatch_batches`` and ``even_batches``
    do
    not apply: ``batch_size`` is per rank, each sample is delivered once, all ranks take the same number of steps.

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
            such as one for each evaluation: checkpoints of an accelerator need the same number of objects on
                loading.

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
    _check_loader(loader)
    if isinstance(accelerator, type) or not hasattr(accelerator, "gather_for_metrics"):
        raise invalid("accelerator", "an accelerate.Accelerator", accelerator)
    checkpoint = check_bool("checkpoint", checkpoint)
    _check_ranks(loader, accelerator)
    connected = AcceleratedLoader(loader, accelerator)
    if checkpoint:
        accelerator.register_for_checkpointing(_LoaderCheckpoint(connected))
    if getattr(accelerator.gather_for_metrics, "func", None) is not _gather_for_metrics:
        accelerator.gather_for_metrics = partial(_gather_for_metrics, accelerator, accelerator.gather_for_metrics)
        accelerator.skip_first_batches = partial(_skip_first_batches, accelerator.skip_first_batches)
    return connected


class AcceleratedLoader:
    """What :func:`accelerated` returns; has all other attributes of the :class:`rankfeed.Loader`."""

    def __init__(self, loader: Loader, accelerator: Any) -> None:
        self.loader = loader
        loader.is_integrated = True
        self.accelerator = accelerator
        #: Two states of one loaded position: the end of an epoch, and the start of the next.
        self._epoch_boundary: tuple[dict[str, Any], dict[str, Any]] | None = None

    @property
    def dataset(self) -> Source:
        """The source: its length is that of an epoch over all ranks."""
        source: Source = self.loader.source
        return source

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
        batches = iter(loader)
        iteration = _Iteration(_schedule(loader, loader.state_dict()))
        gradients._add_dataloader(iteration)
        try:
            for batch in batches:
                iteration.step += 1
                yield batch if device is None else to_device(batch, device)
        finally:  # also if the loop is left early: accumulate and metrics of other loops would use this state
            gradients._remove_dataloader(iteration)

    def skip_first_batches(self, num_batches: int) -> AcceleratedLoader:
        """Go to a step of the current epoch, counted from its start, in constant time.

        A loaded position at this step is kept, so a script may load a state and skip too.

        Raises:
            ArgumentError: the epoch has fewer steps.
        """
        steps = check_int("num_batches", num_batches, at_least=0)
        state = self.loader.state_dict()
        if (
            self._epoch_boundary is not None
            and state == self._epoch_boundary[1]
            and steps == self._epoch_boundary[0]["steps"]
        ):
            state = self._epoch_boundary[0]  # the script's epoch is the one that has ended
        if steps < state["steps"]:
            state |= {"position": 0, "steps": 0}
        schedule, more = _schedule(self.loader, state), steps - state["steps"]
        if more > len(schedule):
            raise ArgumentError(
                "the epoch has fewer batches than are to be skipped",
                expected=f"at most {state['steps'] + len(schedule)}",
                found=steps,
            )
        position = schedule.position_after(more - 1) if more else state["position"]
        self.loader.load_state_dict(state | {"position": position, "steps": steps})
        return self

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Go to a loaded position; from the end of an epoch to the start of the next.

        A checkpoint at the last batch is taken before the loader moves on. A script that counts steps continues
        with the next epoch, and one that does not would mistake the empty rest for that epoch.
        """
        loader = self.loader
        loader.load_state_dict(state)
        end = loader.state_dict()
        self._epoch_boundary = None
        if not len(_schedule(loader, end)):
            loader.set_epoch(loader.epoch + 1)
            self._epoch_boundary = end, loader.state_dict()


class _Iteration:
    """The attributes of an active DataLoader that GradientState reads."""

    #: Samples to keep of the last step; 0 for all, since no padding is gathered.
    remainder = 0

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.step = -1

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last."""
        return self.step == len(self.schedule) - 1


class _LoaderCheckpoint:
    """What ``save_state`` saves: written by the main process, the same on every rank."""

    def __init__(self, loader: AcceleratedLoader) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.loader.state_dict(), "accumulate_step": self._loader.accelerator.step}

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, Mapping) or set(state) != {"loader", "accumulate_step"}:
            raise StateError(
                "the checkpoint has no state of this loader at its index",
                remedy="call accelerated() and register_for_checkpointing() in the order of the script that saved;"
                " loaders that are created repeatedly need checkpoint=False",
            )
        self._loader.go_to(state["loader"])
        # Accelerate saves it per rank: a new rank would count from 0, and step the optimizer at other batches than
        # its peers, so that they would wait for each other.
        self._loader.accelerator.step = state["accumulate_step"]


def _schedule(loader: Loader, state: Mapping[str, Any]) -> Schedule:
    """The rest of the epoch of a state."""
    return Schedule(
        loader.plan,
        batch_size=loader.batch_size,
        topology=loader.topology,
        epoch=state["epoch"],
        start=state["position"],
        tail=loader.tail,
    )


def _check_loader(loader: Any) -> None:
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


def _check_ranks(loader: Loader, accelerator: Any) -> None:
    meshes = getattr(accelerator, "parallelism_config", None)
    peers = 1 if meshes is None else meshes.non_data_parallel_size
    expected = accelerator.num_processes // peers
    topology = loader.topology
    remedy = "leave out the loader's topology"
    if peers > 1:
        remedy = "give the loader topology=rankfeed.Topology.from_mesh(mesh, its data-parallel dimensions)"
    if topology.world_size != expected or (peers == 1 and topology.rank != accelerator.process_index):
        raise ArgumentError(
            "the loader's ranks are not those of the accelerator",
            expected=f"{expected} ranks that read different samples",
            found=f"rank {topology.rank} of {topology.world_size}",
            where=f"process {accelerator.process_index} of {accelerator.num_processes}",
            remedy=remedy,
        )


def _skip_first_batches(original: Any, dataloader: Any, num_batches: int = 0) -> Any:
    if isinstance(dataloader, AcceleratedLoader):
        return dataloader.skip_first_batches(num_batches)
    return original(dataloader, num_batches)


def _gather_for_metrics(accelerator: Any, original: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Accelerate's own, except where ranks have different numbers of rows, or padding rows.

    It would gather tensors of different sizes, which aborts a process under gloo and is undefined under NCCL, and
    drop padding only from the end.
    """
    iteration = accelerator.gradient_state.active_dataloader
    if not isinstance(iteration, _Iteration) or iteration.step < 0:
        return original(input_data, use_gather_object)
    shares = iteration.schedule.shares(iteration.step)
    if all(share == (shares[0][0], shares[0][0]) for share in shares):
        return original(input_data, use_gather_object)
    if len(shares) != accelerator.num_processes:
        raise ArgumentError(
            "metrics of ranks that share their samples cannot be gathered from all processes",
            expected=f"{accelerator.num_processes} ranks with their own samples",
            found=len(shares),
            remedy="gather over the data-parallel group of the mesh",
        )
    rows, samples = shares[accelerator.process_index]
    operations = need("accelerate.utils.operations", extra="accelerate")
    if use_gather_object or not _all_tensors(operations, input_data):
        if samples == rows or isinstance(input_data, Mapping) or not hasattr(input_data, "__len__"):
            return original(input_data, True)
        return original(input_data[:samples] if len(input_data) == rows else input_data, True)
    most = max(samples for _, samples in shares)
    kept = [rank * most + row for rank, (_, samples) in enumerate(shares) for row in range(samples)]
    are_rows = iter(_are_rows(operations, input_data, [rows for rows, _ in shares]))

    def gather(values: Any) -> Any:
        if not next(are_rows):
            return accelerator.gather(values)  # not one entry for each row, and the same shape on all ranks
        missing = values.new_zeros((most - samples, *values.shape[1:]))
        return accelerator.gather(torch.cat([values[:samples], missing]))[kept]

    return operations.recursively_apply(gather, input_data, error_on_other_type=True)


def _are_rows(operations: Any, data: Any, rows: list[int]) -> list[bool]:
    """For each tensor, whether it has one entry for each row on all ranks: no rank can decide that alone."""
    mine: list[tuple[int, ...]] = []
    operations.recursively_apply(lambda values: mine.append(tuple(values.shape)), data)
    found = []
    for shapes in zip_longest(*operations.gather_object([mine]), fillvalue=()):
        lengths = [shape[:1] for shape in shapes]
        found.append(lengths == [(each,) for each in rows])
        if not found[-1] and lengths.count(lengths[0]) != len(lengths):
            raise ArgumentError(
                "a tensor for metrics has neither one entry for each row of the batch nor one length on all ranks",
                expected=f"{_by_rank(rows)}, or one length",
                found=f"shapes {_by_rank(shapes)}",
                remedy="gather the whole batch: padding is left out here",
            )
    return found


def _by_rank(each: Sequence[Any]) -> str:
    return listed([f"{value} on rank {rank}" for rank, value in enumerate(each)], most=16)


def _all_tensors(operations: Any, data: Any) -> bool:
    try:
        operations.recursively_apply(lambda values: values, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
