"""Samplers for torch's own DataLoader, and `split`, the share of a rank and worker of any iterable.

Samplers run in the process that iterates the DataLoader, not in its workers, so the number and the kind of workers
change nothing. The rank is detected at the first ``len`` or ``iter``.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, Self, TypeVar, get_args

from torch.utils.data import Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from rankfeed._util.trainer import refuse_trainer_without_mixin
from rankfeed._util.validate import check_choice, check_int, check_iterable, invalid
from rankfeed.errors import ArgumentError, describe_error
from rankfeed.loading._compat import SamplerIterator, refuse_double_sharding
from rankfeed.loading.epoch import EpochProgress
from rankfeed.loading.lazy_topology import LazyTopology
from rankfeed.loading.state import encode_state, is_end, resume
from rankfeed.plan import Cursor, Plan, Schedule, Tail
from rankfeed.plan.schedule import MAX_BATCH_SIZE, ScheduleTail
from rankfeed.sources import Source
from rankfeed.sources.dataset_identity import DatasetNames
from rankfeed.topology import Topology

_Item = TypeVar("_Item")


class PlanSampler(Generic[_Item]):
    """Common part of the samplers: a plan, a position in it, and its state."""

    def __init__(
        self,
        num_samples_or_source: int | Source | Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail = "even",
        start: int = 0,
        topology: Topology | None = None,
    ) -> None:
        # torch's initialisers are not called: they need a process group.
        self._size, self._fingerprint = _size_of(num_samples_or_source)
        self._source = num_samples_or_source if isinstance(num_samples_or_source, Source) else None
        shuffle = check_choice("shuffle", shuffle, (False, True, "global")) is not False
        self.plan = Plan(self._size, shuffle="global" if shuffle else "none", seed=seed)
        self.batch_size = check_int("batch_size", batch_size, at_least=1, at_most=MAX_BATCH_SIZE)
        self.tail: Tail = check_choice("tail", tail, get_args(Tail))
        self.seed = self.plan.seed
        self.shuffle = shuffle
        self.drop_last = self.tail == "drop"
        self._topology = LazyTopology(topology)
        self._steps_yielded = 0  # by the latest iteration, that its progress does not have yet
        self._epoch_progress = EpochProgress()
        self._progress.go_to(Cursor(0, check_int("start", start, at_least=0)))

    @property
    def _progress(self) -> EpochProgress:
        """The progress, with the steps yielded so far: a cursor for each step would take a third of the time."""
        progress, steps = self._epoch_progress, self._steps_yielded
        if steps:
            progress.cursor = progress.begun.after(self._schedule(progress.begun), steps)
            self._steps_yielded = 0
        return progress

    @property
    def topology(self) -> Topology:
        """Rank and world size, detected when they are first needed."""
        return self._topology.resolve()

    @property
    def epoch(self) -> int:
        """The current epoch; iterating again after the last step begins the next."""
        return self._begun.epoch

    @property
    def _begun(self) -> Cursor:
        """Where the epoch was begun; instead of a loaded position at its end, the start of the next epoch."""
        progress = self._progress
        return progress.after_loading(
            progress.begun, lambda cursor: is_end(cursor, self._size, self.tail, self._schedule)
        )

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; in the current one a loaded position is kept."""
        self._progress.set_epoch(epoch)

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Refuse to be recreated around a sampler, as Lightning 2.6 tries to: that would shard a share again."""
        # Before __init__, which has no such arguments of torch's BatchSampler as frameworks pass.
        data = arguments[0] if arguments else options.get("sampler")
        if isinstance(data, Sampler):
            raise ArgumentError(
                f"{cls.__name__} does the sharding, and cannot be created around another sampler",
                expected="a number of samples, a source or a Dataset",
                found=type(data).__name__,
                remedy="in Lightning: Trainer(use_distributed_sampler=False); for predict(), a rankfeed.Loader "
                "or a rankfeed.DistributedSampler",
            )
        return super().__new__(cls)

    def schedule(self) -> Schedule:
        """The steps of the current epoch, or of what was left of it when a state was loaded."""
        return self._schedule(self._begun)

    def _schedule(self, begun: Cursor) -> Schedule:
        return begun.schedule(self.plan, self.batch_size, self.topology, self.tail)

    def __iter__(self) -> Iterator[_Item]:
        refuse_double_sharding(self.topology)
        progress = self._progress
        progress.restart()
        if progress.is_loaded:
            progress.go_to(self._begun)
        schedule = self.schedule()
        return SamplerIterator(self._run(schedule, progress.generation), schedule.global_batch_size)

    def state_dict(self, delivered_steps: int | None = None) -> dict[str, Any]:
        """The position in the data, the same on every rank.

        Args:
            delivered_steps: batches that the training loop has received since it began to iterate. A DataLoader
                with workers requests batches ahead, so only the loop knows; None counts those requested.
        """
        cursor = self._progress.cursor
        if delivered_steps is not None:
            steps = check_int("delivered_steps", delivered_steps, at_least=0)
            # Without steps, needs no rank.
            cursor = self._begun.after(self.schedule(), steps) if steps else self._progress.begun
        return encode_state(cursor, self.plan.describe(), self._fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on any number of ranks and with any batch size.

        Raises:
            StateError: it belongs to other data or another plan; says what differs.
        """
        _, _, cursor = resume(state, self.plan, self._source, fingerprint=self._fingerprint)
        self._progress.load(cursor)

    def _run(self, schedule: Schedule, generation: int) -> Iterator[_Item]:
        progress = self._epoch_progress
        for step, items in enumerate(self._steps(schedule)):
            # Counted before it is yielded: the consumer may abandon this generator afterwards.
            if progress.generation == generation:
                self._steps_yielded = step + 1
            if step + 1 == len(schedule):
                yield from items[:-1]
                items = items[-1:]
                progress.is_complete |= progress.generation == generation
            yield from items
        progress.is_complete |= progress.generation == generation  # without a step

    @abstractmethod
    def _steps(self, schedule: Schedule) -> Iterator[list[_Item]]: ...


