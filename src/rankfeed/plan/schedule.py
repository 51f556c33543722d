"""Which samples a rank reads at which step: the epoch's positions cut into steps, the steps into ranks.

Everything here is arithmetic on a plan and three numbers (rank, world size, batch size). Workers do not appear:
a batch is the same whoever computes it.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_choice, check_int, invalid
from rankfeed.errors import PlanError
from rankfeed.plan.plan import Int64

Tail = Literal["even", "drop", "pad"]

#: A larger batch has no use, and the ids of its rows no memory.
MAX_BATCH_SIZE = 2**31 - 1

#: Sample ids are worked out for several steps at once, about this many: numpy's calls cost the same for 256
#: numbers as for a few thousand. So many groups of steps are kept: a source is told of later ones beforehand.
_TOGETHER, _KEPT = 4096, 8


@runtime_checkable
class Order(Protocol):
    """What a schedule needs of a plan."""

    @property
    def lanes(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> Int64: ...


@runtime_checkable
class Ranks(Protocol):
    """What a schedule needs of a topology."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...


class Schedule:
    """The steps of one rank through one epoch, or through what is left of it.

    With the global batch ``G = batch_size * world_size`` and ``M`` samples left, the last steps are, by ``tail``:

    - "even": if G divides M, M / G full steps. If not, the last two steps share what is left after the full
      ones, the larger half first; if M < G there is one step. With batch_size 1 the rest joins the last step.
      Over the ranks sizes differ by at most one and none is empty; only where M < world_size some ranks have
      none, and get one stand-in row that :meth:`valid` masks.
    - "drop": M // G full steps; the rest is left out.
    - "pad": the last step is filled with the first samples of the epoch's order, masked by :meth:`valid`.

    Args:
        plan: the order of the samples.
        batch_size: rows of this rank at a full step.
        topology: this rank and the number of ranks.
        epoch: which epoch.
        start: samples already consumed in it, by whatever topology.
        tail: "even", "drop" or "pad".

    Raises:
        ArgumentError: an argument has an invalid type or value.
        PlanError: ``start`` lies beyond the epoch; an epoch has fewer samples than ranks (but under "pad").

    Examples:
        >>> from rankfeed.plan import Plan
        >>> from rankfeed.topology import Topology
        >>> schedule = Schedule(Plan(10, shuffle="none"), batch_size=2, topology=Topology(rank=1, world_size=2))
        >>> [schedule.batch(step).tolist() for step in range(len(schedule))]
        [[2, 3], [5, 6], [8, 9]]
    """

    def __init__(
        self,
        plan: Order,
        *,
        batch_size: int,
        topology: Ranks,
        epoch: int = 0,
        start: int = 0,
        tail: Tail = "even",
    ) -> None:
        if isinstance(plan, type) or not all(
            hasattr(plan, name) for name in ("num_samples", "lanes", "sample_ids")
        ):
            raise invalid("plan", "a rankfeed.Plan", plan)
        if isinstance(topology, type) or not all(hasattr(topology, name) for name in ("rank", "world_size")):
            raise invalid("topology", "a rankfeed.Topology", topology)
        self.plan = plan
        self.batch_size = check_int("batch_size", batch_size, at_least=1, at_most=MAX_BATCH_SIZE)
        self.rank, self.world_size = topology.rank, topology.world_size
        self.epoch = check_int("epoch", epoch, at_least=0)
        self.start = check_int("start", start, at_least=0)
        self.tail: Tail = check_choice("tail", tail, get_args(Tail))
        total = plan.num_samples
        if self.start > total:
            raise PlanError("start lies beyond the epoch", expected=f"at most {total}", found=self.start)
        if total < self.world_size and tail != "pad":
            raise PlanError(
                "an epoch has fewer samples than there are ranks",
                expected=f"at least {self.world_size} samples",
                found=total,
                remedy='train on fewer ranks, or take tail="pad", which masks the rows it repeats',
            )
        self.global_batch_size = self.batch_size * self.world_size
        self._full, self._last = cut(total - self.start, self.batch_size, self.world_size, tail)
        #: Steps of a group.
        self._steps = max(1, _TOGETHER // self.batch_size)
        #: Their numbers and batches, the last one made first.
        self._made: tuple[tuple[int, list[Int64]], ...] = ()

    def __len__(self) -> int:
        return self._full + len(self._last)

    def batch(self, step: int) -> Int64:
        """Sample ids of this rank at ``step`` (counted from ``start``): int64, batch_size of them at a full step.

        Raises:
            PlanError: there is no such step.
        """
        group, place = divmod(self._checked(step), self._steps)
        for number, batches in self._made:
            if number == group:
                return batches[place].copy()
        first = group * self._steps
        batches = self._batches(first, min(len(self), first + self._steps))
        # One assignment, so that threads need no lock.
        self._made = ((group, batches), *self._made[: _KEPT - 1])
        return batches[place].copy()

    def valid(self, step: int) -> npt.NDArray[np.bool_]:
        """Which rows of :meth:`batch` are samples of this step, and which only fill: bool, True where they are."""
        step = self._checked(step)
        if step < self._full:
            return np.ones(self.batch_size, bool)
        first, last, rows = self._share(step)
        return np.arange(rows) < last - first

    def is_filled(self, step: int) -> bool:
        """Whether rows of some rank only fill at ``step``, or may: the same answer on every rank."""
        low, high = self._bounds(self._checked(step))
        return self.tail == "pad" or high - low < self.world_size

    def global_batch(self, step: int) -> Int64:
        """Sample ids of all ranks together at ``step``, in the epoch's order.

        Under "pad" the samples that fill the last step are among them, at the end. The stand-in rows of ranks
        that have no sample (see "even") are not: they are no part of what is delivered.
        """
        low, high = self._bounds(self._checked(step))
        positions = np.arange(low, high)
        if self.tail == "pad":
            missing = self.global_batch_size - (high - low)
            positions = np.append(positions, np.arange(missing) % self.plan.num_samples)
        return self.plan.sample_ids(self.epoch, positions)

    def position_after(self, step: int) -> int:
        """Samples consumed once ``step`` is done, counted from the epoch's start."""
        return self._bounds(self._checked(step))[1]

    def first_position(self, step: int) -> int:
        """The first position of this rank's rows at ``step``: the epoch's count of samples before them."""
        step = self._checked(step)
        return self._bounds(step)[0] + self._share(step)[0]

    def shares(self, step: int) -> list[tuple[int, int]]:
        """Of each rank, its rows at ``step``, and how many of them are samples: the others only fill.

        Examples:
            >>> from rankfeed.plan import Plan
            >>> from rankfeed.topology import Topology
            >>> Schedule(Plan(5), batch_size=4, topology=Topology(rank=1, world_size=2), tail="pad").shares(0)
            [(4, 2), (4, 3)]
        """
        step = self._checked(step)
        shares = (self._share(step, rank) for rank in range(self.world_size))
        return [(rows, last - first) for first, last, rows in shares]

    @property
    def end(self) -> int:
        """Samples consumed when the last step is done, counted from the epoch's start."""
        return self._bounds(len(self) - 1)[1] if len(self) else self.start

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_made": ()}  # made again where it is needed: a step is a few integers

    def _checked(self, step: int) -> int:
        if type(step) is int and 0 <= step < self._full:
            return step
        step = check_int("step", step, at_least=0)
        if step >= len(self):
            raise PlanError("there is no such step", expected=f"less than {len(self)}", found=step)
        return step

    def _bounds(self, step: int) -> tuple[int, int]:
        """The stretch of positions that all ranks read at a step."""
        low = self.start + min(step, self._full) * self.global_batch_size
        if step < self._full:
            return low, low + self.global_batch_size
        index = step - self._full
        low += sum(self._last[:index])
        return low, low + self._last[index]

    def _share(self, step: int, rank: int | None = None) -> tuple[int, int, int]:
        """A rank's share of a step (this one's): from, to (counted within the step), rows with those that fill."""
        low, high = self._bounds(step)
        rank = self.rank if rank is None else rank
        first = rank * (high - low) // self.world_size
        last = (rank + 1) * (high - low) // self.world_size
        return first, last, self.batch_size if self.tail == "pad" else max(1, last - first)

    def _batches(self, step: int, until: int) -> list[Int64]:
        if self.plan.lanes == 1 and until <= self._full:  # equal stretches, equally far from each other
            low = self._bounds(step)[0] + self.rank * self.batch_size
            starts = np.arange(low, low + (until - step) * self.global_batch_size, self.global_batch_size)
            ids = self.plan.sample_ids(self.epoch, np.add.outer(starts, np.arange(self.batch_size)))
            return list(ids.reshape(len(starts), -1))
        positions = [self._positions(each) for each in range(step, until)]
        ids = self.plan.sample_ids(self.epoch, np.concatenate(positions))
        return np.split(ids, np.cumsum([len(each) for each in positions[:-1]]))

    def _positions(self, step: int) -> Int64:
        low, high = self._bounds(step)
        first, last, rows = self._share(step)
        positions = by_lane(low, high, self.plan.lanes, first, last)
        if rows == last - first:
            return positions
        # The ranks before this one took rank * rows rows, `first` of them real: the rest were fillers.
        filler = self.rank * rows - first
        fill = np.arange(filler, filler + rows - (last - first)) % self.plan.num_samples
        return np.concatenate([positions, fill])


def cut(samples: int, batch_size: int, world_size: int, tail: Tail) -> tuple[int, list[int]]:
    """Number of full steps, and the samples of the steps after them (two at most).

    Examples:
        >>> cut(10, batch_size=2, world_size=2, tail="even")
        (1, [3, 3])
        >>> cut(10, batch_size=2, world_size=2, tail="pad")
        (2, [2])
    """
    whole_batch = batch_size * world_size
    full, rest = divmod(samples, whole_batch)
    if rest == 0 or tail == "drop":
        return full, []
    if tail == "pad" or full == 0:
        return full, [rest]
    if batch_size == 1:
        return full - 1, [whole_batch + rest]
    shared = whole_batch + rest
    return full - 1, [shared - shared // 2, shared // 2]


def by_lane(low: int, high: int, lanes: int, first: int, last: int) -> Int64:
    """Positions ``first`` to ``last`` of the stretch [low, high) when that is sorted by (lane, place).

    A rank so gets samples that lie in few lanes, without anybody sorting the global batch.

    Returns:
        int64 array of ``last - first`` positions.

    Examples:
        >>> by_lane(4, 12, lanes=3, first=0, last=8).tolist()
        [6, 9, 4, 7, 10, 5, 8, 11]
    """
    if lanes == 1:
        return np.arange(low + first, low + last)
    # The stretch deals `every` positions to each lane, and one more to `more` of them, from lane `at` on.
    # So there are runs of lanes with equally many each, and within a run it is plain division.
    every, more = divmod(high - low, lanes)
    at = low % lanes
    around = max(0, at + more - lanes)
    runs = (
        (0, around, lanes - at, every + 1),
        (around, at, around + lanes - at, every),
        (at, min(at + more, lanes), 0, every + 1),
        (min(at + more, lanes), lanes, more, every),
    )
    parts, done = [], 0
    for start, stop, offset, each in runs:
        here = (stop - start) * each
        rows = np.arange(max(0, first - done), min(here, last - done))
        if rows.size:
            lane = rows // each
            rows -= lane * each
            rows *= lanes
            rows += lane + (low + offset)
            parts.append(rows)
        done += here
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
