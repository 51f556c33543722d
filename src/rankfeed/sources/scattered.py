"""Values at arbitrary byte offsets of a file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns.columns import Allocate, Dense, RowSlices, RowTake
from rankfeed.columns.field import Field
from rankfeed.columns.gather import copy_segments
from rankfeed.errors import CorruptError, MissingExtraError, RankfeedError, describe_error
from rankfeed.sources.source import with_where

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

#: From this many elements per row on, a loop of plain copies is faster than one call with an index per element.
_LOOP_ELEMENTS = 64


@dataclass(frozen=True)
class RowOffsets:
    """Row ``slots[i]`` of the batch is ``data[starts[i] : starts[i] + size]``, which lies inside ``data``."""

    data: Bytes
    starts: Int64  # in bytes, at any alignment
    slots: Int64 | None = None  # None for all rows of the batch, in order


class ScatteredRows(Dense):
    """A dense column whose rows are copied once, from byte offsets straight into the batch."""

    def __init__(self, parts: Sequence[RowOffsets], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._row_offsets = parts
        self._dtype = dtype
        self._shape = shape
        self._length = sum(len(part.starts) for part in parts)

    @property
    def field(self) -> Field:
        return Field("dense", self._dtype.name, self._shape)

    @property
    def parts(self) -> Sequence[RowTake]:  # type: ignore[override]
        """The gathered rows, for callers that combine columns."""
        return [RowTake(self.gather(), np.arange(self._length))]

    @property
    def nbytes(self) -> int:
        return self._length * self.field.row_bytes()

    def gather(self, allocate: Allocate = np.empty) -> Array:
        out = allocate((self._length, *self._shape), self._dtype)
        size = self.field.row_bytes()
        if not size or not self._length:
            return out
        rows, item = out.reshape(-1).view(np.uint8).reshape(-1, size), self._dtype.itemsize
        for part in self._row_offsets:
            if size >= _LOOP_ELEMENTS * item:
                source, target = memoryview(part.data.data), rows.reshape(-1).data
                slots = range(len(part.starts)) if part.slots is None else part.slots.tolist()
                for start, slot in zip(part.starts.tolist(), slots, strict=True):
                    target[slot * size : (slot + 1) * size] = source[start : start + size]
            elif part.slots is None:
                rows_at(part.data, part.starts, size, item, rows)
            else:
                rows[part.slots] = rows_at(part.data, part.starts, size, item)
        return out


def rows_at(data: Bytes, starts: Int64, size: int, item: int = 1, out: Bytes | None = None) -> Bytes:
    """Runs of equal size as rows of bytes: uint8 [m, size].

    ``item`` bytes, a divisor of ``size``, are copied at once if the alignment allows it; ``out`` is C-contiguous.
    """
    if out is None:
        out = np.empty((len(starts), size), np.uint8)
    if item > 1 and not (starts % item).any() and data.ctypes.data % item == 0:
        index = (starts // item)[:, None] + np.arange(size // item)
        words(data, item).take(index, out=out.view(f"u{item}"), mode="clip")
    else:
        data.take(starts[:, None] + np.arange(size), out=out, mode="clip")
    return out


def words(data: Bytes, item: int) -> Array:
    """Bytes as unsigned integers of ``item`` bytes (1, 2, 4 or 8), without the remainder at the end."""
    return data[: len(data) // item * item].view(f"<u{item}")


def packed_runs(data: Array, starts: Int64, lengths: Int64) -> tuple[Array, Int64]:
    """Runs of an array copied one behind the other: [sum of lengths], and the new start of each: int64 [m]."""
    targets = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), data.dtype)
    copy_segments(data, starts, lengths, out, targets)
    return out, targets


def decode_each(part: RowSlices, decode: Callable[[bytes], Any]) -> Iterator[Any]:
    """Decoded values of slices of bytes; None for a negative length. Errors name the value."""
    for row, (start, length) in enumerate(zip(part.starts.tolist(), part.lengths.tolist(), strict=True)):
        try:
            yield None if length < 0 else decode(part.values[start : start + length].tobytes())
        except MissingExtraError:
            raise
        except Exception as error:  # decoders are libraries' and users' functions, and may execute a pickle
            raise undecodable(error, part, row) from error


def undecodable(error: Exception, part: RowSlices, row: int) -> RankfeedError:
    """The error for a value that cannot be decoded, with its place."""
    if isinstance(error, RankfeedError):
        return with_where(error, place_of(part, row))
    return CorruptError(
        "a value cannot be decoded",
        found=describe_error(error)[:300],
        where=place_of(part, row),
        remedy="fetch the file or write the sample again; or take its bytes with decode=False",
    )


def place_of(part: RowSlices, row: int) -> str:
    """The name of a row in error messages; "" if it has none."""
    return "" if part.place is None else part.place(row)
