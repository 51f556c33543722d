"""Accelerate: a loader that an Accelerator places, measures and saves, and never shards a second time.

``Accelerator.prepare`` acts on torch's DataLoader alone: it would hand a :class:`rankfeed.Loader` back as it is,
and never hear of its end, its place or its smaller last steps. :func:`accelerated` tells it.
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
    """A loader at home with an Accelerator.

    ``accelerator.prepare`` leaves it alone, whatever ``split_batches``, ``dispatch_batches`` and ``even_batches``
    say: ``batch_size`` is a rank's, each sample is delivered once, all ranks take the same number of steps.

    - Batches are placed on the accelerator's device, unless ``device_placement=False``.
    - ``accelerator.accumulate`` steps the optimizer at the end of an epoch.
    - ``accelerator.gather_for_metrics`` gives each sample once, in every step and under every ``tail``: what
      only fills is left out, and ranks may have different numbers of rows. (Both this method and
      ``skip_first_batches`` are replaced on this object; for other loaders they do what they did.)
    - ``accelerator.save_state`` and ``load_state`` take the place in the data along, and the count of
      ``accumulate``: on another number of ranks too. So call this in the same order in a script that resumes.
    - ``accelerator.skip_first_batches`` goes to a step of the epoch in constant time.

    Args:
        loader: not iterated so far, or at a loaded place.
        accelerator: an ``accelerate.Accelerator``.
        checkpoint: whether its place is part of checkpoints. False for a loader that is made anew, for each
            evaluation say: an accelerator keeps what is part of its checkpoints, and asks for as much on loading.

    Raises:
        ArgumentError: no :class:`rankfeed.Loader`, or one of a stream, whose end is not known before it comes; its
            ranks are not those of the accelerator.

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
    ours = AcceleratedLoader(loader, accelerator)
    if checkpoint:
        accelerator.register_for_checkpointing(_Checkpoint(ours))
    if getattr(accelerator.gather_for_metrics, "func", None) is not _gather_for_metrics:
        accelerator.gather_for_metrics = partial(_gather_for_metrics, accelerator, accelerator.gather_for_metrics)
        accelerator.skip_first_batches = partial(_skip_first_batches, accelerator.skip_first_batches)
    return ours