class DistributedBatchSampler(PlanSampler[list[int]], Sampler[list[int]]):
    """Batches of sample ids for ``DataLoader(dataset, batch_sampler=...)``: each sample once, equal steps.

    Args:
        num_samples_or_source: number of samples, a source, or any map-style Dataset.
        batch_size: rows of this rank's batches.
        shuffle: whether to shuffle, by a keyed bijection that takes no memory.
        seed: of the order.
        tail: how an epoch ends (see :class:`rankfeed.Schedule`); ``valid(step)`` is the padding mask. With "even",
            resuming on more ranks than samples are left repeats samples: that is a warning.
        start: samples already consumed in the first epoch.
        topology: rank and world size; detected at the first ``len`` or ``iter`` if left out.

    Raises:
        PlanError: no samples, or fewer samples than ranks.

    Examples:
        >>> import rankfeed as rf
        >>> list(DistributedBatchSampler(5, 2, topology=rf.Topology(rank=1, world_size=2)))
        [[1, 2], [4]]
    """

    def __len__(self) -> int:
        refuse_trainer_without_mixin(f"a rankfeed.{type(self).__name__}", is_share=True)
        return len(self.schedule())

    @property
    def sampler(self) -> DistributedBatchSampler:
        """Itself: frameworks look for ``batch_sampler.sampler`` to call ``set_epoch``."""
        return self

    def valid(self, step: int) -> list[bool]:
        """Which rows of a step are samples; the others are padding."""
        valid: list[bool] = self.schedule().valid(step).tolist()
        return valid

    def _steps(self, schedule: Schedule) -> Iterator[list[list[int]]]:
        if self.tail == "even" and len(schedule) and schedule.is_filled(len(schedule) - 1):
            left = self.plan.num_samples - schedule.start
            warnings.warn(
                f"{left} samples are left of the epoch, fewer than the {schedule.world_size} ranks: ranks without "
                "one repeat a sample of the epoch, so that all ranks take one step. Mask it by valid(step), or "
                'use tail="drop".',
                stacklevel=3,
            )
        for step in range(len(schedule)):
            yield [schedule.batch(step).tolist()]


