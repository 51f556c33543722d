"""Which samples a selection contains: a range, or an array of sample ids."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import ArgumentError, SourceError, safe_str
from rankfeed.storage.checksum import digest_of

Int64 = npt.NDArray[np.int64]
#: Sample ids, a mask, a slice, a range or a predicate.
Selection = npt.ArrayLike | slice | range | Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Indices:
    """Sample ids: a range if they are evenly spaced, so that the digest depends on the ids alone."""

    values: range | npt.NDArray[np.unsignedinteger[Any]]

    def __len__(self) -> int:
        return len(self.values)

    def ids(self, positions: Int64) -> Int64:
        if isinstance(self.values, range):
            return self.values.start + positions * self.values.step
        return self.values[positions].astype(np.int64)

    @property
    def digest(self) -> str:
        if isinstance(self.values, range):
            return digest_of(f"range {self.values.start} {len(self)} {self.values.step}".encode())
        return digest_of(b"ids", self.values.astype("<i8").tobytes())


def indices_of(ids: Int64 | range) -> Indices:
    """The smallest representation of ids (at least one, none negative)."""
    first, step = int(ids[0]), int(ids[1] - ids[0]) if len(ids) > 1 else 1
    if isinstance(ids, range) or (ids[1:] - ids[:-1] == step).all():
        return Indices(range(first, first + step * len(ids), step))
    return Indices(ids.astype(np.min_scalar_type(int(ids.max()))))


def compose(outer: Indices, inner: Indices) -> Indices:
    """A selection from a selection: position -> ``outer.ids(inner.ids(position))``."""
    if isinstance(outer.values, range) and isinstance(inner.values, range):
        first, step = outer.values[inner.values[0]], outer.values.step * inner.values.step
        return indices_of(range(first, first + step * len(inner), step))
    return indices_of(outer.ids(inner.ids(np.arange(len(inner), dtype=np.int64))))


def block_sizes(indices: Indices, starts: Int64) -> Int64:
    """Number of consecutive positions whose samples are in the same block of the source; see `starts_of`."""
    ids = indices.values
    if not isinstance(ids, range):
        block = starts.searchsorted(ids.astype(np.int64), side="right")
        return np.diff(np.concatenate([[0], np.flatnonzero(block[1:] != block[:-1]) + 1, [len(ids)]]))
    upwards = ids if ids.step > 0 else ids[::-1]
    ids_before = np.clip(-((upwards.start - starts) // upwards.step), 0, len(ids))
    sizes = np.diff(ids_before)
    sizes = sizes[sizes > 0]
    return sizes if ids.step > 0 else sizes[::-1].copy()


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
        description = f"{type(chosen).__name__}: {safe_str(error)}"
        raise ArgumentError("this selects no samples", expected=expected, found=description) from error
    if given.ndim != 1 or (given.dtype.kind not in "biu" and given.size):
        description = f"{type(chosen).__name__} of dtype {given.dtype} with shape {given.shape}"
        raise ArgumentError("this selects no samples", expected=expected, found=description)
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
    for value in ids:
        if not 0 <= value < size:
            remedy = "count from the start: negative ids are refused" if value < 0 else None
            raise ArgumentError("no such sample", expected=f"ids from 0 to {size - 1}", found=value, remedy=remedy)
