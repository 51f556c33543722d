"""Where the rows of an Arrow column lie in a file, worked out for many record batches at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes as BytesColumn
from rankfeed.columns import Column, Field, Ragged, RowSlices
from rankfeed.errors import CorruptError
from rankfeed.sources.arrow_messages import REMEDY, Messages
from rankfeed.sources.arrow_places import Leaf
from rankfeed.sources.scattered import RowOffsets, ScatteredRows, packed_runs, rows_at, words

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
Where = Callable[[int], str]


class _Level(NamedTuple):
    """The offsets of one level of lists in all record batches.

    Args:
        base: int64 [batches], where they begin in the file, in bytes.
        width: bytes of each.
        top: int64 [batches], what they count at most: lists of the next level, or elements.
        length: how long all lists are; None for any length.
        words: the file as numbers of that width, where all offsets are aligned to it.
    """

    base: Int64
    width: int
    top: Int64
    length: int | None
    words: npt.NDArray[Any] | None


class LeafRows:
    """The rows of a column that needs no decoding, in one file.

    Args:
        leaf: the column, in whose buffers there is no :func:`problem`.
        data: uint8, the file, mapped.
        messages: of the file.
    """

    def __init__(self, leaf: Leaf, data: Bytes, messages: Messages) -> None:
        buffers = messages.buffers
        assert buffers is not None
        self._leaf, self._data = leaf, data
        self._begin = buffers[:, leaf.data, 0].copy()
        element = 1 if leaf.field.kind in ("bytes", "str") else np.dtype(leaf.field.dtype).itemsize
        #: Bytes of what the innermost offsets count; of a row, where there are none.
        self._step = element * _fixed_elements(leaf) if leaf.offsets else leaf.field.row_bytes()
        self._levels = []
        for level, (number, width, length) in enumerate(leaf.offsets):
            # Where lists are counted: each has an offset, and there is one more.
            below, size, more = (leaf.data, self._step, 0)
            if level + 1 < len(leaf.offsets):
                below, size, more = (*leaf.offsets[level + 1][:2], 1)
            top = np.maximum(0, buffers[:, below, 1] // max(1, size) - more)
            base = buffers[:, number, 0].copy()
            aligned = not (base % width).any() and data.ctypes.data % width == 0
            numbers = words(data, width).view(f"<i{width}") if aligned else None
            self._levels.append(_Level(base, width, top, length, numbers))

    def part(self, batch: Int64, row: Int64, slots: Int64 | None, where: Where) -> RowOffsets | RowSlices:
        """Some rows, as a part of a batch's.

        Args:
            batch: int64 [m], the record batch of each row.
            row: int64 [m], its number in there.
            slots: int64 [m], its row of the batch that is made; None for all, in order.
            where: names a row.

        Raises:
            CorruptError: a row does not lie in its buffer.
        """
        begin = self._begin.take(batch)
        if not self._levels:
            return RowOffsets(self._data, begin + row * self._step, slots)
        first, last = row, row + 1
        for number, level in enumerate(self._levels):
            base, top, length = level.base.take(batch), level.top.take(batch), level.length
            if number and length is not None:
                _check_even(self._data, base, level.width, first, last, length, where)
            first, last = self._ends(level, base, first, last, may_be_empty=number > 0)
            # Compared, not subtracted: the difference of two numbers of 64 bits may be any number.
            bad = (first < 0) | (last < first) | (last > top)
            if number == 0 and length is not None:
                bad |= last - first != length
            if bad.any():
                which = int(np.argmax(bad))
                raise CorruptError(
                    "the offsets of a column are damaged",
                    expected=f"rising numbers from 0 to {top[which]}" + (f", {length} apart" if length else ""),
                    found=f"{first[which]} to {last[which]}",
                    where=where(which),
                    remedy=REMEDY,
                )
        starts, nbytes = begin + first * self._step, (last - first) * self._step
        if self._leaf.field.kind == "dense":
            return RowOffsets(self._data, starts, slots)
        return self._runs(starts, nbytes, slots, where)

    def _ends(
        self, level: _Level, base: Int64, first: Int64, last: Int64, *, may_be_empty: bool
    ) -> tuple[Int64, Int64]:
        """Offsets ``first`` and ``last`` behind ``base``; 0 for rows without lists: there may be none."""
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

    def _runs(self, starts: Int64, nbytes: Int64, slots: Int64 | None, where: Where) -> RowSlices:
        """Runs of elements: as they lie where they are aligned to their own size, else copied."""
        field = self._leaf.field
        if field.kind != "ragged":
            return RowSlices(self._data, starts, nbytes, slots, where)
        dtype, shape = np.dtype(field.dtype).newbyteorder("<"), field.shape
        if not shape and not (starts % dtype.itemsize).any():
            size = dtype.itemsize
            values = words(self._data, size).view(dtype)
            return RowSlices(values, starts // size, nbytes // size, slots)
        packed, targets = packed_runs(self._data, starts, nbytes)
        size = max(1, field.row_bytes())
        return RowSlices(packed.view(dtype).reshape(-1, *shape), targets // size, nbytes // size, slots)


def _fixed_elements(leaf: Leaf) -> int:
    """Elements in each of what the innermost offsets count: several where that are fixed-size lists."""
    if leaf.field.kind not in ("dense", "ragged"):
        return 1
    lists = len(leaf.offsets) - (leaf.field.kind == "ragged")
    return int(np.prod(leaf.field.shape[lists:], dtype=np.int64))


def _check_even(
    data: Bytes, base: Int64, width: int, first: Int64, last: Int64, length: int, where: Where
) -> None:
    """Look whether all lists from ``first`` to ``last`` are of one length.

    Raises:
        CorruptError: one is not.
    """
    counts = np.where(first == last, 0, last - first + 1)
    packed, targets = packed_runs(data, base + first * width, counts * width)
    offsets = packed.view(f"<i{width}").astype(np.int64)
    steps = np.append(np.diff(offsets), length)
    ends = (targets // width + counts - 1)[counts > 0]
    steps[ends] = length  # from one row's last offset to the next row's first
    if (steps != length).any():
        wrong = int(np.argmax(steps != length))
        which = int(np.searchsorted(targets // width, wrong, side="right")) - 1
        raise CorruptError(
            "an array has another shape than its column",
            expected=f"lists of {length}",
            found=f"one of {steps[wrong]}",
            where=where(which),
            remedy=REMEDY,
        )


def column_of(field: Field, parts: Sequence[Any]) -> Column:
    """The column of a batch whose rows lie in these parts."""
    if field.kind == "dense":
        return ScatteredRows(parts, np.dtype(field.dtype), field.shape)
    return Ragged(parts) if field.kind == "ragged" else BytesColumn(parts, text=field.kind == "str")


def problem(leaf: Leaf, messages: Messages) -> str | None:
    """Why a column's buffers cannot hold its rows; None if they can.

    Rows of one size are known to lie in their buffers after that; lists are looked at when they are read.
    """
    buffers, lengths, rows = messages.buffers, messages.lengths, messages.rows
    assert buffers is not None
    assert lengths is not None
    # As Arrow has it: a column is as long as its record batch; what is in a struct may be longer, and is cut.
    of = lengths[:, leaf.nodes[: leaf.around + 1]]
    other = (of[:, 0] != rows) | (of.min(1) < rows)
    if other.any():
        batch = int(np.argmax(other))
        return f"record batch {batch} has {rows[batch]} rows, and its column {', '.join(map(str, of[batch]))}"
    if max(leaf.data, *(number for number, _, _ in leaf.offsets), 0) >= buffers.shape[1]:
        return "there are fewer buffers than the columns need"
    if leaf.offsets:
        number, width, _ = leaf.offsets[0]
        short = (rows > 0) & (buffers[:, number, 1] // width <= rows)
    else:
        short = buffers[:, leaf.data, 1] // max(1, leaf.field.row_bytes()) < rows
        short &= leaf.field.row_bytes() > 0
    return f"record batch {int(np.argmax(short))} has too short a buffer" if short.any() else None
