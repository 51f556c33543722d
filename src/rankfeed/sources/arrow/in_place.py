"""Columns that are read in place: numbers, text, bytes, and (nested) lists of numbers, without nulls.

pyarrow needs several microseconds to create a record batch. So the buffer addresses of all record batches are
taken once into arrays, and the rows of a batch are found by arithmetic on them. The offsets of lists and text are
checked when they are used: damaged ones must not lead out of their buffer.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankfeed.columns.field import Field
from rankfeed.columns.pointers import Memory, Place, RowPointers
from rankfeed.errors import CorruptError
from rankfeed.sources.arrow.arrow_columns import shape_error
from rankfeed.sources.arrow.types import ArrayShape, field_of, shaped_field, storage_type, tensor_axes
from rankfeed.sources.source import starts_of

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlainLayout:
    """The buffers of a column that can be read in place, numbered as ``Array.buffers()`` lists them."""

    field: Field
    validity: tuple[int, ...]  # all must be absent
    #: For each level of lists (text and bytes have one): its offsets, their width in bytes, and the length that
    #: its lists are declared to have; empty if all rows have one size.
    offsets: tuple[tuple[int, int, int | None], ...]
    data: int  # the elements

    @property
    def buffers(self) -> tuple[int, ...]:
        """The buffers that are read: offsets, then data."""
        return (*(buffer for buffer, _, _ in self.offsets), self.data)

    def is_aligned(self, starts: Int64) -> bool:
        """Whether offsets that start there, int64 [batches, buffers], can be read as integers."""
        return not any((starts[:, level] % width).any() for level, (_, width, _) in enumerate(self.offsets))

    def problem(self, rows: Int64, sizes: Int64) -> str | None:
        """Why buffers of these sizes, int64 [batches, buffers], cannot hold the rows of a record batch."""
        row_bytes = self.field.row_bytes()
        if self.offsets:
            short = (rows > 0) & (sizes[:, 0] // self.offsets[0][1] <= rows)
        else:
            short = (sizes[:, -1] // max(1, row_bytes) < rows) & (row_bytes > 0)
        return f"record batch {int(np.argmax(short))} has a buffer that is too short" if short.any() else None


def plain_layout(kind: Any, shape: ArrayShape | None) -> PlainLayout | None:
    """The layout of a column of an Arrow type; None if it cannot be read in place."""
    types = pa.types
    if _is_permuted(kind):
        return None
    field = field_of(kind) if shape is None else shaped_field(kind, shape)
    kind = storage_type(kind)
    if field.kind in ("bytes", "str"):
        wide = types.is_large_string(kind) or types.is_large_binary(kind)
        if not (wide or types.is_string(kind) or types.is_binary(kind)):
            return None
        return PlainLayout(field, (0,), ((1, 8 if wide else 4, None),), 2)
    validity: list[int] = []
    offsets: list[tuple[int, int, int | None]] = []
    buffer = 0
    for length in shape or (None,):
        if types.is_list(kind) or types.is_large_list(kind):
            validity.append(buffer)
            offsets.append((buffer + 1, 8 if types.is_large_list(kind) else 4, length))
            kind, buffer = storage_type(kind.value_type), buffer + 2
    while types.is_fixed_size_list(kind):
        validity.append(buffer)
        kind, buffer = storage_type(kind.value_type), buffer + 1
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_temporal(kind)
    same = is_number and field.kind in ("dense", "ragged") and kind.bit_width == 8 * np.dtype(field.dtype).itemsize
    # No buffer tells the number of elements without bytes.
    is_countable = not offsets or field.row_bytes() > 0
    if not (same and is_countable):
        return None
    return PlainLayout(field, (*validity, buffer), tuple(offsets), buffer + 1)


def _is_permuted(kind: Any) -> bool:
    """Whether the axes of a tensor, or of tensors in lists, are stored in another order than the logical one."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return tensor_axes(kind) != sorted(tensor_axes(kind)) or _is_permuted(kind.value_type)
    return hasattr(kind, "value_type") and _is_permuted(kind.value_type)


