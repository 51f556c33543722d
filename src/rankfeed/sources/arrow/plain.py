"""Columns that are read in place: numbers, text, bytes, and (nested) lists of numbers, without nulls.

pyarrow needs several microseconds to create a record batch. So the buffer addresses of all record batches are
taken once into arrays, and the rows of a batch are found by arithmetic on them, whatever the record batches. The
offsets of lists and text are checked when they are used: damaged ones must not lead out of their buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes as BytesColumn
from rankfeed.columns import Column, Field, Ragged, RowSlices
from rankfeed.errors import CorruptError
from rankfeed.sources.arrow.errors import REMEDY
from rankfeed.sources.arrow.nested import shape_error
from rankfeed.sources.arrow.types import ArrayShape, field_of, shaped_field, storage_type, tensor_axes
from rankfeed.sources.scattered import RowOffsets, ScatteredRows, packed_runs, rows_at, words

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
Where = Callable[[int], str]


@dataclass(frozen=True)
class PlainLayout:
    """The buffers of a column that can be read in place, numbered as ``Array.buffers()`` lists them.

    Args:
        field: type of the column.
        validity: the validity buffers; all must be absent.
        offsets: for each level of lists (text and bytes have one): its offsets, their width in bytes, and the
            length that all lists of the level are declared to have; empty if all rows have one size.
        data: the buffer of the elements.
    """

    field: Field
    validity: tuple[int, ...]
    offsets: tuple[tuple[int, int, int | None], ...]
    data: int

    @property
    def buffers(self) -> tuple[int, ...]:
        """The buffers that are read: offsets, then data."""
        return (*(number for number, _, _ in self.offsets), self.data)

    def problem(self, rows: Int64, sizes: Int64) -> str | None:
        """Why buffers cannot hold the rows of a record batch, or None; lists are checked when they are read.

        Args:
            rows: int64 [batches].
            sizes: int64 [batches, buffers], of ``buffers``.
        """
        if self.offsets:
            short = (rows > 0) & (sizes[:, 0] // self.offsets[0][1] <= rows)
        else:
            short = sizes[:, -1] // max(1, self.field.row_bytes()) < rows
            short &= self.field.row_bytes() > 0
        return f"record batch {int(np.argmax(short))} has a buffer that is too short" if short.any() else None


def plain_layout(kind: Any, shape: ArrayShape | None) -> PlainLayout | None:
    """The layout of a column of an Arrow type; None if it cannot be read in place."""
    import pyarrow as pa

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
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType):
        return tensor_axes(kind) != sorted(tensor_axes(kind)) or _is_permuted(kind.value_type)
    return hasattr(kind, "value_type") and _is_permuted(kind.value_type)


class _Level(NamedTuple):
    """The offsets of one level of lists in all record batches.

    Args:
        base: int64 [batches], byte offset in the file.
        width: bytes of each offset.
        top: int64 [batches], limit of the offsets: lists of the next level, or elements.
        length: of all lists; None if it varies.
        words: the file as integers of that width if all offsets are aligned, else None.
    """

    base: Int64
    width: int
    top: Int64
    length: int | None
    words: npt.NDArray[Any] | None


class PlainColumn:
    """The rows of a column that is read in place, in one file.

    Args:
        layout: of the column, without a problem in any record batch.
        data: uint8, the mapped file.
        buffers: int64 [batches, buffers, 2], start in the file and size of each of ``layout.buffers``.
    """

    def __init__(self, layout: PlainLayout, data: Bytes, buffers: Int64) -> None:
        field = layout.field
        self._field, self._data = field, data
        self._begin = buffers[:, -1, 0].copy()
        element = 1 if field.kind in ("bytes", "str") else np.dtype(field.dtype).itemsize
        per_offset = 1  # elements that an innermost offset counts: several for fixed-size lists
        if field.kind in ("dense", "ragged"):
            lists = len(layout.offsets) - (field.kind == "ragged")
            per_offset = int(np.prod(field.shape[lists:], dtype=np.int64))
        #: Bytes that an innermost offset counts; of a row, without offsets.
        self._step = element * per_offset if layout.offsets else field.row_bytes()
        self._levels = []
        for level, (_, width, length) in enumerate(layout.offsets):
            is_last = level + 1 == len(layout.offsets)
            # An offset counts elements, or lists, which have one offset more.
            size, more = (self._step, 0) if is_last else (layout.offsets[level + 1][1], 1)
            top = np.maximum(0, buffers[:, level + 1, 1] // max(1, size) - more)
            base = buffers[:, level, 0].copy()
            aligned = not (base % width).any() and data.ctypes.data % width == 0
            numbers = words(data, width).view(f"<i{width}") if aligned else None
            self._levels.append(_Level(base, width, top, length, numbers))

    def part(self, batch: Int64, row: Int64, slots: Int64 | None, where: Where) -> RowOffsets | RowSlices:
        """Some rows, as a part of a column.

        Args:
            batch: int64 [m], the record batch of each row.
            row: int64 [m], its number in the record batch.
            slots: int64 [m], the rows of the batch that they fill; None for all, in order.
            where: names a row in errors.

        Raises:
            CorruptError: a row is outside of its buffer.
        """
        begin = self._begin.take(batch)
        if not self._levels:
            return RowOffsets(self._data, begin + row * self._step, slots)
        first, last = row, row + 1
        for number, level in enumerate(self._levels):
            base, top, length = level.base.take(batch), level.top.take(batch), level.length
            if number and length is not None:
                _check_lengths(self._data, base, level.width, first, last, length, where)
            first, last = self._offsets(level, base, first, last, may_be_empty=number > 0)
            # Compared, not subtracted: the difference of two 64-bit numbers may overflow.
            bad = (first < 0) | (last < first) | (last > top)
            if number == 0 and length is not None:
                bad |= last - first != length
            if bad.any():
                which = int(np.argmax(bad))
                raise CorruptError(
                    "the offsets of a column are damaged",
                    expected=f"ascending numbers from 0 to {top[which]}" + (f", {length} apart" if length else ""),
                    found=f"{first[which]} to {last[which]}",
                    where=where(which),
                    remedy=REMEDY,
                )
        starts, nbytes = begin + first * self._step, (last - first) * self._step
        if self._field.kind == "dense":
            return RowOffsets(self._data, starts, slots)
        return self._slices(starts, nbytes, slots, where)

    def _offsets(
        self, level: _Level, base: Int64, first: Int64, last: Int64, *, may_be_empty: bool
    ) -> tuple[Int64, Int64]:
        """The offsets ``first`` and ``last``; 0 for rows without lists, whose offsets may not exist."""
        width = level.width
        empty = first == last if may_be_empty else None
        if level.words is not None and (empty is None or not empty.any()):
            at = base // width
            starts, stops = level.words.take(at + first, mode="clip"), level.words.take(at + last, mode="clip")
            return starts.astype(np.int64), stops.astype(np.int64)
        if empty is None:
            empty = np.zeros(len(first), np.bool_)
        pair = np.stack([np.where(empty, 0, base + first * width), np.where(empty, 0, base + last * width)], 1)
        ends = rows_at(self._data, pair.reshape(-1), width, width).view(f"<i{width}").reshape(-1, 2)
        ends = np.where(empty[:, None], 0, ends.astype(np.int64))
        return ends[:, 0], ends[:, 1]

    def _slices(self, starts: Int64, nbytes: Int64, slots: Int64 | None, where: Where) -> RowSlices:
        """Slices of the file if they are aligned to the element size, else of a copy."""
        field = self._field
        if field.kind != "ragged":
            return RowSlices(self._data, starts, nbytes, slots, where)
        dtype, shape = np.dtype(field.dtype).newbyteorder("<"), field.shape
        if not shape and not (starts % dtype.itemsize).any():
            size = dtype.itemsize
            return RowSlices(words(self._data, size).view(dtype), starts // size, nbytes // size, slots)
        copied, targets = packed_runs(self._data, starts, nbytes)
        size = max(1, field.row_bytes())
        return RowSlices(copied.view(dtype).reshape(-1, *shape), targets // size, nbytes // size, slots)


def _check_lengths(
    data: Bytes, base: Int64, width: int, first: Int64, last: Int64, length: int, where: Where
) -> None:
    """Check that all lists from ``first`` to ``last`` have one length.

    Raises:
        CorruptError: one has another length.
    """
    counts = np.where(first == last, 0, last - first + 1)
    copied, targets = packed_runs(data, base + first * width, counts * width)
    offsets = copied.view(f"<i{width}").astype(np.int64)
    steps = np.append(np.diff(offsets), length)
    ends = (targets // width + counts - 1)[counts > 0]
    steps[ends] = length  # from the last offset of a row to the first one of the next
    if (steps != length).any():
        wrong = int(np.argmax(steps != length))
        which = int(np.searchsorted(targets // width, wrong, side="right")) - 1
        raise shape_error(length, int(steps[wrong]), where(which))


def column_from_plain_parts(field: Field, parts: Sequence[Any]) -> Column:
    """The column with these parts."""
    if field.kind == "dense":
        return ScatteredRows(parts, np.dtype(field.dtype), field.shape)
    return Ragged(parts) if field.kind == "ragged" else BytesColumn(parts, text=field.kind == "str")
