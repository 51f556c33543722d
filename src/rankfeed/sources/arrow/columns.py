"""Columns of Arrow tables and record batches as numpy arrays, and their nulls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import ColumnBuffer, Field, Unreadable
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow.arrays import (
    Valid,
    fixed_size_elements,
    list_elements,
    numbers_of,
    objects_of,
    plain_of,
    rows_at,
    text_of,
    valid_of,
)
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.sources.arrow.types import (
    VALID,
    ArrayShape,
    Nulls,
    Path,
    field_of,
    leaves_of,
    shaped_field,
    storage_type,
    type_at,
)
from rankfeed.sources.source import Int64, starts_of

#: Rows of nested lists of another length than declared: the declared and the found length.
Misshapen = dict[int, tuple[int, int]]


def read_columns(
    table: Any,
    fields: Mapping[str, Field],
    *,
    where: str,
    first_row: int | Int64 = 0,
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
    paths, shapes = dict(leaves_of(table.schema)), shapes or {}
    out: dict[str, ColumnBuffer] = {}
    for name, field in fields.items():
        if name in out:
            continue  # a mask, created with its column
        is_mask = nulls == "mask" and name not in paths
        column = name.removesuffix(VALID) if is_mask else name
        kind = type_at(table.schema, paths[column]) if column in paths else None
        own = None if kind is None else shaped_field(kind, shapes[column]) if column in shapes else field_of(kind)
        if own is None or (not is_mask and own != field):
            raise CorruptError(
                "a column is missing or of another type than expected",
                expected=f"{name!r}: {field}",
                found=", ".join(f"{each.name!r}: {each.type}" for each in table.schema)[:500],
                where=where,
                remedy="write the files with one schema",
            )
        misshapen: Misshapen = {}
        place = f"{where}, column {column!r}"
        with arrow_errors(place):
            array = _array_at(table, paths[column], where)
            if column in shapes and own.kind != "object":
                buffer, valid, misshapen = _read_shaped(array, own, shapes[column])
            else:
                buffer, valid = _read(array, own, place)
        bad = np.zeros(len(array), np.bool_) if valid is None or nulls == "mask" else ~valid
        bad[list(misshapen)] = True
        if bad.any():
            error = _row_error(own, where, column, first_row, misshapen)
            buffer = replace(buffer, unreadable=Unreadable(bad, error))
        if column in fields:
            out[column] = buffer
        if column + VALID in fields and nulls == "mask":
            out[column + VALID] = ColumnBuffer(np.ones(len(array), np.bool_) if valid is None else valid)
    return {name: out[name] for name in fields}


def _row_error(
    field: Field, where: str, column: str, first_row: int | Int64, misshapen: Misshapen
) -> Callable[[int], SourceError]:
    """A function that creates the error for a row that cannot be read."""

    def error(row: int) -> SourceError:
        number = first_row + row if isinstance(first_row, int) else int(first_row[row])
        place = f"{where}, row {number}, column {column!r}"
        if row in misshapen:
            return shape_error(*misshapen[row], place)
        return SourceError(
            "a value is null",
            expected=f"a value of {field}",
            found="null",
            where=place,
            remedy='leave the column out with columns=, or open with nulls="mask"',
        )

    return error


def shape_error(expected: int, found: int, where: str) -> CorruptError:
    """The error for a list of another length than its column declares."""
    return CorruptError(
        "an array has another shape than its column",
        expected=f"lists of {expected}",
        found=f"one of {found}",
        where=where,
        remedy="correct the shape, or write the data again",
    )


def _array_at(table: Any, path: Path, where: str) -> Any:
    """A column as one contiguous array; a null struct makes its fields null."""
    import pyarrow as pa

    column = table.column(path[0])
    arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for index in path[1:]:
        arrays = [_struct_field(array, index, where) for array in arrays]
    if len(arrays) == 1:
        return arrays[0]
    kind = type_at(table.schema, path)
    if pa.types.is_dictionary(kind) and arrays:
        return _concat_dictionaries(arrays)
    kind = _with_64_bit_offsets(kind)
    return pa.concat_arrays([array.cast(kind) for array in arrays]) if arrays else pa.array([], kind)


def _concat_dictionaries(arrays: list[Any]) -> Any:
    """Dictionary arrays as one; pyarrow cannot concatenate those with a null among their values."""
    import pyarrow as pa

    kind = _with_64_bit_offsets(arrays[0].type.value_type)
    values = [array.dictionary.cast(kind) for array in arrays]
    firsts = starts_of([len(each) for each in values])[:-1]
    indices = [
        array.indices.cast(pa.int64()).fill_null(0).to_numpy() + first
        for array, first in zip(arrays, firsts, strict=True)
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
    """The type for joined arrays: together they may have more text or elements than 32 bits count."""
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
        return ColumnBuffer(values.reshape(len(array), *field.shape)), valid
    if isinstance(array.type, pa.BaseExtensionType):
        return _read(array.storage, field, where)
    valid = valid_of(array)
    if field.kind == "object":
        return objects_of(array, where), valid
    if field.kind in ("bytes", "str"):
        return text_of(array, is_text=field.kind == "str"), valid
    child, offsets = list_elements(array)
    values, inner = numbers_of(child)
    if inner is not None:
        valid = np.ones(len(array), np.bool_) if valid is None else valid.copy()
        valid[rows_at(np.flatnonzero(~inner), offsets)] = False
    return ColumnBuffer(values, offsets), valid


def _read_dictionary(array: Any, field: Field, where: str) -> tuple[ColumnBuffer, Valid]:
    """A dictionary column: its values once, and the value of each row."""
    import pyarrow as pa

    values = array.dictionary
    missing = len(values)  # index of nulls: a value that is null
    indices = array.indices.cast(pa.int64()).fill_null(missing).to_numpy()
    if missing > len(array):  # only the values that are used
        used, indices = np.unique(indices, return_inverse=True)
    else:
        used = np.arange(missing + bool(array.indices.null_count))
    if len(used) != missing:
        values = values.take(pa.array(used, mask=used == missing))
    buffer, valid = _read(values, field, where)
    if valid is not None:
        valid = valid[indices]
    if buffer.index is not None:  # a dictionary of a dictionary
        indices = buffer.index[indices]
    return replace(buffer, index=indices.copy()), None if valid is None or valid.all() else valid


def _read_shaped(array: Any, field: Field, shape: ArrayShape) -> tuple[ColumnBuffer, Valid, Misshapen]:
    """A column of nested lists as arrays, the mask of rows without nulls, and the rows of another shape.

    Rows in which a list is null or has another length than declared are zero or empty.
    """
    import pyarrow as pa

    elements, starts, ends, valid, misshapen = _descend(array, shape)
    good = valid.copy()
    good[list(misshapen)] = False
    if not good.all():
        elements, starts, ends, _, _ = _descend(array.filter(pa.array(good)), shape)
    values, inner = numbers_of(elements)
    if inner is not None:
        valid[np.flatnonzero(good)[rows_at(np.flatnonzero(~inner), ends)]] = False
    valid_rows = None if valid.all() else valid
    if field.kind == "ragged":
        lengths = np.zeros(len(array), np.int64)
        lengths[good] = np.diff(starts)
        offsets = starts_of(lengths)
        return ColumnBuffer(values.reshape(offsets[-1], *field.shape), offsets), valid_rows, misshapen
    values = values.reshape(len(starts) - 1, *field.shape)
    if not good.all():
        values, taken = np.zeros((len(array), *field.shape), values.dtype), values
        values[good] = taken
    return ColumnBuffer(values), valid_rows, misshapen


def _descend(array: Any, shape: ArrayShape) -> tuple[Any, Int64, Int64, npt.NDArray[np.bool_], Misshapen]:
    """The elements of nested lists, and how rows are made of them.

    Returns:
        the elements of the innermost lists; where each row starts in the lists of the first level and in the
        elements: int64 [rows + 1] each; mask of the rows without a null list; rows with a list of another length.
    """
    import pyarrow as pa

    starts = ends = np.arange(len(array) + 1)
    whole, misshapen = np.ones(len(array), np.bool_), Misshapen()
    for level, length in enumerate(shape):
        array = plain_of(array)
        valid = valid_of(array)
        if valid is not None:
            rows = rows_at(np.flatnonzero(~valid), ends)
            whole[[row for row in rows.tolist() if row not in misshapen]] = False
        if pa.types.is_fixed_size_list(array.type):
            size = array.type.list_size
            array, offsets = fixed_size_elements(array), np.arange(len(array) + 1) * size
        else:
            array, offsets = list_elements(array)
        if length is not None:
            lengths = np.diff(offsets)
            wrong = np.flatnonzero(lengths != length)
            for row, found in zip(rows_at(wrong, ends).tolist(), lengths[wrong].tolist(), strict=True):
                if whole[row]:
                    misshapen.setdefault(row, (length, found))
        ends = offsets[ends]
        starts = ends if level == 0 else starts
    return array, starts, ends, whole, misshapen