class _Level(NamedTuple):
    """The offsets of one level of lists in all record batches."""

    first: Int64  # [batches], number of the first offset in `words`
    words: npt.NDArray[Any]  # the file as integers of the width of the offsets
    top: Int64  # [batches], limit of the offsets: lists of the next level, or elements
    length: int | None  # of all lists; None if it varies


class PlainColumn:
    """The rows of a column that is read in place, in one file."""

    def __init__(self, layout: PlainLayout, data: Bytes, buffers: Int64) -> None:
        # int64 [batches, buffers, 2]: start in the file and size of each of ``layout.buffers``.
        field = layout.field
        self._memory = Memory(data)
        self._begin = buffers[:, -1, 0].copy()
        #: Bytes that an innermost offset counts; of a row, without offsets.
        self._step = field.row_bytes()
        self._width = field.row_bytes() if field.kind in ("dense", "ragged") else 1
        if layout.offsets and field.kind in ("dense", "ragged"):
            lists = len(layout.offsets) - (field.kind == "ragged")
            # Several elements for fixed-size lists.
            per_offset = int(np.prod(field.shape[lists:], dtype=np.int64))
            self._step = np.dtype(field.dtype).itemsize * per_offset
        # An offset counts elements, or lists, which have one offset more.
        units = [*((width, 1) for _, width, _ in layout.offsets[1:]), (self._step, 0)]
        self._levels = []
        for level, ((_, width, length), (size, more)) in enumerate(zip(layout.offsets, units, strict=False)):
            top = np.maximum(0, buffers[:, level + 1, 1] // max(1, size) - more)
            numbers = data[: len(data) // width * width].view(f"<i{width}")
            self._levels.append(_Level(buffers[:, level, 0] // width, numbers, top, length))

    def pointers(self, batch: Int64, row: Int64, where: Place) -> RowPointers:
        """Some rows by record batch and number in it; ``where`` names a row in errors."""
        begin = self._begin.take(batch)
        if not self._levels:
            starts, nbytes = begin + row * self._step, np.full_like(row, self._step)
            return RowPointers.into_bytes(self._memory, starts, nbytes, self._width, where)
        first, last = row, row + 1
        for depth, level in enumerate(self._levels):
            base, top, length = level.first.take(batch), level.top.take(batch), level.length
            if depth and length is not None:
                _check_lengths(level.words, base, first, last, length, where)
            empty = first == last if depth else None
            first, last = (level.words.take(base + at, mode="clip").astype(np.int64) for at in (first, last))
            if empty is not None and empty.any():  # rows without lists, whose offsets may not exist
                first[empty] = last[empty] = 0
            # Compared, not subtracted: the difference of two 64-bit numbers may overflow.
            bad = (first < 0) | (last < first) | (last > top)
            if depth == 0 and length is not None:
                bad |= last - first != length
            if bad.any():
                which = int(np.argmax(bad))
                raise CorruptError(
                    "the offsets of a column are damaged",
                    expected=f"ascending numbers from 0 to {top[which]}" + (f", {length} apart" if length else ""),
                    found=f"{first[which]} to {last[which]}",
                    where=where(which),
                )
        starts, nbytes = begin + first * self._step, (last - first) * self._step
        return RowPointers.into_bytes(self._memory, starts, nbytes, self._width, where)


def _check_lengths(
    offsets: npt.NDArray[Any], base: Int64, first: Int64, last: Int64, length: int, where: Place
) -> None:
    """Check that all lists from ``first`` to ``last`` have one length; a CorruptError if one has another."""
    starts = starts_of(last - first)  # of the lists of each row
    at = np.arange(starts[-1]) + np.repeat(base + first - starts[:-1], last - first)
    begins, ends = offsets.take(at, mode="clip"), offsets.take(at + 1, mode="clip")
    wrong = np.flatnonzero(ends != begins + length)
    if len(wrong):
        row = int(starts.searchsorted(wrong[0], side="right")) - 1
        raise shape_error(length, int(ends[wrong[0]]) - int(begins[wrong[0]]), where(row))
