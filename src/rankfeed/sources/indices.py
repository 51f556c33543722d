"""Which samples of a source are picked: position -> sample id, in as little memory as the ids allow.

Ids in equal steps are three numbers, ids in stretches two numbers a stretch, all others a list. The same ids are
always held in the same form, so that their digest is of the ids alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.storage import digest_of

Int64 = npt.NDArray[np.int64]
Unsigned = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Steps:
    """Ids in equal steps.

    Args:
        start: the first id.
        step: from one to the next; may be negative.
        length: how many.
    """

    start: int
    step: int
    length: int

    def __len__(self) -> int:
        return self.length

    def ids(self, positions: Int64) -> Int64:
        """The ids at some positions."""
        return self.start + positions * self.step

    @property
    def digest(self) -> str:
        """Of the ids."""
        return digest_of(b"steps", f"{self.start},{self.step},{self.length}".encode())


@dataclass(frozen=True, eq=False)
class Stretches:
    """Ids in stretches that count up by one.

    Args:
        starts: the first id of each.
        edges: the position of the first of each, and at the end the number of ids.
    """

    starts: Unsigned
    edges: Unsigned

    def __len__(self) -> int:
        return int(self.edges[-1])

    def ids(self, positions: Int64) -> Int64:
        """The ids at some positions."""
        stretch = self.edges.searchsorted(positions.astype(self.edges.dtype), side="right") - 1
        return self.starts[stretch].astype(np.int64) + (positions - self.edges[stretch].astype(np.int64))

    @property
    def digest(self) -> str:
        """Of the ids."""
        return digest_of(b"stretches", *(each.astype("<i8").tobytes() for each in (self.starts, self.edges)))


@dataclass(frozen=True, eq=False)
class Listed:
    """Ids one by one."""

    values: Unsigned

    def __len__(self) -> int:
        return len(self.values)

    def ids(self, positions: Int64) -> Int64:
        """The ids at some positions."""
        return self.values[positions].astype(np.int64)

    @property
    def digest(self) -> str:
        """Of the ids."""
        return digest_of(b"listed", self.values.astype("<i8").tobytes())


Picks = Steps | Stretches | Listed


def picks_of(ids: Int64) -> Picks:
    """The form that holds these ids (at least one, none negative) in the least memory.

    Examples:
        >>> picks_of(np.array([7, 5, 3]))
        Steps(start=7, step=-2, length=3)
        >>> picks_of(np.array([4, 5, 6, 7, 0, 1])).starts.tolist()
        [4, 0]
    """
    first = int(ids[0])
    steps = ids[1:] - ids[:-1]
    if not len(steps) or (steps == steps[0]).all():
        return Steps(first, int(steps[0]) if len(steps) else 1, len(ids))
    breaks = np.flatnonzero(steps != 1) + 1
    if 2 * len(breaks) + 3 < len(ids):
        edges = np.concatenate([[0], breaks, [len(ids)]])
        return Stretches(_narrow(ids[edges[:-1]]), _narrow(edges))
    return Listed(_narrow(ids))


def picks_of_range(chosen: range) -> Picks:
    """The form that holds the numbers of a range (at least one), without listing them."""
    return Steps(chosen.start, chosen.step if len(chosen) > 1 else 1, len(chosen))


def composed(outer: Picks, inner: Picks) -> Picks:
    """Picks out of picks: position -> ``outer.ids(inner.ids(position))``.

    Examples:
        >>> composed(Steps(100, 2, 50), Steps(10, 5, 3))
        Steps(start=120, step=10, length=3)
    """
    if isinstance(outer, Steps) and isinstance(inner, Steps):
        step = outer.step * inner.step if len(inner) > 1 else 1
        return Steps(outer.start + inner.start * outer.step, step, len(inner))
    if isinstance(outer, Steps) and isinstance(inner, Stretches) and outer.step == 1:
        return Stretches(_narrow(outer.start + inner.starts.astype(np.int64)), inner.edges)
    return picks_of(outer.ids(all_ids(inner)))


def all_ids(picks: Picks) -> Int64:
    """All of them, in order."""
    return picks.ids(np.arange(len(picks), dtype=np.int64))


def blocks_of(picks: Picks, blocks: Int64) -> Int64:
    """Samples in each block of the picks: those that stand next to each other and lie in one block of the source.

    Args:
        picks: of a source.
        blocks: int64, samples in each block of the source.

    Returns:
        int64, each at least 1, in the order of the picks.

    Examples:
        >>> blocks_of(Steps(1, 2, 5), np.array([4, 4, 4]))  # 1, 3 | 5, 7 | 9
        array([2, 2, 1])
        >>> blocks_of(Listed(np.array([9, 8, 0, 3, 4], np.uint8)), np.array([4, 4, 4]))
        array([2, 2, 1])
    """
    starts = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum(blocks, out=starts[1:])
    if isinstance(picks, Steps):
        return _blocks_of_steps(picks, starts)
    if isinstance(picks, Listed):
        firsts = picks.values.astype(np.int64)
        ends = firsts + 1
    else:
        firsts = picks.starts.astype(np.int64)
        edges = picks.edges.astype(np.int64)
        ends = firsts + (edges[1:] - edges[:-1])
    # A piece is what a stretch has in a block.
    low = starts.searchsorted(firsts, side="right") - 1
    pieces = starts.searchsorted(ends, side="left") - low
    begin = np.cumsum(pieces) - pieces
    block = np.repeat(low - begin, pieces) + np.arange(int(pieces.sum()))
    sizes = np.minimum(starts[block + 1], np.repeat(ends, pieces)) - np.maximum(
        starts[block], np.repeat(firsts, pieces)
    )
    block, sizes = block[sizes > 0], sizes[sizes > 0]  # a block of the source may be empty
    changes = np.flatnonzero(np.concatenate([[True], block[1:] != block[:-1]]))
    return np.add.reduceat(sizes, changes)


def _blocks_of_steps(picks: Steps, starts: Int64) -> Int64:
    start, step = picks.start, picks.step
    if step < 0:  # the same from the other end
        start, step = start + step * (picks.length - 1), -step
    # How many of the ids lie before each block.
    before: Int64 = np.clip(-((start - starts) // step), 0, picks.length)
    sizes = before[1:] - before[:-1]
    sizes = sizes[sizes > 0]
    return sizes if picks.step > 0 else sizes[::-1].copy()


def _narrow(values: Int64) -> Unsigned:
    """The same numbers in the narrowest type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max())))
