"""Nested lists in Arrow columns as arrays of a declared shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.columns import ColumnBuffer, Field, Unreadable
from rankfeed.errors import CorruptError, RankfeedError
from rankfeed.sources.arrow.arrays import (
    Valid,
    list_elements,
    numbers_of,
    plain_of,
    rows_without_nulls,
    valid_of,
)
from rankfeed.sources.arrow.errors import null_error
from rankfeed.sources.arrow.types import ArrayShape, Nulls

Int64 = npt.NDArray[np.int64]


def shaped_arrays(
    array: Any,
    field: Field,
    shape: ArrayShape,
    *,
    where: str,
    column: str,
    first_row: int | Int64,
    nulls: Nulls,
) -> tuple[ColumnBuffer, Valid]:
    """A column of nested lists as arrays, and the mask of rows without nulls.

    Rows in which a list is null or has another length than declared are zero or empty. The latter are unreadable,
    the former too if nulls are errors.
    """
    import pyarrow as pa

    rows = len(array)
    valid, misshapen = np.ones(rows, np.bool_), dict[int, tuple[int, int]]()
    good = np.arange(rows)
    while True:
        levels = _descend(array, shape)
        if not len(levels.nulls) and not levels.misshapen:
            break
        valid[good[levels.nulls]] = False
        misshapen.update((int(good[row]), lengths) for row, lengths in levels.misshapen.items())
        keep = np.ones(len(good), np.bool_)
        keep[levels.nulls] = keep[list(levels.misshapen)] = False
        good, array = good[keep], array.filter(pa.array(keep))
    values, inner = numbers_of(levels.elements)
    whole = rows_without_nulls(inner)
    if whole is not None:
        valid[good[_rows_at(np.flatnonzero(~whole), levels.ends)]] = False
    if field.kind == "ragged":
        lengths = np.zeros(rows, np.int64)
        lengths[good] = np.diff(levels.starts)
        offsets = np.append(0, lengths.cumsum())
        buffer = ColumnBuffer(values.reshape(offsets[-1], *field.shape), offsets)
    else:
        values = values.reshape(len(good), *field.shape)
        if len(good) < rows:
            values, taken = np.zeros((rows, *field.shape), values.dtype), values
            values[good] = taken
        buffer = ColumnBuffer(values)
    null = null_error(field, where, first_row, column)

    def error(row: int) -> RankfeedError:
        if row not in misshapen:
            return null(row)
        expected, found = misshapen[row]
        number = first_row + row if isinstance(first_row, int) else int(first_row[row])
        return shape_error(expected, found, f"{where}, row {number}, column {column!r}")

    bad = ~valid if nulls == "error" else np.zeros(rows, np.bool_)
    bad[list(misshapen)] = True
    if bad.any():
        buffer = ColumnBuffer(buffer.values, buffer.offsets, unreadable=Unreadable(bad, error))
    return buffer, None if valid.all() else valid


def shape_error(expected: int, found: int, where: str) -> CorruptError:
    """The error for a list of another length than its column declares."""
    return CorruptError(
        "an array has another shape than its column",
        expected=f"lists of {expected}",
        found=f"one of {found}",
        where=where,
        remedy="correct the shape, or write the data again",
    )


class _Levels(NamedTuple):
    """The elements of nested lists, or the problems of the first level that has any.

    Args:
        elements: of the innermost lists.
        starts: int64 [rows + 1], where each row starts in the lists of the first level.
        ends: int64 [rows + 1], where each row starts in the elements.
        nulls: rows in which a list is null.
        misshapen: rows in which a list has another length: expected and found length.
    """

    elements: Any
    starts: Int64
    ends: Int64
    nulls: Int64
    misshapen: dict[int, tuple[int, int]]


def _descend(array: Any, shape: ArrayShape) -> _Levels:
    import pyarrow as pa

    starts = ends = np.arange(len(array) + 1)
    none = np.empty(0, np.int64)
    for level, length in enumerate(shape):
        array = plain_of(array)
        valid = valid_of(array)
        if valid is not None:
            return _Levels(array, starts, ends, _rows_at(np.flatnonzero(~valid), ends), {})
        if pa.types.is_fixed_size_list(array.type):
            array, offsets = array.flatten(), np.arange(len(array) + 1) * array.type.list_size
        else:
            array, offsets = list_elements(array)
        lengths = np.diff(offsets)
        wrong = none if length is None else np.flatnonzero(lengths != length)
        if length is not None and len(wrong):
            found = dict(zip(_rows_at(wrong, ends).tolist(), lengths[wrong].tolist(), strict=True))
            return _Levels(array, starts, ends, none, {row: (length, each) for row, each in found.items()})
        ends = offsets[ends]
        starts = ends if level == 0 else starts
    return _Levels(array, starts, ends, none, {})


def _rows_at(places: Int64, ends: Int64) -> Int64:
    return ends.searchsorted(places, side="right") - 1
