"""Columns of Arrow's tables and record batches as numpy sees them, and which of their rows are null."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import ColumnBuffer, Field, Unreadable
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow_arrays import (
    Valid,
    all_of,
    list_elements,
    numbers_of,
    objects_of,
    text_of,
    valid_of,
)
from rankfeed.sources.arrow_errors import arrow_errors, null_error
from rankfeed.sources.arrow_places import stored_type
from rankfeed.sources.arrow_types import (
    VALID,
    Nulls,
    Path,
    field_at,
    field_of,
    fields_of,
    leaves_of,
    roots_of,
)

__all__ = ["VALID", "Nulls", "fields_of", "roots_of", "stored_of"]

#: Bytes (of text, or elements of lists) that offsets of 32 bits can count.
_COUNTED = (1 << 31) - 1


def stored_of(
    table: Any,
    fields: Mapping[str, Field],
    *,
    where: str,
    first_row: int | npt.NDArray[np.int64] = 0,
    nulls: Nulls = "error",
) -> dict[str, ColumnBuffer]:
    """The columns of a table or record batch as they lie, or decoded.

    Args:
        table: a `pyarrow.Table` or `pyarrow.RecordBatch` with the columns that are needed.
        fields: those wanted, as :func:`fields_of` named them.
        where: the file (and part of it), for errors.
        first_row: number of the table's first row in that file, for errors; or int64 [rows], that of each.
        nulls: as for :func:`fields_of`. Where they are errors, they are so for who asks for their rows:
            `ColumnBuffer.part` raises a SourceError that names file, row and column.

    Raises:
        SourceError: a decimal would lose digits as float64.
        CorruptError: a column is not of the type that it should be.

    Examples:
        >>> import pyarrow as pa
        >>> table = pa.table({"x": pa.array([[1, 2], [3]])})
        >>> stored = stored_of(table, fields_of(table.schema), where="here")["x"]
        >>> stored.values, stored.offsets
        (array([1, 2, 3]), array([0, 2, 3]))
    """
    paths = dict(leaves_of(table.schema))
    out: dict[str, ColumnBuffer] = {}
    for name, field in fields.items():
        if name in out:
            continue  # a mask, made with its column
        masked = nulls == "mask" and name not in paths
        column = name.removesuffix(VALID) if masked else name
        if column not in paths or (not masked and field_of(field_at(table.schema, paths[column]).type) != field):
            raise CorruptError(
                "a column is missing or of another type than expected",
                expected=f"{name!r}: {field}",
                found=", ".join(f"{each.name!r}: {each.type}" for each in table.schema)[:500],
                where=where,
                remedy="write the files with one schema",
            )
        place = f"{where}, column {column!r}"
        with arrow_errors(place):
            array = array_at(table, paths[column], where)
            stored, valid = _stored(array, field_of(array.type), place)
        if nulls == "error" and valid is not None and not valid.all():
            stored = replace(stored, unreadable=Unreadable(~valid, null_error(field, where, first_row, column)))
        if column in fields:
            out[column] = stored
        if column + VALID in fields and nulls == "mask":
            out[column + VALID] = ColumnBuffer(np.ones(stored.rows, np.bool_) if valid is None else valid)
    return {name: out[name] for name in fields}


def array_at(table: Any, path: Path, where: str) -> Any:
    """One contiguous array of a column; a struct's null makes what is in it null."""
    import pyarrow as pa

    column = table.column(path[0])
    arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for index in path[1:]:
        arrays = [_inside(array, index, where) for array in arrays]
    if len(arrays) == 1:
        return arrays[0]
    kind = field_at(table.schema, path).type
    if pa.types.is_dictionary(kind) and arrays:
        return _joined(arrays)
    if sum(array.nbytes for array in arrays) > _COUNTED:
        kind = _wide(kind)
        arrays = [array.cast(kind) for array in arrays]
    return pa.concat_arrays(arrays) if arrays else pa.array([], kind)


def _joined(arrays: list[Any]) -> Any:
    """Dictionary arrays as one. Arrow cannot join those that have a null among their values."""
    import pyarrow as pa

    entries = [array.dictionary for array in arrays]
    if sum(each.nbytes for each in entries) > _COUNTED:
        entries = [each.cast(_wide(each.type)) for each in entries]
    firsts = np.cumsum([0, *map(len, entries)])
    indices = [
        array.indices.cast(pa.int64()).fill_null(0).to_numpy() + first
        for array, first in zip(arrays, firsts, strict=False)
    ]
    null = np.concatenate([array.indices.is_null().to_numpy(zero_copy_only=False) for array in arrays])
    return pa.DictionaryArray.from_arrays(pa.array(np.concatenate(indices), mask=null), pa.concat_arrays(entries))


def _inside(array: Any, index: int, where: str) -> Any:
    """A struct's field; null where the struct is."""
    import pyarrow as pa

    inner = array.type.field(index)
    kind = stored_type(inner.type)
    if not pa.types.is_union(kind) and not pa.types.is_run_end_encoded(kind):
        return array.flatten()[index]
    # These cannot be told the nulls around them: Arrow ends the process, or forgets the nulls.
    if array.null_count:
        raise SourceError(
            "a null around a union, or around what is run-end encoded, cannot be read",
            found=f"{inner.name!r}: {kind}",
            where=where,
            remedy="leave the column out with columns=",
        )
    return array.field(index)


def _wide(kind: Any) -> Any:
    """A type with offsets of 64 bits, that holds the same."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return pa.large_list(_wide(kind.value_type))
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


def _stored(array: Any, field: Field, where: str) -> tuple[ColumnBuffer, Valid]:
    """A column's values, and which rows are valid: not null, and without a null in them."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        return _indexed(array, field, where)
    if field.kind == "dense":
        values, valid = numbers_of(array)
        values = values.reshape(len(array), *field.shape)
        return ColumnBuffer(values), all_of(valid)
    if isinstance(array.type, pa.BaseExtensionType):
        return _stored(array.storage, field, where)
    if field.kind == "object":
        return objects_of(array, where)
    valid = valid_of(array)
    if field.kind in ("bytes", "str"):
        return text_of(array), valid
    child, offsets = list_elements(array)
    values, inner = numbers_of(child)
    whole = all_of(inner)
    if whole is not None and not whole.all():
        bad = np.flatnonzero(~whole)
        valid = np.ones(len(array), np.bool_) if valid is None else valid.copy()
        valid[offsets.searchsorted(bad, side="right") - 1] = False
    return ColumnBuffer(values, offsets), valid


def _indexed(array: Any, field: Field, where: str) -> tuple[ColumnBuffer, Valid]:
    """A dictionary column: its values once, however many rows they are in."""
    import pyarrow as pa

    valid = valid_of(array)
    entries = array.dictionary
    missing = len(entries)  # what nulls point to: an entry that is null
    indices = array.indices.cast(pa.int64()).fill_null(missing).to_numpy()
    used = None
    if missing > len(array):  # only those that are used
        used, indices = np.unique(indices, return_inverse=True)
    elif valid is not None:
        used = np.arange(missing + 1)
    if used is not None:
        entries = entries.take(pa.array(used, mask=used == missing))
    stored, given = _stored(entries, field, where)
    if given is not None and not given.all():
        valid = given[indices] if valid is None else valid & given[indices]
    if stored.index is not None:  # a dictionary of a dictionary
        indices = stored.index[indices]
    return replace(stored, index=indices.copy()), valid