# Torch's `epoch` may be written by anyone; ours is set by set_epoch alone.
class DistributedSampler(PlanSampler[int], TorchDistributedSampler[Any]):  # type: ignore[override]
    """Sample ids for ``DataLoader(dataset, batch_size=..., sampler=...)``; also a torch ``DistributedSampler``.

    Pass it the DataLoader's batch size: then the global batches are those of every rankfeed loader, except that
    the rest of an epoch is one smaller step. The DataLoader divides the ids into batches, so where the rest is
    smaller than the number of ranks the steps can't be equal: that is a warning, which names
    :class:`DistributedBatchSampler`, which has no such limit.

    Args: as of :class:`DistributedBatchSampler`.

    Raises:
        PlanError: no samples, or fewer samples than ranks.

    Examples:
        >>> import rankfeed as rf
        >>> list(DistributedSampler(6, 2, topology=rf.Topology(rank=1, world_size=2)))
        [2, 3, 5]
    """

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.topology.rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return self.topology.world_size

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Sample ids that this rank yields in the current epoch."""
        return len(self)

    def _schedule(self, begun: Cursor) -> Schedule:
        """The last step may be smaller."""
        tail: ScheduleTail = "rest" if self.tail == "even" else self.tail
        return begun.schedule(self.plan, self.batch_size, self.topology, tail)

    def __len__(self) -> int:
        refuse_trainer_without_mixin(f"a rankfeed.{type(self).__name__}", is_share=True)
        schedule = self.schedule()
        before_last = len(schedule) - 1
        return before_last * self.batch_size + len(schedule.valid(before_last)) if len(schedule) else 0

    def _steps(self, schedule: Schedule) -> Iterator[list[int]]:
        if schedule.is_uneven:
            warnings.warn(
                f"{self.plan.num_samples} samples cannot be divided among {schedule.world_size} ranks in "
                f"equal steps of batch_size={self.batch_size} by a sampler of single ids: some ranks may take one "
                'step more, and wait there for the others. Use DistributedBatchSampler, or tail="drop" or "pad".',
                stacklevel=3,
            )
        for step in range(len(schedule)):
            yield schedule.batch(step).tolist()


def _size_of(samples: int | Source | Dataset[Any]) -> tuple[int, str]:
    """Number of samples, and the fingerprint of the data if it is known."""
    if isinstance(samples, Source):
        return len(samples), samples.fingerprint
    if isinstance(samples, str | bytes | type):
        raise invalid("num_samples_or_source", "a number of samples, a source or a Dataset", samples)
    if hasattr(samples, "__len__"):
        try:
            return len(samples), DatasetNames(samples).digest or ""
        except Exception as error:
            raise ArgumentError("the Dataset has no length", found=describe_error(error)) from error
    return check_int("num_samples_or_source", samples, at_least=0), ""


class _Split(IterableDataset[_Item]):
    def __init__(self, iterable: Iterable[_Item], topology: Topology | None) -> None:
        self.iterable = check_iterable("iterable", iterable)
        self._topology = LazyTopology(topology)

    @property
    def topology(self) -> Topology:
        return self._topology.resolve()

    def __iter__(self) -> Iterator[_Item]:
        refuse_double_sharding(self.topology)
        worker, num_workers = Topology.worker()
        # Ranks vary fastest: otherwise the totals of ranks would differ by up to the number of workers.
        first = self.topology.rank + worker * self.topology.world_size
        return islice(iter(self.iterable), first, None, self.topology.world_size * num_workers)


def split(iterable: Iterable[_Item], *, topology: Topology | None = None) -> IterableDataset[_Item]:
    """This (rank, worker)'s share of a stream, resolved when iteration starts.

    Every item goes to one worker of one rank, and the totals of ranks differ by at most one. Equal steps are not
    guaranteed, since the length of the stream is unknown.

    Args:
        iterable: the same stream on every rank and worker.
        topology: rank and world size; detected at the first ``iter`` if left out.

    Returns:
        an ``IterableDataset``, for a DataLoader or to be iterated directly.

    Examples:
        >>> import rankfeed as rf
        >>> list(split(range(7), topology=rf.Topology(rank=1, world_size=3)))
        [1, 4]
    """
    return _Split(iterable, topology)
