"""What passes over epochs add up to: arithmetic on ranges of positions, for any number of samples.

The order is a pure function of the position, so "each sample once" is "each position once". A pass that begins at
a position takes back everything that was delivered from there on; what is left is the timeline that counts. On it
each pass reaches to where the next one began, and what a rank did not deliver until there is missing.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_int
from rankfeed.plan import Schedule
from rankfeed.plan.lanes import RoundRobinLanes, ScrambledLanes, lanes_in_use
from rankfeed.plan.plan import ORDER, Int64
from rankfeed.plan.schedule import Tail
from rankfeed.topology import Topology

#: Positions that are listed together.
_CHUNK = 1 << 16
#: Of the epochs that a launch skips, the first are counted as missing: any number may be passed to `set_epoch`.
_EPOCHS = 1000


@dataclass(frozen=True)
class PlanShape:
    """What a schedule needs of a plan; its "sample ids" are the positions themselves."""

    num_samples: int
    lanes: RoundRobinLanes | ScrambledLanes

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> PlanShape:
        """The shape of a plan that was described in a ledger; raises an ArgumentError."""

        def integer(name: str, at_least: int = 1) -> int:
            return check_int(name, plan.get(name), at_least=at_least, at_most=1 << 62)

        samples, lanes = integer("samples"), integer("lanes")
        if check_int("order", plan.get("order", 1), at_least=1, at_most=ORDER) == 1:
            return cls(samples, RoundRobinLanes(lanes))
        if not (groups := integer("groups", at_least=0)):
            return cls(samples, RoundRobinLanes(1))
        lanes, seed = lanes_in_use(lanes, samples), check_int("seed", plan.get("seed"))
        return cls(samples, ScrambledLanes(samples, lanes, min(groups, lanes), seed))

    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        return np.asarray(positions, np.int64)

    def step_ids(self, epoch: int, starts: Int64, size: int, first: int, last: int) -> Int64:
        return self.lanes.positions(epoch, *self.lanes.arrange(epoch, starts, size, first, last))


@dataclass(frozen=True)
class PositionRange:
    """The positions of a pass over an epoch, as far as its ranks delivered them."""

    shape: PlanShape
    launch: int
    epoch: int
    start: int
    batch_size: int
    world_size: int
    tail: Tail
    steps: Mapping[int, int]  # delivered by each rank; absent ranks delivered none
    until: int = sys.maxsize  # position at which another pass took over
    left: bool = False  # its own launch continued with a later epoch

    @property
    def least(self) -> int:
        """Steps that all ranks delivered."""
        return min(self.steps.values()) if len(self.steps) == self.world_size else 0

    @property
    def most(self) -> int:
        """Steps that some rank delivered."""
        return max(self.steps.values(), default=0)

    def schedule(self, rank: int = 0) -> Schedule:
        """The steps of a rank; its ids are positions."""
        return _schedule(self.shape, self.epoch, self.start, self.batch_size, self.world_size, self.tail, rank)

    def reached(self, steps: int) -> int:
        """The position after the first steps."""
        return self.schedule().position_after(steps - 1) if steps else self.start

    def rows(self, rank: int, steps: int, limit: int) -> int:
        """Samples of a rank in its first steps, without those at the limit or behind it."""
        schedule = self.schedule(rank)
        steps = min(steps, len(schedule))
        whole = bisect_right(range(steps), limit, key=schedule.position_after)
        full = min(whole, max(0, len(schedule) - 2))  # all steps but the last two are alike
        rows = full * self.batch_size + sum(int(schedule.valid(step).sum()) for step in range(full, whole))
        return rows + int((_positions(schedule, whole) < limit).sum()) if whole < steps else rows

    def rows_from(self, low: int) -> int:
        """Samples that its ranks delivered from a position on, up to where another pass took over."""
        return sum(
            max(0, self.rows(rank, steps, self.until) - self.rows(rank, steps, low))
            for rank, steps in self.steps.items()
        )


@lru_cache(maxsize=128)  # each takes some hundred KiB
def _schedule(
    shape: PlanShape, epoch: int, start: int, batch_size: int, world_size: int, tail: Tail, rank: int
) -> Schedule:
    topology = Topology(rank=rank, world_size=world_size)
    return Schedule(shape, batch_size=batch_size, topology=topology, epoch=epoch, start=start, tail=tail)


def _positions(schedule: Schedule, step: int) -> Int64:
    return schedule.batch(step)[schedule.valid(step)]


@dataclass(frozen=True)
class MissingRange:
    """Positions of an epoch that were not delivered."""

    epoch: int
    low: int
    high: int
    samples: int
    rank: int | None = None  # whose share it is; None: everything between the bounds
    first_step: int = 0  # of the pass in which the first of them is
    source: PositionRange | None = None  # the pass that should have delivered them

    def positions(self) -> Iterator[Int64]:
        """The missing positions, in int64 arrays of some thousands."""
        if self.rank is None or self.source is None:
            for low in range(self.low, self.high, _CHUNK):
                yield np.arange(low, min(low + _CHUNK, self.high))
            return
        schedule = self.source.schedule(self.rank)
        for step in range(self.first_step, len(schedule)):
            if self.source.reached(step) >= self.high:
                return
            positions = _positions(schedule, step)
            yield positions[positions < self.high]

    def __str__(self) -> str:
        where = f"epoch {self.epoch}, positions {self.low:,} to {self.high:,}: {self.samples:,} samples"
        if self.source is None:
            return f"{where} are in no ledger"
        launch = f"launch {self.source.launch + 1}"
        if self.rank is None:
            return f"{where}: {launch} stopped before them, and the next one began after them"
        came = f"stopped after {self.first_step:,} steps" if self.rank in self.source.steps else "left no ledger"
        return f"{where}: the share of rank {self.rank} in {launch}, which {came}"


@dataclass
class DeliveryTimeline:
    """Passes in the order in which they began, each taking back what was delivered from its start on."""

    ranges: list[PositionRange] = field(default_factory=list)  # what counts, by epoch and position
    again: Counter[int] = field(default_factory=Counter)  # by epoch, samples that were taken back

    def push(self, new: PositionRange) -> None:
        """Add a pass that began after all others."""
        while self.ranges and (self.ranges[-1].epoch, self.ranges[-1].start) >= (new.epoch, new.start):
            self.again[self.ranges[-1].epoch] += self.ranges.pop().rows_from(0)
        if self.ranges:
            last = self.ranges[-1]
            if last.epoch == new.epoch:
                self.again[last.epoch] += last.rows_from(new.start)
                self.ranges[-1] = replace(last, until=new.start)
            elif last.launch == new.launch:
                self.ranges[-1] = replace(last, left=True)
        self.ranges.append(new)


def join_ranks(by_rank: Mapping[int, DeliveryTimeline]) -> DeliveryTimeline:
    """The timeline of a launch from those of its ranks: a killed rank knows nothing of passes begun afterwards."""
    keys: dict[tuple[int, int, int, Tail], dict[int, PositionRange]] = {}
    joined = DeliveryTimeline()
    for rank, timeline in by_rank.items():
        joined.again.update(timeline.again)
        for each in timeline.ranges:
            keys.setdefault((each.epoch, each.start, each.batch_size, each.tail), {})[rank] = each
    # Of passes with one start, the one that fewer ranks have kept was taken back by the others.
    for _, parts in sorted(keys.items(), key=lambda item: (item[0][:2], len(item[1]))):
        until = min(part.until for part in parts.values())
        for part in parts.values():
            joined.again[part.epoch] += part.rows_from(until)
        steps = {rank: part.steps[rank] for rank, part in parts.items()}
        left = any(part.left for part in parts.values())
        joined.push(replace(next(iter(parts.values())), steps=steps, until=until, left=left))
    return joined


def join_launches(launches: Iterable[DeliveryTimeline]) -> DeliveryTimeline:
    """The timelines of launches, one after the other, as one.

    Passes that end where others were left, by a limit of batches an epoch, are marked as left too.
    """
    line = DeliveryTimeline()
    for launch in launches:
        line.again.update(launch.again)
        for each in launch.ranges:
            line.push(each)
    limits = {each.reached(each.most) for each in line.ranges if each.left and not each.start and each.most}
    for number, each in enumerate(line.ranges):
        if not each.start and each.least == each.most and each.reached(each.most) in limits:
            line.ranges[number] = replace(each, left=True)
    return line


def missing_ranges(ranges: list[PositionRange]) -> Iterator[MissingRange]:
    """What is missing on a timeline, up to where its last pass ended."""
    # Some loaders are used in every fifth epoch only: what a launch skips is no gap between launches.
    jumps = {two.epoch - one.epoch for one, two in pairwise(ranges) if one.launch == two.launch}
    for before, each, following in zip([None, *ranges], ranges, [*ranges[1:], None], strict=False):
        if each.start and (before is None or before.epoch != each.epoch):
            yield MissingRange(each.epoch, 0, each.start, each.start)
        if before is not None and before.epoch < each.epoch - 1 and each.epoch - before.epoch not in jumps:
            samples = each.shape.num_samples
            for epoch in range(before.epoch + 1, min(each.epoch, before.epoch + 1 + _EPOCHS)):
                yield MissingRange(epoch, 0, samples, samples)
        end, reached = expected_end(each, following), each.reached(each.most)
        for rank in range(each.world_size):
            steps = each.steps.get(rank, 0)
            missing = each.rows(rank, each.most, end) - each.rows(rank, steps, end) if steps < each.most else 0
            if missing:
                yield MissingRange(each.epoch, each.reached(steps), min(reached, end), missing, rank, steps, each)
        if end > reached:
            yield MissingRange(each.epoch, reached, end, end - reached, None, each.most, each)


def expected_end(each: PositionRange, following: PositionRange | None) -> int:
    """The position that a pass must have reached."""
    end = each.schedule().end
    if following is not None and following.epoch == each.epoch:
        return following.start
    furthest = each.reached(each.most)
    if each.left or following is None:
        return furthest if furthest == end or each.left else each.reached(each.least)
    return end
