"""What passes over epochs add up to: arithmetic on stretches of positions, whatever the number of samples.

The order is a pure function of position, so "each sample once" is "each position once". A pass that begins at a
place takes back all that was delivered from there on; what is left is the timeline that counts. On it each pass
reaches to where the next one began, and whatever a rank did not deliver until there is missing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rankfeed.plan import Schedule
from rankfeed.plan.plan import Int64
from rankfeed.plan.schedule import Tail
from rankfeed.topology import Topology

#: Samples are counted or named so many at a time.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Shape:
    """What cutting an epoch into steps needs of a plan; its "sample ids" are the positions themselves."""

    num_samples: int
    lanes: int

    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        return np.asarray(positions, np.int64)


@dataclass(frozen=True)
class Stretch:
    """A pass over an epoch, as far as it went and counts.

    Args:
        launch: number of the launch that it belongs to.
        epoch, start, batch_size, world_size, tail: of its schedule.
        steps: how many each rank delivered; ranks that are not in it delivered none.
        until: position at which another pass took over; None for none.
        left: whether its own launch went on to a later epoch.
    """

    launch: int
    epoch: int
    start: int
    batch_size: int
    world_size: int
    tail: Tail
    steps: Mapping[int, int]
    until: int | None = None
    left: bool = False

    def least(self) -> int:
        """Steps that all ranks delivered."""
        return min(self.steps.values()) if len(self.steps) == self.world_size else 0

    def most(self) -> int:
        """Steps that some rank delivered."""
        return max(self.steps.values(), default=0)


@dataclass(frozen=True)
class Missing:
    """Positions of an epoch that nobody delivered.

    Attributes:
        epoch: of which epoch.
        low, high: of all that lies between, where ``rank`` is None; else of one rank's share of it.
        samples: how many.
        rank: whose share it is.
        first_step: the first of them lies in this step of ``stretch``.
        stretch: the pass that they should have come in; None if there was none.
    """

    epoch: int
    low: int
    high: int
    samples: int
    rank: int | None = None
    first_step: int = 0
    stretch: Stretch | None = None


@dataclass
class Timeline:
    """Passes in the order they were begun, each taking back what lies behind its start.

    Args:
        shape: of the plan.

    Attributes:
        stretches: what counts, by epoch and position.
        again: samples taken back after they were delivered, by epoch.

    Examples:
        >>> line = Timeline(Shape(100, 1))
        >>> line.push(Stretch(0, 0, 0, 5, 2, "even", {0: 4, 1: 4}))
        >>> line.push(Stretch(1, 0, 30, 10, 1, "even", {0: 7}))
        >>> [(each.start, each.until) for each in line.stretches], dict(line.again)
        ([(0, 30), (30, None)], {0: 10})
    """

    shape: Shape
    stretches: list[Stretch] = field(default_factory=list)
    again: Counter[int] = field(default_factory=Counter)

    def push(self, new: Stretch) -> None:
        """A pass that began after all others."""
        place = new.epoch, new.start
        while self.stretches and (self.stretches[-1].epoch, self.stretches[-1].start) >= place:
            self._take_back(self.stretches.pop(), 0)
        if self.stretches:
            last = self.stretches[-1]
            if last.epoch == new.epoch:
                self._take_back(last, new.start)
                self.stretches[-1] = replace(last, until=new.start)
            elif last.launch == new.launch:
                self.stretches[-1] = replace(last, left=True)
        self.stretches.append(new)

    def _take_back(self, stretch: Stretch, low: int) -> None:
        again = sum(
            rows_before(self.shape, stretch, rank, steps, stretch.until)
            - rows_before(self.shape, stretch, rank, steps, low)
            for rank, steps in stretch.steps.items()
        )
        if again > 0:
            self.again[stretch.epoch] += again


def of_launch(shape: Shape, by_rank: Mapping[int, Timeline]) -> Timeline:
    """The timelines of a launch's ranks as one.

    A rank that was killed knows nothing of the passes that the others began afterwards.
    """
    keys: dict[tuple[int, int, int, Tail], dict[int, Stretch]] = {}
    for rank, timeline in by_rank.items():
        for each in timeline.stretches:
            keys.setdefault((each.epoch, each.start, each.batch_size, each.tail), {})[rank] = each
    merged = Timeline(shape)
    for timeline in by_rank.values():
        merged.again.update(timeline.again)
    # Of passes with one start, the one that fewer ranks are left in was taken back by the others.
    for _, parts in sorted(keys.items(), key=lambda item: (item[0][:2], len(item[1]))):
        untils = [part.until for part in parts.values() if part.until is not None]
        until = min(untils) if untils else None
        for rank, part in parts.items():
            if until is not None and part.until is None:
                merged._take_back(replace(part, steps={rank: part.steps[rank]}), until)
        one = next(iter(parts.values()))
        merged.push(
            replace(
                one,
                steps={rank: part.steps[rank] for rank, part in parts.items()},
                until=until,
                left=any(part.left for part in parts.values()),
            )
        )
    return merged


def schedule_of(shape: Shape, stretch: Stretch, rank: int = 0) -> Schedule:
    """The steps of a rank of a pass; its ids are positions.

    Raises:
        PlanError: there are none like this.
    """
    return _schedule(
        shape, stretch.epoch, stretch.start, stretch.batch_size, stretch.world_size, stretch.tail, rank
    )


@lru_cache(maxsize=128)  # each keeps some hundred KiB
def _schedule(
    shape: Shape, epoch: int, start: int, batch_size: int, world_size: int, tail: Tail, rank: int
) -> Schedule:
    topology = Topology(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    return Schedule(shape, batch_size=batch_size, topology=topology, epoch=epoch, start=start, tail=tail)


def reached(shape: Shape, stretch: Stretch, steps: int) -> int:
    """The position after so many steps."""
    return schedule_of(shape, stretch).position_after(steps - 1) if steps else stretch.start


def rows_before(shape: Shape, stretch: Stretch, rank: int, steps: int, limit: int | None = None) -> int:
    """Samples that a rank is given in so many steps; only those before a position, if there is a limit."""
    schedule = schedule_of(shape, stretch, rank)
    whole = min(steps, _steps_to(schedule, limit))
    # All steps but the last two are alike.
    full = min(whole, max(0, len(schedule) - 2))
    rows = full * stretch.batch_size + sum(int(schedule.valid(step).sum()) for step in range(full, whole))
    if limit is not None and whole < min(steps, len(schedule)):
        rows += int((_positions(schedule, whole) < limit).sum())
    return rows


def _steps_to(schedule: Schedule, limit: int | None) -> int:
    """Steps that lie before a position with all their samples."""
    if limit is None or limit >= schedule.end:
        return len(schedule)
    steps = max(0, min((limit - schedule.start) // schedule.global_batch_size, len(schedule)))
    while steps < len(schedule) and schedule.position_after(steps) <= limit:  # steps of a tail are smaller
        steps += 1
    while steps and schedule.position_after(steps - 1) > limit:  # or larger
        steps -= 1
    return steps


def _positions(schedule: Schedule, step: int) -> Int64:
    return schedule.batch(step)[schedule.valid(step)]


def by_habit(shape: Shape, stretches: list[Stretch]) -> list[Stretch]:
    """The passes of a timeline, those marked as left that came exactly as far as others that were.

    Nobody says why a launch ended before its epoch did. Where all its ranks stopped at the very position at which
    launches left other epochs for the next (a limit of batches an epoch), that is why.
    """
    limits = {
        reached(shape, each, each.most()) for each in stretches if each.left and not each.start and each.most()
    }
    return [
        each
        if each.start or each.least() != each.most() or reached(shape, each, each.most()) not in limits
        else replace(each, left=True)
        for each in stretches
    ]


def gaps(shape: Shape, stretches: list[Stretch]) -> Iterator[Missing]:
    """What is missing on a timeline, up to where its last pass was left."""
    # Some loaders are for every fifth epoch only: what launches do by themselves is no gap between them.
    jumps = {two.epoch - one.epoch for one, two in pairwise(stretches) if one.launch == two.launch}
    for number, each in enumerate(stretches):
        following = stretches[number + 1] if number + 1 < len(stretches) else None
        before = stretches[number - 1] if number else None
        if each.start and (before is None or before.epoch != each.epoch):
            yield Missing(each.epoch, 0, each.start, each.start)
        if before is not None and before.epoch < each.epoch - 1 and each.epoch - before.epoch not in jumps:
            for epoch in range(before.epoch + 1, each.epoch):
                yield Missing(epoch, 0, shape.num_samples, shape.num_samples)
        yield from _gaps_of(shape, each, expected_end(shape, each, following))


def expected_end(shape: Shape, stretch: Stretch, following: Stretch | None) -> int:
    """How far a pass has to have come: to where the next began; to the end, if another launch went on after it.

    The last of all, and one that its own launch left for another epoch, need not have come to the end.
    """
    end = schedule_of(shape, stretch).end
    if following is not None and following.epoch == stretch.epoch:
        return following.start
    furthest = reached(shape, stretch, stretch.most())
    if stretch.left or following is None:
        if furthest == end or stretch.left:
            return furthest
        return reached(shape, stretch, stretch.least())
    return end


def _gaps_of(shape: Shape, stretch: Stretch, end: int) -> Iterator[Missing]:
    most = stretch.most()
    came = reached(shape, stretch, most)
    for rank in range(stretch.world_size):
        steps = stretch.steps.get(rank, 0)
        if steps < most:
            due = rows_before(shape, stretch, rank, most, end)
            missing = due - rows_before(shape, stretch, rank, steps, end)
            if missing:
                low = reached(shape, stretch, steps)
                yield Missing(stretch.epoch, low, min(came, end), missing, rank, steps, stretch)
    if end > came:
        # What tail="drop" leaves out is nobody's.
        yield Missing(stretch.epoch, came, end, end - came, None, most, stretch)


def positions_of(shape: Shape, missing: Missing) -> Iterator[Int64]:
    """The positions that are missing, in arrays of some thousands: int64."""
    if missing.rank is None or missing.stretch is None:
        for low in range(missing.low, missing.high, _CHUNK):
            yield np.arange(low, min(low + _CHUNK, missing.high))
        return
    schedule = schedule_of(shape, missing.stretch, missing.rank)
    for step in range(missing.first_step, len(schedule)):
        positions = _positions(schedule, step)
        if len(positions) and int(positions.min()) >= missing.high:
            return
        yield positions[positions < missing.high]


def merged(shape: Shape, launches: Iterable[Timeline]) -> Timeline:
    """The timelines of launches, one after the other, as one."""
    line = Timeline(shape)
    for launch in launches:
        line.again.update(launch.again)
        for stretch in launch.stretches:
            line.push(stretch)
    return line
