"""Lists of lists in Arrow's columns as arrays of a shape that was declared."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.columns import ColumnBuffer, Field, Unreadable
from rankfeed.errors import CorruptError, RankfeedError
from rankfeed.sources.arrow_arrays import Valid, all_of, list_elements, numbers_of, plain_of, valid_of
from rankfeed.sources.arrow_errors import null_error
from rankfeed.sources.arrow_places import Shape
from rankfeed.sources.arrow_types import Nulls

Int64 = npt.NDArray[np.int64]


def shaped(
    array: Any, field: Field, shape: Shape, *, where: str, column: str, first_row: int, nulls: Nulls
) -> tuple[ColumnBuffer, Valid]:
    """A column of lists of lists as arrays, and which rows are valid: not null, and without a null in them.

    Rows in which a list is null, or of another length than declared, are left zero or empty. The latter are
    unreadable, the former where nulls are errors; the others are read.

    Args:
        array: the column.
        field: what it holds, as `arrow_places.shaped_field` says.
        shape: of its rows.
        where: the file, and part of it, for errors.
        column: its name, for errors.
        first_row: number of the first row in the file, for errors.
        nulls: as for `arrow_columns.stored_of`.
    """
    import pyarrow as pa

    rows = len(array)
    valid, others = np.ones(rows, np.bool_), dict[int, tuple[int, int]]()
    good = np.arange(rows)
    while True:
        walk = _walked(array, shape)
        if not len(walk.nulls) and not walk.others:
            break
        valid[good[walk.nulls]] = False
        others.update((int(good[row]), lengths) for row, lengths in walk.others.items())
        keep = np.ones(len(good), np.bool_)
        keep[walk.nulls] = keep[list(walk.others)] = False
        good, array = good[keep], array.filter(pa.array(keep))
    values, inner = numbers_of(walk.elements)
    whole = all_of(inner)
    if whole is not None:
        valid[good[_rows_of(np.flatnonzero(~whole), walk.ends)]] = False
    if field.kind == "ragged":
        lengths = np.zeros(rows, np.int64)
        lengths[good] = np.diff(walk.starts)
        offsets = np.append(0, lengths.cumsum())
        stored = ColumnBuffer(values.reshape(offsets[-1], *field.shape), offsets)
    else:
        values = values.reshape(len(good), *field.shape)
        if len(good) < rows:
            values, taken = np.zeros((rows, *field.shape), values.dtype), values
            values[good] = taken
        stored = ColumnBuffer(values)
    null = null_error(field, where, first_row, column)

    def error(row: int) -> RankfeedError:
        if row not in others:
            return null(row)
        expected, found = others[row]
        return CorruptError(
            "an array has another shape than its column",
            expected=f"lists of {expected}",
            found=f"one of {found}",
            where=f"{where}, row {first_row + row}, column {column!r}",
        )

    bad = ~valid if nulls == "error" else np.zeros(rows, np.bool_)
    bad[list(others)] = True
    if bad.any():
        stored = ColumnBuffer(stored.values, stored.offsets, unreadable=Unreadable(bad, error))
    return stored, None if valid.all() else valid


class _Walk(NamedTuple):
    """What is in lists of lists, or what is wrong with the first level where anything is.

    Args:
        elements: of the innermost lists.
        starts: int64 [rows + 1], where each row starts in the lists of the first level.
        ends: int64 [rows + 1], where each row starts in the elements.
        nulls: rows in which a list is null.
        others: rows in which a list has another length: that expected, and that found.
    """

    elements: Any
    starts: Int64
    ends: Int64
    nulls: Int64
    others: dict[int, tuple[int, int]]


def _walked(array: Any, shape: Shape) -> _Walk:
    """Go down to the elements. Without the rows that something is wrong with, it can be done anew."""
    import pyarrow as pa

    starts = ends = np.arange(len(array) + 1)  # of rows, in lists of the first level and in those looked at
    none = np.empty(0, np.int64)
    for level, length in enumerate(shape):
        array = plain_of(array)
        valid = valid_of(array)
        if valid is not None:
            return _Walk(array, starts, ends, _rows_of(np.flatnonzero(~valid), ends), {})
        if pa.types.is_fixed_size_list(array.type):
            array, offsets = array.flatten(), np.arange(len(array) + 1) * array.type.list_size
        else:
            array, offsets = list_elements(array)
        lengths = np.diff(offsets)
        wrong = none if length is None else np.flatnonzero(lengths != length)
        if length is not None and len(wrong):
            found = dict(zip(_rows_of(wrong, ends).tolist(), lengths[wrong].tolist(), strict=True))
            return _Walk(array, starts, ends, none, {row: (length, each) for row, each in found.items()})
        ends = offsets[ends]
        starts = ends if level == 0 else starts
    return _Walk(array, starts, ends, none, {})


def _rows_of(places: Int64, ends: Int64) -> Int64:
    return ends.searchsorted(places, side="right") - 1
