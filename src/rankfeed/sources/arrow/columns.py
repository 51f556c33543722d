"""Columns of Arrow tables and record batches as numpy arrays, and their nulls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import ColumnBuffer, Field, Unreadable
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow.arrays import (
    Valid,
    list_elements,
    numbers_of,
    objects_of,
    rows_without_nulls,
    text_of,
    valid_of,
)
from rankfeed.sources.arrow.errors import arrow_errors, null_error
from rankfeed.sources.arrow.nested import shaped_arrays
from rankfeed.sources.arrow.types import (
    VALID,
    ArrayShape,
    Nulls,
    Path,
    field_at,
    field_of,
    leaves_of,
    shaped_field,
    storage_type,
)

#: Limit of 32-bit offsets: bytes of text, or elements of lists.
_INT32_MAX = (1 << 31) - 1


def read_columns(
    table: Any,
    fields: Mapping[str, Field],
    *,
    where: str,
    first_row: int | npt.NDArray[np.int64] = 0,
    nulls: Nulls = "error",
    shapes: Mapping[str, ArrayShape] | None = None,
) -> dict[str, ColumnBuffer]:
    """Columns of a table or record batch.

    Args:
        table: a `pyarrow.Table` or `pyarrow.RecordBatch` that contains the columns.
        fields: the columns, as `fields_of` named them.
        where: file and part of it, for errors.
        first_row: number of the first row in that file, for errors; or int64 [rows], the number of each row.
        nulls: as for `fields_of`. If nulls are errors, `ColumnBuffer.part` raises a SourceError for their rows.
        shapes: columns of nested lists that are arrays, and their shapes.

    Raises:
        SourceError: a decimal would lose digits as float64.
        CorruptError: a column has another type than its field.

    Examples:
        >>> import pyarrow as pa
        >>> table = pa.table({"x": pa.array([[1, 2], [3]])})
        >>> column = read_columns(table, {"x": Field("ragged", "int64")}, where="here")["x"]
        >>> column.values, column.offsets
        (array([1, 2, 3]), array([0, 2, 3]))
    """
    paths = dict(leaves_of(table.schema))
    shapes = shapes or {}
    out: dict[str, ColumnBuffer] = {}
    for name, field in fields.items():
        if name in out:
            continue  # a mask, created with its column
        is_mask = nulls == "mask" and name not in paths
        column = name.removesuffix(VALID) if is_mask else name
        kind = None if column not in paths else field_at(table.schema, paths[column]).type
        own = None if kind is None else shaped_field(kind, shapes[column]) if column in shapes else field_of(kind)
        if own is None or (not is_mask and own != field):
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
            if column in shapes and own.kind != "object":
                buffer, valid = shaped_arrays(
                    array, own, shapes[column], where=where, column=column, first_row=first_row, nulls=nulls
                )
            else:
                buffer, valid = _read(array, own, place)
                if nulls == "error" and valid is not None and not valid.all():
                    unreadable = Unreadable(~valid, null_error(field, where, first_row, column))
                    buffer = replace(buffer, unreadable=unreadable)
        if column in fields:
            out[column] = buffer
        if column + VALID in fields and nulls == "mask":
            out[column + VALID] = ColumnBuffer(np.ones(len(array), np.bool_) if valid is None else valid)
    return {name: out[name] for name in fields}


def array_at(table: Any, path: Path, where: str) -> Any:
    """A column as one contiguous array; a null struct makes its fields null."""
    import pyarrow as pa

    column = table.column(path[0])
    arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for index in path[1:]:
        arrays = [_struct_field(array, index, where) for array in arrays]
    if len(arrays) == 1:
        return arrays[0]
    kind = field_at(table.schema, path).type
    if pa.types.is_dictionary(kind) and arrays:
        return _concat_dictionaries(arrays)
    if sum(array.nbytes for array in arrays) > _INT32_MAX:
        kind = _with_64_bit_offsets(kind)
        arrays = [array.cast(kind) for array in arrays]
    return pa.concat_arrays(arrays) if arrays else pa.array([], kind)


def _concat_dictionaries(arrays: list[Any]) -> Any:
    """Dictionary arrays as one; pyarrow cannot concatenate those with a null among their values."""
    import pyarrow as pa

    values = [array.dictionary for array in arrays]
    if sum(each.nbytes for each in values) > _INT32_MAX:
        values = [each.cast(_with_64_bit_offsets(each.type)) for each in values]
    firsts = np.cumsum([0, *map(len, values)])
    indices = [
        array.indices.cast(pa.int64()).fill_null(0).to_numpy() + first
        for array, first in zip(arrays, firsts, strict=False)
    ]
    null = np.concatenate([array.indices.is_null().to_numpy(zero_copy_only=False) for array in arrays])
    return pa.DictionaryArray.from_arrays(pa.array(np.concatenate(indices), mask=null), pa.concat_arrays(values))


def _struct_field(array: Any, index: int, where: str) -> Any:
    import pyarrow as pa

    inner = array.type.field(index)
    kind = storage_type(inner.type)
    if not pa.types.is_union(kind) and not pa.types.is_run_end_encoded(kind):
        return array.flatten()[index]
    # pyarrow crashes, or forgets the nulls, if the struct around these types has nulls.
    if array.null_count:
        raise SourceError(
            "cannot read a union or run-end encoded column in a struct with nulls",
            found=f"{inner.name!r}: {kind}",
            where=where,
            remedy="leave the column out with columns=",
        )
    return array.field(index)


def _with_64_bit_offsets(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_list(kind):
        return pa.large_list(_with_64_bit_offsets(kind.value_type))
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


def _read(array: Any, field: Field, where: str) -> tuple[ColumnBuffer, Valid]:
    """The values of a column, and the mask of rows without nulls."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        return _read_dictionary(array, field, where)
    if field.kind == "dense":
        values, valid = numbers_of(array)
        values = values.reshape(len(array), *field.shape)
        return ColumnBuffer(values), rows_without_nulls(valid)
    if isinstance(array.type, pa.BaseExtensionType):
        return _read(array.storage, field, where)
    if field.kind == "object":
        return objects_of(array, where)
    valid = valid_of(array)
    if field.kind in ("bytes", "str"):
        return text_of(array), valid
    child, offsets = list_elements(array)
    values, inner = numbers_of(child)
    whole = rows_without_nulls(inner)
    if whole is not None and not whole.all():
        bad = np.flatnonzero(~whole)
        valid = np.ones(len(array), np.bool_) if valid is None else valid.copy()
        valid[offsets.searchsorted(bad, side="right") - 1] = False
    return ColumnBuffer(values, offsets), valid


def _read_dictionary(array: Any, field: Field, where: str) -> tuple[ColumnBuffer, Valid]:
    """A dictionary column: its values once, and the value of each row."""
    import pyarrow as pa

    valid = valid_of(array)
    values = array.dictionary
    missing = len(values)  # index of nulls: a value that is null
    indices = array.indices.cast(pa.int64()).fill_null(missing).to_numpy()
    used = None
    if missing > len(array):  # only the values that are used
        used, indices = np.unique(indices, return_inverse=True)
    elif valid is not None:
        used = np.arange(missing + 1)
    if used is not None:
        values = values.take(pa.array(used, mask=used == missing))
    buffer, valid_values = _read(values, field, where)
    if valid_values is not None and not valid_values.all():
        valid = valid_values[indices] if valid is None else valid & valid_values[indices]
    if buffer.index is not None:  # a dictionary of a dictionary
        indices = buffer.index[indices]
    return replace(buffer, index=indices.copy()), valid
