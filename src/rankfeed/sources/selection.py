"""Which samples a selection contains: position -> sample id, in as little memory as the ids allow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import ArgumentError, SourceError, safe_str
from rankfeed.storage import digest_of

Int64 = npt.NDArray[np.int64]
Unsigned = npt.NDArray[np.unsignedinteger[Any]]
#: Sample ids, a mask, a slice, a range or a predicate.
Selection = npt.ArrayLike | slice | range | Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Indices:
    """Sample ids in runs; the same ids always have the same runs, so the digest depends on the ids alone."""

    starts: Unsigned  # first id of each run
    edges: Unsigned | None  # position of the first id of each run, and the end; None if each run is one id
    step: int = 1  # between the ids of a run; not 1 only if there is one run

    def __len__(self) -> int:
        return len(self.starts) if self.edges is None else int(self.edges[-1])

    def ids(self, positions: Int64) -> Int64:
        """Ids at the given positions."""
        if self.edges is None:
            return self.starts[positions].astype(np.int64)
        run = self.edges.searchsorted(positions.astype(self.edges.dtype), side="right") - 1
        return self.starts[run].astype(np.int64) + (positions - self.edges[run].astype(np.int64)) * self.step

    @property
    def digest(self) -> str:
        """Digest of the ids."""
        arrays = [each.astype("<i8").tobytes() for each in (self.starts, self.edges) if each is not None]
        return digest_of(b"indices", str(self.step).encode(), *arrays)


def indices_of(ids: Int64 | range) -> Indices:
    """The smallest representation of ids (at least one, none negative).

    Examples:
        >>> indices_of(np.array([7, 5, 3]))
        Indices(starts=array([7], dtype=uint8), edges=array([0, 3], dtype=uint8), step=-2)
        >>> indices_of(np.array([4, 5, 6, 7, 0, 1])).starts.tolist()
        [4, 0]
    """
    if isinstance(ids, range):
        step = ids.step if len(ids) > 1 else 1
        return Indices(_narrowest(np.array([ids.start])), _narrowest(np.array([0, len(ids)])), step)
    steps = ids[1:] - ids[:-1]
    if not len(steps) or (steps == steps[0]).all():
        step = int(steps[0]) if len(steps) else 1
        return indices_of(range(int(ids[0]), int(ids[-1]) + (1 if step > 0 else -1), step))
    breaks = np.flatnonzero(steps != 1) + 1
    if 2 * len(breaks) + 3 < len(ids):
        edges = np.concatenate([[0], breaks, [len(ids)]])
        return Indices(_narrowest(ids[edges[:-1]]), _narrowest(edges))
    return Indices(_narrowest(ids), None)


def compose(outer: Indices, inner: Indices) -> Indices:
    """A selection from a selection: position -> ``outer.ids(inner.ids(position))``."""
    inner_is_range = inner.edges is not None and len(inner.starts) == 1
    if outer.edges is not None and len(outer.starts) == 1 and (inner_is_range or outer.step == 1):
        step = inner.step * outer.step if len(inner) > 1 else 1
        return Indices(_narrowest(outer.ids(inner.starts.astype(np.int64))), inner.edges, step)
    return indices_of(outer.ids(inner.ids(np.arange(len(inner), dtype=np.int64))))


def block_sizes(indices: Indices, starts: Int64) -> Int64:
    """Number of consecutive positions whose samples are in the same block, each at least 1.

    ``starts`` are the first sample of each block of the source, and the number of samples: int64 [blocks + 1].

    Examples:
        >>> block_sizes(indices_of(range(1, 11, 2)), np.array([0, 4, 8, 12]))  # 1, 3 | 5, 7 | 9
        array([2, 2, 1])
        >>> block_sizes(indices_of(np.array([9, 8, 0, 3, 4])), np.array([0, 4, 8, 12]))
        array([2, 2, 1])
    """
    firsts = indices.starts.astype(np.int64)
    if indices.step != 1:
        start, step = int(firsts[0]), indices.step
        if step < 0:  # the same from the other end
            start, step = start + step * (len(indices) - 1), -step
        ids_before = np.clip(-((start - starts) // step), 0, len(indices))
        sizes = np.diff(ids_before)
        sizes = sizes[sizes > 0]
        return sizes if indices.step > 0 else sizes[::-1].copy()
    ends = firsts + (1 if indices.edges is None else np.diff(indices.edges.astype(np.int64)))
    # Each run is divided at the edges of the blocks.
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


def _narrowest(values: Int64) -> Unsigned:
    return values.astype(np.min_scalar_type(int(values.max())))


def resolve_selection(chosen: Any, size: int) -> Indices:
    """The samples that ids, a mask, a slice or a range select from ``size`` samples: at least one, each once."""
    ids: range | Int64
    if isinstance(chosen, slice):
        try:
            ids = range(*chosen.indices(size))
        except Exception as error:
            summary = "invalid slice: it needs integers and a step other than 0"
            raise ArgumentError(summary, found=chosen) from error
    elif isinstance(chosen, range):
        ids = chosen
        _check_bounds([chosen[0], chosen[-1]] if chosen else [], size)
    else:
        ids = _check_ids_or_mask(chosen, size)
    if not len(ids):
        raise SourceError("no sample is selected", expected=f"at least one of {size}", found="none")
    return indices_of(ids)


def _check_ids_or_mask(chosen: Any, size: int) -> Int64:
    expected = "a list or 1-D array of integers, a bool mask, a slice, a range or a function"
    try:
        given = np.asarray(chosen)
    except Exception as error:  # RuntimeError is torch's
        found = f"{type(chosen).__name__}: {safe_str(error)}"
        raise ArgumentError("this selects no samples", expected=expected, found=found) from error
    if given.ndim != 1 or (given.dtype.kind not in "biu" and given.size):
        found = f"{type(chosen).__name__} of dtype {given.dtype} with shape {given.shape}"
        raise ArgumentError("this selects no samples", expected=expected, found=found)
    if given.dtype.kind == "b":
        if len(given) != size:
            raise ArgumentError(
                "a mask has a value for each sample", expected=f"{size} values", found=f"{len(given)} values"
            )
        return np.flatnonzero(given)
    _check_bounds([int(given.min()), int(given.max())] if given.size else [], size)
    ids = given.astype(np.int64)
    if not (ids[1:] > ids[:-1]).all():
        in_order = np.sort(ids)
        repeated = np.flatnonzero(in_order[1:] == in_order[:-1])
        if len(repeated):
            twice = in_order[repeated[0]]
            raise ArgumentError(
                "a sample is selected twice",
                expected="each id once, as each sample is delivered once in an epoch",
                found=f"{twice} at positions {np.flatnonzero(ids == twice)[:4].tolist()}",
                remedy="remove repeats (np.unique); rankfeed.concat of two selections delivers a sample twice",
            )
    return ids


def _check_bounds(ids: list[int], size: int) -> None:
    for each in ids:
        if not 0 <= each < size:
            remedy = "count from the start: negative ids are refused" if each < 0 else None
            raise ArgumentError("no such sample", expected=f"ids from 0 to {size - 1}", found=each, remedy=remedy)
