"""Coverage of an epoch: which positions ranks delivered, computed from the number of steps that each rank took.

The order is a pure function of the position, so "each sample once" is "each position once". A rank delivers the
steps of its schedule one after another, so that a number of steps for each rank describes what was delivered.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_int
from rankfeed.plan.lanes import RoundRobinLanes, ScrambledLanes, lanes_in_use
from rankfeed.plan.plan import ORDER, Int64
from rankfeed.plan.schedule import Schedule, ScheduleTail
from rankfeed.topology import Topology

#: Positions that are listed together.
_CHUNK = 1 << 16
_ONE_LANE = RoundRobinLanes(1)


@dataclass(frozen=True)
class PositionOrder:
    """An order whose sample ids are the positions themselves: the shape of a plan, without its permutation."""

    num_samples: int
    lanes: RoundRobinLanes | ScrambledLanes = _ONE_LANE

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> PositionOrder:
        """The positions of a plan that was described in a ledger; raises an ArgumentError."""

        def integer(name: str, at_least: int = 1) -> int:
            return check_int(name, plan.get(name), at_least=at_least, at_most=1 << 62)

        samples, lanes = integer("samples"), integer("lanes")
        if check_int("order", plan.get("order", 1), at_least=1, at_most=ORDER) == 1:
            return cls(samples, RoundRobinLanes(lanes))
        if not (groups := integer("groups", at_least=0)):
            return cls(samples)
        lanes, seed = lanes_in_use(lanes, samples), check_int("seed", plan.get("seed"))
        return cls(samples, ScrambledLanes(samples, lanes, min(groups, lanes), seed))

    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        return np.asarray(positions, np.int64)

    def step_ids(self, epoch: int, starts: Int64, size: int, first: int, last: int) -> Int64:
        return self.lanes.positions(epoch, *self.lanes.arrange(epoch, starts, size, first, last))


@dataclass(frozen=True)
class Coverage:
    """The positions of an epoch that its ranks delivered in one pass, by schedules of the same options.

    Examples:
        >>> coverage = Coverage(PositionOrder(10), 0, 0, 2, 2, "even", {0: 2, 1: 1})
        >>> len(coverage), [(gap.low, gap.high, gap.samples, gap.rank) for gap in coverage.gaps(10)]
        (5, [(4, 7, 2, 1), (7, 10, 3, None)])
    """

    order: PositionOrder  # its lanes divide the positions of a step among the ranks
    epoch: int
    start: int
    batch_size: int
    world_size: int
    tail: ScheduleTail
    steps: dict[int, int]  # that each rank delivered; absent ranks delivered none
    launch: int = 0  # of the job, counted from 0
    until: int = sys.maxsize  # the position at which another pass took over
    left: bool = False  # whether its launch continued with a later epoch

    @property
    def least(self) -> int:
        """Steps that all ranks delivered."""
        return min(self.steps.values()) if len(self.steps) == self.world_size else 0

    @property
    def most(self) -> int:
        """Steps that any rank delivered."""
        return max(self.steps.values(), default=0)

    def __len__(self) -> int:
        """Positions that were delivered, up to where another pass took over."""
        return self.samples_from(0)

    def schedule(self, rank: int = 0) -> Schedule:
        """The steps of a rank; its sample ids are positions."""
        return _schedule(self.order, self.epoch, self.start, self.batch_size, self.world_size, self.tail, rank)

    def reached(self, steps: int) -> int:
        """The position after the first steps."""
        return self.schedule().position_after(steps - 1) if steps else self.start

    def samples(self, rank: int, steps: int, limit: int = sys.maxsize) -> int:
        """Samples of a rank in its first steps, at positions below the limit."""
        schedule = self.schedule(rank)
        steps = min(steps, len(schedule))
        complete = bisect_right(range(steps), limit, key=schedule.position_after)
        full = min(complete, max(0, len(schedule) - 2))  # all steps but the last two are alike
        samples = full * self.batch_size + sum(int(schedule.valid(step).sum()) for step in range(full, complete))
        return samples + int((_positions(schedule, complete) < limit).sum()) if complete < steps else samples

    def samples_from(self, low: int) -> int:
        """Samples that were delivered from a position on, up to where another pass took over."""
        return sum(
            max(0, self.samples(rank, steps, self.until) - self.samples(rank, steps, low))
            for rank, steps in self.steps.items()
        )

    def gaps(self, end: int) -> Iterator[Gap]:
        """What is missing below the position ``end``: shares of ranks, then the positions that no rank reached."""
        reached = self.reached(self.most)
        for rank in range(self.world_size):
            steps = self.steps.get(rank, 0)
            if steps == self.most:
                continue
            if missing := self.samples(rank, self.most, end) - self.samples(rank, steps, end):
                yield Gap(self.epoch, self.reached(steps), min(reached, end), missing, self, rank, steps)
        if end > reached:
            yield Gap(self.epoch, reached, end, end - reached, self)


@lru_cache(maxsize=128)  # each takes some hundred KiB
def _schedule(
    order: PositionOrder, epoch: int, start: int, batch_size: int, world_size: int, tail: ScheduleTail, rank: int
) -> Schedule:
    topology = Topology(rank=rank, world_size=world_size)
    return Schedule(order, batch_size=batch_size, topology=topology, epoch=epoch, start=start, tail=tail)


def _positions(schedule: Schedule, step: int) -> Int64:
    return schedule.batch(step)[schedule.valid(step)]


@dataclass(frozen=True)
class Gap:
    """Positions of an epoch that were not delivered."""

    epoch: int
    low: int
    high: int
    samples: int  # how many of the positions between these bounds are missing
    coverage: Coverage | None = None  # the pass that should have delivered them; None: no pass covers them
    rank: int | None = None  # whose share is missing; None: everything between the bounds is missing
    first_step: int = 0  # steps that this rank delivered

    def positions(self) -> Iterator[Int64]:
        """The missing positions, in int64 arrays of some thousands."""
        if self.rank is None or self.coverage is None:
            for low in range(self.low, self.high, _CHUNK):
                yield np.arange(low, min(low + _CHUNK, self.high))
            return
        schedule = self.coverage.schedule(self.rank)
        for step in range(self.first_step, len(schedule)):
            if self.coverage.reached(step) >= self.high:
                return
            positions = _positions(schedule, step)
            yield positions[positions < self.high]

    def __str__(self) -> str:
        where = f"epoch {self.epoch}, positions {self.low:,} to {self.high:,}: {self.samples:,} samples"
        if self.coverage is None:
            return f"{where} are in no ledger"
        launch = f"launch {self.coverage.launch + 1}"
        if self.rank is None:
            return f"{where}: {launch} stopped before them, and the next one began after them"
        stopped = f"stopped after {self.first_step:,} steps"
        reason = stopped if self.rank in self.coverage.steps else "left no ledger"
        return f"{where}: the share of rank {self.rank} in {launch}, which {reason}"