class AcceleratedLoader:
    """What :func:`accelerated` returns. All else of :class:`rankfeed.Loader` is had through it."""

    def __init__(self, loader: Loader, accelerator: Any) -> None:
        self.loader = loader
        loader.is_integrated = True
        self._accelerator = accelerator
        #: States of one place that was loaded: the end of an epoch, and the start of the next.
        self._between: tuple[dict[str, Any], dict[str, Any]] | None = None

    @property
    def dataset(self) -> Source:
        """The source: its length is that of an epoch over all ranks."""
        source: Source = self.loader.source
        return source

    @property
    def sampler(self) -> Any:
        """There is none, and who asks is about to build a DataLoader around it."""
        raise ArgumentError(
            "this loader has no sampler, and cannot be rebuilt as a DataLoader",
            remedy="use accelerator.skip_first_batches(loader, n), not accelerate.skip_first_batches",
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet: an object that is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        loader, gradients = self.loader, self._accelerator.gradient_state
        device = self._accelerator.device if self._accelerator.device_placement and loader.device is None else None
        batches = iter(loader)
        now = _Pass(_schedule(loader, loader.state_dict()))
        gradients._add_dataloader(now)
        try:
            for batch in batches:
                now.step += 1
                yield batch if device is None else to_device(batch, device)
        finally:  # a loop that is left early too: accumulate and metrics of other loops would take this for theirs
            gradients._remove_dataloader(now)

    def skip_first_batches(self, num_batches: int) -> AcceleratedLoader:
        """Go to a step of the epoch in hand, counted from its start, in constant time.

        At a loaded place that is as many steps in it stays, so a script may load a state and skip as well.

        Raises:
            ArgumentError: the epoch has fewer steps.
        """
        steps = check_int("num_batches", num_batches, at_least=0)
        state = self.loader.state_dict()
        if self._between is not None and state == self._between[1] and steps == self._between[0]["steps"]:
            state = self._between[0]  # the script takes the epoch that is over for the one in hand
        if steps < state["steps"]:
            state |= {"position": 0, "steps": 0}
        schedule, more = _schedule(self.loader, state), steps - state["steps"]
        if more > len(schedule):
            raise ArgumentError(
                "there are fewer batches than are to be skipped",
                expected=f"at most {state['steps'] + len(schedule)}",
                found=steps,
            )
        position = schedule.position_after(more - 1) if more else state["position"]
        self.loader.load_state_dict(state | {"position": position, "steps": steps})
        return self

    def _go_to(self, state: Mapping[str, Any]) -> None:
        """Go to a loaded place; from the end of an epoch to the start of the next.

        A checkpoint at the last batch is taken before the loader goes on. A script that counts steps finds itself
        in the next epoch, and one that does not would take the pass that has nothing left for that epoch.
        """
        loader = self.loader
        loader.load_state_dict(state)
        end = loader.state_dict()
        self._between = None
        if not len(_schedule(loader, end)):
            loader.set_epoch(loader.epoch + 1)
            self._between = end, loader.state_dict()


class _Pass:
    """What GradientState is told of an epoch under way."""

    #: Samples that Accelerate should keep of the last step: 0 is all, since nothing that fills is gathered.
    remainder = 0

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.step = -1

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in hand is the last."""
        return self.step == len(self.schedule) - 1


class _Checkpoint:
    """What ``save_state`` saves: written by the main process alone, the same on every rank."""

    def __init__(self, ours: AcceleratedLoader) -> None:
        self._ours = ours

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._ours.loader.state_dict(), "accumulate_step": self._ours._accelerator.step}

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, Mapping) or set(state) != {"loader", "accumulate_step"}:
            raise StateError(
                "the checkpoint has something else in this loader's place",
                remedy="call accelerated() and register_for_checkpointing() in the order of the script that saved;"
                " loaders that are made anew in each epoch want checkpoint=False",
            )
        self._ours._go_to(state["loader"])
        # Accelerate keeps it in a file for each rank: a rank that was not there before would count from 0, step
        # the optimizer at other batches than its peers, and they would wait for each other.
        self._ours._accelerator.step = state["accumulate_step"]


def _schedule(loader: Loader, state: Mapping[str, Any]) -> Schedule:
    """What is left of the epoch that a state stands in."""
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
            "a loader of a stream does not know its last batch before it has ended, as an Accelerator asks",
            expected="a rankfeed.Loader with a length",
            found=repr(loader.source),
            remedy="iterate it as it is, made with device=accelerator.device; for checkpoints call "
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
    """Accelerate's own, but where ranks have different numbers of rows, or rows that only fill.

    It would gather tensors of different sizes, which aborts a process under gloo and is undefined under NCCL, and
    cut what fills from the end alone.
    """
    now = accelerator.gradient_state.active_dataloader
    if not isinstance(now, _Pass) or now.step < 0:
        return original(input_data, use_gather_object)
    shares = now.schedule.shares(now.step)
    if all(share == (shares[0][0], shares[0][0]) for share in shares):
        return original(input_data, use_gather_object)
    if len(shares) != accelerator.num_processes:
        raise ArgumentError(
            "metrics of ranks that share their samples cannot be gathered from all processes",
            expected=f"{accelerator.num_processes} ranks with samples of their own",
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

    def together(values: Any) -> Any:
        if not next(are_rows):
            return accelerator.gather(values)  # as much of each rank, not one of each row
        missing = values.new_zeros((most - samples, *values.shape[1:]))
        return accelerator.gather(torch.cat([values[:samples], missing]))[kept]

    return operations.recursively_apply(together, input_data, error_on_other_type=True)


def _are_rows(operations: Any, data: Any, rows: list[int]) -> list[bool]:
    """Of each tensor, whether it has one entry for each row, on all ranks: no rank can decide that alone.

    Raises:
        ArgumentError: its lengths are not those of the rows, nor all the same; on every rank.
    """
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
                remedy="gather the whole batch: rows that only fill are left out here",
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
