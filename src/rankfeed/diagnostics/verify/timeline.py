"""Which deliveries of a job count: passes over epochs, of all ranks and launches, as one timeline.

A pass that begins at a position takes back everything that was delivered from there on; the rest is the timeline.
On it each pass reaches to where the next one began, and what a rank did not deliver until there is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rankfeed.plan.coverage import Coverage, Gap
from rankfeed.plan.schedule import ScheduleTail

#: Of the epochs that a launch skips, the first are counted as missing: any number may be passed to `set_epoch`.
_EPOCHS = 1000


@dataclass
class DeliveryTimeline:
    """Passes in the order in which they began, each taking back what was delivered from its start on."""

    passes: list[Coverage] = field(default_factory=list)  # what counts, by epoch and position
    again: Counter[int] = field(default_factory=Counter)  # by epoch, samples that were taken back

    def push(self, new: Coverage) -> None:
        """Add a pass that began after all others."""
        while self.passes and (self.passes[-1].epoch, self.passes[-1].start) >= (new.epoch, new.start):
            self.again[self.passes[-1].epoch] += self.passes.pop().samples_from(0)
        if self.passes:
            last = self.passes[-1]
            if last.epoch == new.epoch:
                self.again[last.epoch] += last.samples_from(new.start)
                self.passes[-1] = replace(last, until=new.start)
            elif last.launch == new.launch:
                self.passes[-1] = replace(last, left=True)
        self.passes.append(new)


def join_ranks(by_rank: Mapping[int, DeliveryTimeline]) -> DeliveryTimeline:
    """The timeline of a launch from those of its ranks: a killed rank knows nothing of passes begun afterwards."""
    keys: dict[tuple[int, int, int, ScheduleTail], dict[int, Coverage]] = {}
    joined = DeliveryTimeline()
    for rank, timeline in by_rank.items():
        joined.again.update(timeline.again)
        for part in timeline.passes:
            keys.setdefault((part.epoch, part.start, part.batch_size, part.tail), {})[rank] = part
    # Of passes with one start, the one that fewer ranks have kept was taken back by the others.
    for _, parts in sorted(keys.items(), key=lambda item: (item[0][:2], len(item[1]))):
        until = min(part.until for part in parts.values())
        for part in parts.values():
            joined.again[part.epoch] += part.samples_from(until)
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
        for coverage in launch.passes:
            line.push(coverage)
    from_start = [(index, coverage) for index, coverage in enumerate(line.passes) if not coverage.start]
    limits = {coverage.reached(coverage.most) for _, coverage in from_start if coverage.left and coverage.most}
    for index, coverage in from_start:
        if coverage.least == coverage.most and coverage.reached(coverage.most) in limits:
            line.passes[index] = replace(coverage, left=True)
    return line


def gaps_of(passes: Sequence[Coverage]) -> Iterator[Gap]:
    """What is missing on a timeline, up to where its last pass ended."""
    # Some loaders are used in every fifth epoch only: what a launch skips is no gap between launches.
    jumps = {later.epoch - earlier.epoch for earlier, later in pairwise(passes) if earlier.launch == later.launch}
    for before, current, following in zip([None, *passes], passes, [*passes[1:], None], strict=False):
        if current.start and (before is None or before.epoch != current.epoch):
            yield Gap(current.epoch, 0, current.start, current.start)
        if before is not None and before.epoch < current.epoch - 1 and current.epoch - before.epoch not in jumps:
            samples = current.order.num_samples
            for epoch in range(before.epoch + 1, min(current.epoch, before.epoch + 1 + _EPOCHS)):
                yield Gap(epoch, 0, samples, samples)
        yield from current.gaps(expected_end(current, following))


def expected_end(current: Coverage, following: Coverage | None) -> int:
    """The position that a pass must have reached."""
    end = current.schedule().end
    if following is not None and following.epoch == current.epoch:
        return following.start
    furthest = current.reached(current.most)
    if current.left or following is None:
        return furthest if furthest == end or current.left else current.reached(current.least)
    return end
