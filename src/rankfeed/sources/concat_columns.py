"""Combining the columns of several sources: the fields they agree on, and their rows in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes, Column, Dense, Field, Objects, Ragged, RowSlices, RowTake
from rankfeed.errors import SourceError

Int64 = npt.NDArray[np.int64]
Fields = Mapping[str, Field]

_REMEDY = "leave the column out with columns=[...], or write one of the sources again with rankfeed.pack"


def agreed_fields(named: Sequence[tuple[str, Fields]], columns: Sequence[str] | None = None) -> dict[str, Field]:
    """The fields of concatenated sources; a column that is dense in one and ragged in another is ragged.

    Args:
        named: for each source its name in error messages, and its fields.
        columns: names of the columns to compare; None for all.

    Raises:
        SourceError: a column is missing in a source, or has another type; names the column and both sources.

    Examples:
        >>> frames = {"x": Field("dense", "float32", (7, 2))}
        >>> agreed_fields([("a", frames), ("b", {"x": Field("ragged", "float32", (2,))})])
        {'x': Field(kind='ragged', dtype='float32', shape=(2,))}
    """
    _check_names(named, columns)
    first = named[0]
    agreed: dict[str, Field] = {}
    for name in first[1] if columns is None else columns:
        # A ragged field accepts dense rows of several lengths, so it is the one to compare with.
        reference, fields_there = next((each for each in named if each[1][name].kind == "ragged"), first)
        agreed[name] = fields_there[name]
        for source, fields in named:
            if not _accepts(fields_there[name], fields[name]):
                raise SourceError(
                    f"column {name!r} is of different types",
                    expected=f"{_type(fields_there[name])} as in {reference}",
                    found=f"{_type(fields[name])} in {source}",
                    remedy=_REMEDY,
                )
    return agreed


def _check_names(named: Sequence[tuple[str, Fields]], columns: Sequence[str] | None) -> None:
    wanted = {name: source for source, fields in named for name in fields} if columns is None else columns
    for name in wanted:
        owners = [source for source, fields in named if name in fields]
        for source, fields in named:
            if name not in fields:
                raise SourceError(
                    f"column {name!r} is missing in one of the sources",
                    expected=f"{name!r} as in {owners[0]}" if owners else f"{name!r} in all of them",
                    found=f"{', '.join(map(repr, fields))} in {source}",
                    remedy="give columns=[...] with those that all sources have",
                )


def _type(field: Field) -> str:
    return f"{field.kind} {field}" if field.dtype else field.kind


def _accepts(field: Field, other: Field) -> bool:
    """Whether a column of ``field`` can hold rows of ``other``."""
    if field == other:
        return True
    fits = (field.kind, other.kind) == ("ragged", "dense") and other.shape and other.shape[1:] == field.shape
    return bool(fits) and field.dtype == other.dtype


def concat_columns(name: str, field: Field, pieces: Sequence[tuple[Column, Int64 | None]]) -> Column:
    """One column from several, without a copy if their rows have the same layout.

    Args:
        name: of the column, for error messages.
        field: of the result.
        pieces: columns, each with the positions of its rows in the result; None for the only column.

    Raises:
        SourceError: rows differ in type, or in more than their first dimension.

    Examples:
        >>> one, two = Dense.of(np.array([1, 2])), Dense.of(np.array([3]))
        >>> concat_columns("x", Field("dense", "int64"), [(one, np.array([2, 0])), (two, np.array([1]))]).gather()
        array([2, 3, 1])
    """
    columns = [column for column, _ in pieces]
    if all(isinstance(column, Objects) for column in columns):
        return _objects(pieces)
    if all(isinstance(column, Bytes) for column in columns):
        kinds = {column.field.kind for column in columns}
        if len(kinds) == 1:
            return Bytes([part for piece in pieces for part in _moved(*piece)], text=kinds == {"str"})
    if all(isinstance(column, (Dense, Ragged)) for column in columns):
        found = {column.field for column in columns}
        if len(found) == 1 and isinstance(columns[0], Dense) and field.kind != "ragged":
            return Dense([part for piece in pieces for part in _moved(*_native(*piece))])
        elements = {_element_shape(each) for each in found}
        if len({each.dtype for each in found}) == 1 and len(elements) == 1 and None not in elements:
            return Ragged([part for piece in pieces for part in _moved(*_as_ragged(*_native(*piece)))])
    raise SourceError(
        f"rows of column {name!r} do not fit into one batch",
        found=", ".join(sorted({_type(column.field) for column in columns})),
        remedy=_REMEDY,
    )


def _objects(pieces: Sequence[tuple[Column, Int64 | None]]) -> Objects:
    values: list[Any] = [None] * sum(len(column) for column, _ in pieces)
    for column, slots in pieces:
        places = range(len(column)) if slots is None else slots.tolist()
        for place, value in zip(places, column.rows(), strict=True):
            values[place] = value
    return Objects(values)


def _element_shape(field: Field) -> tuple[int, ...] | None:
    """Shape of an element along the first dimension; None for a scalar."""
    if field.kind == "ragged":
        return field.shape
    return field.shape[1:] if field.shape else None


def _moved(column: Any, slots: Int64 | None) -> list[Any]:
    """The parts of a column with their positions in the result."""
    if slots is None:
        return list(column.parts)
    return [part._replace(slots=slots if part.slots is None else slots[part.slots]) for part in column.parts]


def _native(column: Any, slots: Int64 | None) -> tuple[Any, Int64 | None]:
    """The same rows in native byte order: a batch may combine files of both orders."""
    if all(part.values.dtype.isnative for part in column.parts):
        return column, slots
    native = column.parts[0].values.dtype.newbyteorder("=")
    if isinstance(column, Dense):
        return Dense.of(column.gather().astype(native)), slots
    values, offsets = column.compact()
    return Ragged([RowSlices(values.astype(native), offsets[:-1], np.diff(offsets))]), slots


def _as_ragged(column: Any, slots: Int64 | None) -> tuple[Any, Int64 | None]:
    """Dense rows as runs of their elements."""
    if isinstance(column, Ragged):
        return column, slots
    parts = column.parts
    if not all(part.values.flags.c_contiguous for part in parts):
        parts = Dense.of(column.gather()).parts
    return Ragged([_runs(part) for part in parts]), slots


def _runs(part: RowTake) -> RowSlices:
    length, *inner = part.values.shape[1:]
    flat = part.values.reshape(len(part.values) * length, *inner)
    return RowSlices(flat, part.rows * length, np.full(len(part.rows), length, np.int64), part.slots)
