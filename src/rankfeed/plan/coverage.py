"""Coverage of an epoch: a multiset of positions, stored as evenly spaced intervals.

The order is a pure function of the position, so "each sample once" means "each position once". A rank reads an
interval of the same length at every full step, so that its share of an epoch is a few of these runs, for any
number of samples; runs of neighbouring ranks join into one interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, order=True)
class IntervalRun:
    """Intervals at equal distances; a single one has a stride equal to its length."""

    start: int
    length: int
    stride: int
    count: int

    @classmethod
    def of(cls, start: int, length: int, stride: int, count: int) -> IntervalRun:
        """The run in its canonical form: intervals that touch are one interval."""
        if count == 1 or stride == length:
            return cls(start, length * count, length * count, 1)
        return cls(start, length, stride, count)

    def joined(self, other: IntervalRun) -> IntervalRun | None:
        """The run of both, of which ``other`` starts later; None if they do not fit together."""
        if self.count == other.count == 1:
            gap = other.start - self.start
            if gap == self.length:
                return IntervalRun.of(self.start, self.length + other.length, 0, 1)
            same = self.length == other.length and gap > self.length
            return IntervalRun(self.start, self.length, gap, 2) if same else None
        if other.count == 1:
            follows = self.length == other.length and other.start == self.start + self.count * self.stride
            return replace(self, count=self.count + 1) if follows else None
        length = self.length + other.length
        same = (self.count, self.stride) == (other.count, other.stride) and length <= self.stride
        adjacent = other.start == self.start + self.length
        return IntervalRun.of(self.start, length, self.stride, self.count) if same and adjacent else None


class Coverage:
    """The positions that were delivered, with repetitions."""

    def __init__(self, runs: Iterable[IntervalRun] = ()) -> None:
        self.runs: list[IntervalRun] = []
        for run in sorted(runs):
            self._append(run)

    def add(self, start: int, stop: int) -> None:
        """Add the positions from ``start`` to ``stop``; fast if intervals are added in their order."""
        if stop > start:
            self._append(IntervalRun.of(start, stop - start, 0, 1))

    def _append(self, run: IntervalRun) -> None:
        if self.runs and (joined := self.runs[-1].joined(run)) is not None:
            self.runs[-1] = joined
        else:
            self.runs.append(run)

    def __len__(self) -> int:
        """Positions, each as often as it was added."""
        return sum(run.length * run.count for run in self.runs)

    def missing(self, start: int, stop: int, most: int = 8) -> list[tuple[int, int]]:
        """The first intervals between ``start`` and ``stop`` that are not covered."""
        gaps = ((low, high) for low, high, depth in self._depths(start, stop) if depth == 0)
        return list(islice(gaps, most))

    def repeated(self, most: int = 8) -> list[tuple[int, int]]:
        """The first intervals that are covered more than once."""
        return list(islice(((low, high) for low, high, depth in self._depths() if depth > 1), most))

    def _depths(self, start: int | None = None, stop: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Intervals of equal depth in ascending order, from ``start`` to ``stop`` also those of depth 0."""
        none = np.empty(0, np.int64)
        starts = np.sort(np.concatenate([none, *map(_starts, self.runs)]))
        stops = np.sort(np.concatenate([none, *(_starts(run) + run.length for run in self.runs)]))
        bounds = [each for each in (start, stop) if each is not None]
        edges = np.unique(np.concatenate([starts, stops, np.array(bounds, np.int64)]))
        if start is not None and stop is not None:
            edges = edges[(edges >= start) & (edges <= stop)]
        depth = starts.searchsorted(edges, side="right") - stops.searchsorted(edges, side="right")
        yield from zip(edges[:-1].tolist(), edges[1:].tolist(), depth[:-1].tolist(), strict=True)


def _starts(run: IntervalRun) -> Int64:
    return run.start + np.arange(run.count, dtype=np.int64) * run.stride
