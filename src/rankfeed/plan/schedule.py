"""Which samples a rank reads at which step: the positions of an epoch divided into steps, and steps into ranks.

Arithmetic on a plan, rank, world size and batch size. Workers do not appear: any of them computes the same batch.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_choice, check_instance, check_int, invalid
from rankfeed.errors import PlanError
from rankfeed.plan.plan import Int64
from rankfeed.topology import Topology

Tail = Literal["even", "drop", "pad"]
#: "rest" is for integrations whose consumer divides the rows of a rank into batches itself.
ScheduleTail = Literal[Tail, "rest"]

#: Upper limit of ``batch_size``.
MAX_BATCH_SIZE = 2**31 - 1

#: Sample ids computed at once, for a group of steps: numpy calls take as long for 256 numbers as for thousands.
_GROUP_IDS = 4096
#: Groups kept: later steps are requested ahead, as hints for the source.
_GROUPS = 8


@runtime_checkable
class SampleOrder(Protocol):
    """The part of a plan that a schedule needs."""

    @property
    def num_samples(self) -> int: ...
    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> Int64: ...
    def step_ids(self, epoch: int, starts: Int64, size: int, first: int, last: int) -> Int64: ...


class Schedule:
    """The steps of one rank through one epoch, or through the rest of it.

    With the global batch ``G = batch_size * world_size`` and ``M`` samples left, the last steps depend on
    ``tail``:

    - "even": if G divides M, there are M / G full steps. If not, the last two steps share the rest, the larger
      half first; if M < G there is one step. With batch_size 1 the rest joins the last step. Sizes on the ranks
      differ by at most one and none is empty, except if M < world_size: then ranks without a sample get one row
      that :meth:`valid` masks.
    - "drop": M // G full steps; the rest is left out.
    - "pad": the last step is filled with the first samples of the epoch, masked by :meth:`valid`.
    - "rest": full steps, then one step of the rest, in which a rank may have no row. For consumers that divide the
      rows of a rank into batches themselves, so that only their last batch may be smaller.

    Args:
        plan: the order of the samples.
        batch_size: rows per rank at a full step.
        topology: rank and world size.
        epoch: number of the epoch.
        start: samples already consumed in it, by any topology.
        tail: "even", "drop", "pad" or "rest".

    Raises:
        ArgumentError: an argument has an invalid type or value.
        PlanError: ``start`` is beyond the epoch, or an epoch has fewer samples than ranks (except with "pad").

    Examples:
        >>> from rankfeed.plan import Plan
        >>> from rankfeed.topology import Topology
        >>> schedule = Schedule(Plan(10, shuffle="none"), batch_size=2, topology=Topology(rank=1, world_size=2))
        >>> [schedule.batch(step).tolist() for step in range(len(schedule))]
        [[2, 3], [5, 6], [8, 9]]
    """

    def __init__(
        self,
        plan: SampleOrder,
        *,
        batch_size: int,
        topology: Topology,
        epoch: int = 0,
        start: int = 0,
        tail: ScheduleTail = "even",
    ) -> None:
        if isinstance(plan, type) or not isinstance(plan, SampleOrder):
            raise invalid("plan", "a rankfeed.Plan", plan)
        check_instance("topology", topology, Topology, "a rankfeed.Topology")
        self.plan = plan
        self.batch_size = check_int("batch_size", batch_size, at_least=1, at_most=MAX_BATCH_SIZE)
        self.rank, self.world_size = topology.rank, topology.world_size
        self.epoch = check_int("epoch", epoch, at_least=0)
        self.start = check_int("start", start, at_least=0)
        self.tail: ScheduleTail = check_choice("tail", tail, get_args(ScheduleTail))
        total = plan.num_samples
        if self.start > total:
            raise PlanError(
                "start is beyond the epoch",
                expected=f"at most {total}",
                found=self.start,
                where=f"epoch {self.epoch}, rank {self.rank}",
                remedy="start is the number of samples already consumed in this epoch",
            )
        where = f"epoch {self.epoch}, rank {self.rank} of {self.world_size}"
        refuse_short_epoch(total, self.world_size, tail, where)
        self.global_batch_size = self.batch_size * self.world_size
        self._full, self._last = split_steps(total - self.start, self.batch_size, self.world_size, tail)
        self._group_steps = max(1, _GROUP_IDS // self.batch_size)
        #: Number of the groups computed last, with what `batches` returned, latest first.
        self._groups: tuple[tuple[int, Int64, Sequence[int]], ...] = ()

    def __len__(self) -> int:
        return self._full + len(self._last)

    def batch(self, step: int) -> Int64:
        """Sample ids of this rank at ``step`` (counted from ``start``): int64 [batch_size] at a full step.

        Raises:
            PlanError: there is no such step.
        """
        index, place = divmod(self._checked(step), self._group_steps)
        group = next((candidate for candidate in self._groups if candidate[0] == index), None)
        if group is None:
            first = index * self._group_steps
            group = index, *self.batches(range(first, min(len(self), first + self._group_steps)))
            # One assignment, so that threads need no lock.
            self._groups = (group, *self._groups[: _GROUPS - 1])
        _, ids, edges = group
        return ids[edges[place] : edges[place + 1]].copy()

    def batches(self, steps: range) -> tuple[Int64, Sequence[int]]:
        """Sample ids of this rank at ascending steps (at least one), and where those of each begin and end.

        Examples:
            >>> from rankfeed.plan import Plan
            >>> from rankfeed.topology import Topology
            >>> schedule = Schedule(Plan(7, shuffle="none"), batch_size=3, topology=Topology())
            >>> schedule.batches(range(0, 3))
            (array([0, 1, 2, 3, 4, 5, 6]), [0, 3, 5, 7])
        """
        self._checked(steps[-1])
        full = steps[: len(range(steps.start, self._full, steps.step))]
        parts = [self._last_ids(step) for step in steps[len(full) :]]
        edges = accumulate([self.batch_size] * len(full) + [len(part) for part in parts], initial=0)
        if full:
            starts = self.start + np.arange(full.start, full.stop, full.step) * self.global_batch_size
            first = self.rank * self.batch_size
            ids = self.plan.step_ids(self.epoch, starts, self.global_batch_size, first, first + self.batch_size)
            parts.insert(0, ids.reshape(-1))
        return np.concatenate(parts), [*edges]

    def valid(self, step: int) -> npt.NDArray[np.bool_]:
        """Mask of :meth:`batch`: bool [rows], False for padding."""
        step = self._checked(step)
        if step < self._full:
            return np.ones(self.batch_size, bool)
        first, last, rows = self._share(step)
        return np.arange(rows) < last - first

    def is_filled(self, step: int) -> bool:
        """Whether some rank may have padding rows at ``step``: the same answer on every rank."""
        if self._checked(step) < self._full:
            return self.tail == "pad"
        low, high = self._bounds(step)
        return self.tail == "pad" or (self.tail != "rest" and high - low < self.world_size)

    def global_batch(self, step: int) -> Int64:
        """Sample ids of all ranks together at ``step``, in the order of the epoch.

        With "pad", the padding of the last step is included, at the end. The masked rows of ranks without a sample
        (see "even") are not.
        """
        low, high = self._bounds(self._checked(step))
        positions = np.arange(low, high)
        if self.tail == "pad":
            missing = self.global_batch_size - (high - low)
            positions = np.append(positions, np.arange(missing) % self.plan.num_samples)
        return self.plan.sample_ids(self.epoch, positions)

    def position_after(self, step: int) -> int:
        """Samples consumed after ``step``, counted from the start of the epoch."""
        if type(step) is int and 0 <= step < self._full:
            return self.start + (step + 1) * self.global_batch_size
        return self._bounds(self._checked(step))[1]

    def first_position(self, step: int) -> int:
        """Position of this rank's first row at ``step``, counted from the start of the epoch."""
        if self._checked(step) < self._full:
            return self.start + step * self.global_batch_size + self.rank * self.batch_size
        return self._bounds(step)[0] + self._share(step)[0]

    def shares(self, step: int) -> list[tuple[int, int]]:
        """For each rank, the number of rows at ``step``, and how many of them are not padding."""
        step = self._checked(step)
        shares = (self._share(step, rank) for rank in range(self.world_size))
        return [(rows, last - first) for first, last, rows in shares]

    @property
    def is_uneven(self) -> bool:
        """Whether the last step has fewer samples than there are ranks, and no padding ("rest" only)."""
        return self.tail == "rest" and 0 < sum(self._last) < self.world_size

    @property
    def end(self) -> int:
        """Samples consumed after the last step, counted from the start of the epoch."""
        return self._bounds(len(self) - 1)[1] if len(self) else self.start

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_groups": ()}  # computed again: a step is a few integers

    def _checked(self, step: int) -> int:
        if type(step) is int and 0 <= step < self._full:
            return step
        step = check_int("step", step, at_least=0)
        if step >= len(self):
            raise PlanError(
                "no such step",
                expected=f"less than {len(self)}, counted from start={self.start}",
                found=step,
                where=f"epoch {self.epoch}, rank {self.rank}",
            )
        return step

    def _bounds(self, step: int) -> tuple[int, int]:
        """The interval of positions that all ranks read at a step."""
        low = self.start + min(step, self._full) * self.global_batch_size
        if step < self._full:
            return low, low + self.global_batch_size
        index = step - self._full
        low += sum(self._last[:index])
        return low, low + self._last[index]

    def _share(self, step: int, rank: int | None = None) -> tuple[int, int, int]:
        """Share of a rank in a step: first and last (counted within the step), and rows including padding."""
        low, high = self._bounds(step)
        rank = self.rank if rank is None else rank
        first = rank * (high - low) // self.world_size
        last = (rank + 1) * (high - low) // self.world_size
        if self.tail == "rest":
            return first, last, last - first
        return first, last, self.batch_size if self.tail == "pad" else max(1, last - first)

    def _last_ids(self, step: int) -> Int64:
        """Sample ids of this rank at a step after the full ones."""
        low, high = self._bounds(step)
        first, last, rows = self._share(step)
        ids: Int64 = self.plan.step_ids(self.epoch, np.array([low]), high - low, first, last)[0]
        if rows == last - first:
            return ids
        # The ranks before this one have rank * rows rows, of which `first` are samples; the others are padding.
        before = self.rank * rows - first
        padding = np.arange(before, before + rows - (last - first)) % self.plan.num_samples
        return np.concatenate([ids, self.plan.sample_ids(self.epoch, padding)])


def refuse_short_epoch(samples: int, world_size: int, tail: ScheduleTail, where: str) -> None:
    """Raise PlanError if some rank would have no sample, and no padding either."""
    if samples < world_size and tail != "pad":
        raise PlanError(
            "an epoch has fewer samples than there are ranks",
            expected=f"at least {world_size} samples",
            found=samples,
            where=where,
            remedy='train on fewer ranks, or use tail="pad", which masks repeated rows',
        )


def split_steps(samples: int, batch_size: int, world_size: int, tail: ScheduleTail) -> tuple[int, list[int]]:
    """Number of full steps, and the samples of the steps after them (at most two)."""
    global_batch = batch_size * world_size
    full, rest = divmod(samples, global_batch)
    if rest == 0 or tail == "drop":
        return full, []
    if tail in ("pad", "rest") or full == 0:
        return full, [rest]
    if batch_size == 1:
        return full - 1, [global_batch + rest]
    shared = global_batch + rest
    return full - 1, [shared - shared // 2, shared // 2]
