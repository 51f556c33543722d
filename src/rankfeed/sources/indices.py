"""Which samples a selection contains: position -> sample id, in as little memory as the ids allow.

The same ids always have the same representation, so the digest depends on the ids alone.
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
class StridedIndices:
    """Ids from ``start`` in steps of ``step``, which may be negative."""

    start: int
    step: int
    length: int

    def __len__(self) -> int:
        return self.length

    def ids(self, positions: Int64) -> Int64:
        """Ids at the given positions."""
        return self.start + positions * self.step

    @property
    def digest(self) -> str:
        """Digest of the ids."""
        return digest_of(b"steps", f"{self.start},{self.step},{self.length}".encode())


@dataclass(frozen=True, eq=False)
class RangeIndices:
    """Ids in ranges that count up by one.

    Args:
        starts: first id of each range.
        edges: position of the first id of each range, and the number of ids at the end.
    """

    starts: Unsigned
    edges: Unsigned

    def __len__(self) -> int:
        return int(self.edges[-1])

    def ids(self, positions: Int64) -> Int64:
        """Ids at the given positions."""
        number = self.edges.searchsorted(positions.astype(self.edges.dtype), side="right") - 1
        return self.starts[number].astype(np.int64) + (positions - self.edges[number].astype(np.int64))

    @property
    def digest(self) -> str:
        """Digest of the ids."""
        return digest_of(b"stretches", *(each.astype("<i8").tobytes() for each in (self.starts, self.edges)))


@dataclass(frozen=True, eq=False)
class ListedIndices:
    """Ids one by one."""

    values: Unsigned

    def __len__(self) -> int:
        return len(self.values)

    def ids(self, positions: Int64) -> Int64:
        """Ids at the given positions."""
        return self.values[positions].astype(np.int64)

    @property
    def digest(self) -> str:
        """Digest of the ids."""
        return digest_of(b"listed", self.values.astype("<i8").tobytes())


Indices = StridedIndices | RangeIndices | ListedIndices


def indices_of(ids: Int64) -> Indices:
    """The smallest representation of ids (at least one, none negative).

    Examples:
        >>> indices_of(np.array([7, 5, 3]))
        StridedIndices(start=7, step=-2, length=3)
        >>> indices_of(np.array([4, 5, 6, 7, 0, 1])).starts.tolist()
        [4, 0]
    """
    first = int(ids[0])
    steps = ids[1:] - ids[:-1]
    if not len(steps) or (steps == steps[0]).all():
        return StridedIndices(first, int(steps[0]) if len(steps) else 1, len(ids))
    breaks = np.flatnonzero(steps != 1) + 1
    if 2 * len(breaks) + 3 < len(ids):
        edges = np.concatenate([[0], breaks, [len(ids)]])
        return RangeIndices(_narrowest(ids[edges[:-1]]), _narrowest(edges))
    return ListedIndices(_narrowest(ids))


def indices_of_range(chosen: range) -> Indices:
    """The indices of a range (at least one), without listing them."""
    return StridedIndices(chosen.start, chosen.step if len(chosen) > 1 else 1, len(chosen))


def compose(outer: Indices, inner: Indices) -> Indices:
    """A selection from a selection: position -> ``outer.ids(inner.ids(position))``.

    Examples:
        >>> compose(StridedIndices(100, 2, 50), StridedIndices(10, 5, 3))
        StridedIndices(start=120, step=10, length=3)
    """
    if isinstance(outer, StridedIndices) and isinstance(inner, StridedIndices):
        step = outer.step * inner.step if len(inner) > 1 else 1
        return StridedIndices(outer.start + inner.start * outer.step, step, len(inner))
    if isinstance(outer, StridedIndices) and isinstance(inner, RangeIndices) and outer.step == 1:
        return RangeIndices(_narrowest(outer.start + inner.starts.astype(np.int64)), inner.edges)
    return indices_of(outer.ids(inner.ids(np.arange(len(inner), dtype=np.int64))))


def block_sizes(indices: Indices, starts: Int64) -> Int64:
    """Number of consecutive positions whose samples are in the same block, each at least 1.

    Args:
        indices: selected samples.
        starts: int64 [blocks + 1], first sample of each block of the source, and the number of samples.

    Examples:
        >>> block_sizes(StridedIndices(1, 2, 5), np.array([0, 4, 8, 12]))  # 1, 3 | 5, 7 | 9
        array([2, 2, 1])
        >>> block_sizes(ListedIndices(np.array([9, 8, 0, 3, 4], np.uint8)), np.array([0, 4, 8, 12]))
        array([2, 2, 1])
    """
    if isinstance(indices, StridedIndices):
        return _strided_block_sizes(indices, starts)
    if isinstance(indices, ListedIndices):
        firsts = indices.values.astype(np.int64)
        ends = firsts + 1
    else:
        firsts = indices.starts.astype(np.int64)
        edges = indices.edges.astype(np.int64)
        ends = firsts + (edges[1:] - edges[:-1])
    # Each range is cut at the edges of the blocks.
    low = starts.searchsorted(firsts, side="right") - 1
    pieces = starts.searchsorted(ends, side="left") - low
    before = np.cumsum(pieces) - pieces
    block = np.repeat(low - before, pieces) + np.arange(int(pieces.sum()))
    sizes = np.minimum(starts[block + 1], np.repeat(ends, pieces)) - np.maximum(
        starts[block], np.repeat(firsts, pieces)
    )
    block, sizes = block[sizes > 0], sizes[sizes > 0]  # a block of the source may be empty
    changes = np.flatnonzero(np.concatenate([[True], block[1:] != block[:-1]]))
    return np.add.reduceat(sizes, changes)


def _strided_block_sizes(indices: StridedIndices, starts: Int64) -> Int64:
    start, step = indices.start, indices.step
    if step < 0:  # the same from the other end
        start, step = start + step * (indices.length - 1), -step
    ids_before = np.clip(-((start - starts) // step), 0, indices.length)
    sizes: Int64 = ids_before[1:] - ids_before[:-1]
    sizes = sizes[sizes > 0]
    return sizes if indices.step > 0 else sizes[::-1].copy()


def _narrowest(values: Int64) -> Unsigned:
    return values.astype(np.min_scalar_type(int(values.max())))
