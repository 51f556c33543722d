"""Columns of Arrow tables and record batches as numpy arrays: views of their buffers if possible."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankfeed.columns.columns import Array, ColumnBuffer, Unreadable
from rankfeed.columns.field import Field
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow.types import (
    VALID,
    ArrayShape,
    Nulls,
    Path,
    element_of,
    field_of,
    is_list,
    leaves_of,
    shaped_field,
    storage_type,
    tensor_axes,
)
from rankfeed.sources.source import Int64, starts_of
from rankfeed.storage.file_errors import arrow_errors

#: Mask of rows (or elements) that are not null; None if none is null.
Valid = npt.NDArray[np.bool_] | None
#: Rows of nested lists of another length than declared: the declared and the found length.
Misshapen = dict[int, tuple[int, int]]
#: float64 holds all decimals of this many digits.
_EXACT_DIGITS = 15
#: The longest decimals of Arrow.
_MOST_DIGITS = 76
NULL_REMEDY = (
    'pass nulls="mask", or columns= without the column, to the function that reads the data: rankfeed.open, '
    "rankfeed.from_dataset, or rows of a text file"
)


def read_columns(
    table: Any,
    fields: Mapping[str, Field],
    *,
    where: str,
    first_row: int | Int64 = 0,
    nulls: Nulls = "error",
    shapes: Mapping[str, ArrayShape] | None = None,
) -> dict[str, ColumnBuffer]:
    """Columns of a table or record batch, as `fields_of` named them with the same ``nulls`` and ``shapes``.

    Offsets, indices of dictionaries and text are validated before they are used. Nulls that are errors are raised
    by `ColumnBuffer.part`, for the rows that it is asked for. ``where`` and ``first_row`` (of the first row, or
    int64 [rows] of each) are for errors.
    """
    leaves = {name: (path, kind) for name, path, kind in leaves_of(table.schema)}
    shapes = shapes or {}
    out: dict[str, ColumnBuffer] = {}
    validated: set[str] = set()  # top-level columns
    for name, field in fields.items():
        if name in out:
            continue  # a mask, created with its column
        is_mask = nulls == "mask" and name not in leaves
        column = name.removesuffix(VALID) if is_mask else name
        path, kind = leaves.get(column, (None, None))
        own = None if kind is None else shaped_field(kind, shapes[column]) if column in shapes else field_of(kind)
        if path is None or own is None or (not is_mask and own != field):
            raise CorruptError(
                "a column is missing or of another type than expected",
                expected=f"{name!r}: {field}",
                found=", ".join(f"{stored.name!r}: {stored.type}" for stored in table.schema)[:500],
                where=where,
                remedy="write the files with one schema",
            )
        misshapen: Misshapen = {}
        place = f"{where}, column {column!r}"
        with arrow_errors(place):
            if path[0] not in validated:
                table.column(path[0]).validate(full=True)
                validated.add(path[0])
            array = _array_at(table, path, kind, where)
            if column in shapes and own.kind != "object":
                buffer, valid, misshapen = _read_shaped(array, own, shapes[column])
            else:
                buffer, valid = _read(array, own, place)
        is_error = valid is not None and nulls == "error"
        if is_error or misshapen:
            bad = ~valid if valid is not None and is_error else np.zeros(len(array), np.bool_)
            bad[list(misshapen)] = True
            error = partial(_row_error, own, where, column, first_row, misshapen)
            buffer = replace(buffer, unreadable=Unreadable(bad, error))
        if column in fields:
            out[column] = buffer
        if column + VALID in fields and nulls == "mask":
            out[column + VALID] = ColumnBuffer(np.ones(len(array), np.bool_) if valid is None else valid)
    return {name: out[name] for name in fields}


def _row_error(
    field: Field, where: str, column: str, first_row: int | Int64, misshapen: Misshapen, row: int
) -> SourceError:
    row_number = first_row + row if isinstance(first_row, int) else int(first_row[row])
    place = f"{where}, row {row_number}, column {column!r}"
    if row in misshapen:
        return shape_error(*misshapen[row], place)
    return SourceError(
        "a value is null", expected=f"a value of {field}", found="null", where=place, remedy=NULL_REMEDY
    )


def shape_error(expected: int, actual: int, where: str) -> CorruptError:
    """The error for a list of another length than its column declares."""
    return CorruptError(
        "an array has another shape than its column",
        expected=f"lists of {expected}",
        found=f"one of {actual}",
        where=where,
        remedy="correct the shape, or write the data again",
    )


def _array_at(table: Any, path: Path, kind: Any, where: str) -> Any:
    """A column as one contiguous array; a null struct makes its fields null."""
    column = table.column(path[0])
    arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for index in path[1:]:
        arrays = [_struct_field(array, index, where) for array in arrays]
    if len(arrays) == 1:
        return arrays[0]
    if not pa.types.is_dictionary(kind) or not arrays:
        kind = _with_64_bit_offsets(kind)
        return pa.concat_arrays([array.cast(kind) for array in arrays]) if arrays else pa.array([], kind)
    # pyarrow cannot concatenate dictionary arrays with a null among their values.
    value_type = _with_64_bit_offsets(kind.value_type)
    values = [array.dictionary.cast(value_type) for array in arrays]
    firsts = starts_of([len(part) for part in values])[:-1]
    indices = [
        array.indices.cast(pa.int64()).fill_null(0).to_numpy() + first
        for array, first in zip(arrays, firsts, strict=True)
    ]
    null = np.concatenate([array.indices.is_null().to_numpy(zero_copy_only=False) for array in arrays])
    return pa.DictionaryArray.from_arrays(pa.array(np.concatenate(indices), mask=null), pa.concat_arrays(values))


def _struct_field(array: Any, index: int, where: str) -> Any:
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
    if pa.types.is_list(kind):
        return pa.large_list(_with_64_bit_offsets(kind.value_type))
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


def _read(array: Any, field: Field, where: str) -> tuple[ColumnBuffer, Valid]:
    """The values of a column, and the mask of rows without nulls."""
    if pa.types.is_dictionary(array.type):
        return _read_dictionary(array, field, where)
    if field.kind == "dense":
        values, valid = _numbers_of(array)
        return ColumnBuffer(values.reshape(len(array), *field.shape)), valid
    if isinstance(array.type, pa.BaseExtensionType):
        return _read(array.storage, field, where)
    valid = _valid_of(array)
    if field.kind == "object":
        return _objects_of(array, where), valid
    if field.kind in ("bytes", "str"):
        is_text = field.kind == "str"
        # Values are copied if they are views.
        array = array.cast(pa.large_string() if is_text else pa.large_binary())
        if array.null_count:
            array = array.fill_null("" if is_text else b"")
        if not len(array):
            return ColumnBuffer(np.empty(0, np.uint8), np.zeros(1, np.int64)), valid
        _, places, data = array.buffers()
        offsets = np.frombuffer(places, np.int64, len(array) + 1, array.offset * 8)
        values = np.empty(0, np.uint8) if data is None or not data.size else np.frombuffer(data, np.uint8)
        return ColumnBuffer(values[offsets[0] : offsets[-1]], offsets - offsets[0]), valid
    child, offsets = _list_elements(array)
    values, inner = _numbers_of(child)
    if inner is not None:
        valid = np.ones(len(array), np.bool_) if valid is None else valid.copy()
        valid[_rows_at(np.flatnonzero(~inner), offsets)] = False
    return ColumnBuffer(values, offsets), valid


def _read_dictionary(array: Any, field: Field, where: str) -> tuple[ColumnBuffer, Valid]:
    """A dictionary column: its values once, and the value of each row."""
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
    elements, starts, ends, valid, misshapen = _descend(array, shape)
    good = valid.copy()
    good[list(misshapen)] = False
    if not good.all():
        elements, starts, ends, _, _ = _descend(array.filter(pa.array(good)), shape)
    values, inner = _numbers_of(elements)
    if inner is not None:
        valid[np.flatnonzero(good)[_rows_at(np.flatnonzero(~inner), ends)]] = False
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
    """The elements of the innermost lists of nested ones, and how rows are made of them.

    Where each row starts in the lists of the first level and in the elements: int64 [rows + 1] each; the mask of
    the rows without a null list; the rows with a list of another length.
    """
    starts = ends = np.arange(len(array) + 1)
    whole, misshapen = np.ones(len(array), np.bool_), Misshapen()
    for level, length in enumerate(shape):
        array = _plain_of(array)
        if (valid := _valid_of(array)) is not None:
            rows = _rows_at(np.flatnonzero(~valid), ends)
            whole[[row for row in rows.tolist() if row not in misshapen]] = False
        array, offsets = _list_elements(array)
        if length is not None:
            lengths = np.diff(offsets)
            wrong = np.flatnonzero(lengths != length)
            for row, actual in zip(_rows_at(wrong, ends).tolist(), lengths[wrong].tolist(), strict=True):
                if whole[row]:
                    misshapen.setdefault(row, (length, actual))
        ends = offsets[ends]
        starts = ends if level == 0 else starts
    return array, starts, ends, whole, misshapen


def _plain_of(array: Any) -> Any:
    """An array without dictionary and extension types."""
    while True:
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        elif pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        else:
            return array


def _valid_of(array: Any) -> Valid:
    if pa.types.is_run_end_encoded(array.type):
        if _valid_of(array.values) is None:  # a mask would have a value for each of any number of rows
            return None
    elif not array.null_count and not pa.types.is_union(array.type):  # a union counts no nulls
        return None
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return None if valid.all() else valid


def _numbers_of(array: Any) -> tuple[Array, Valid]:
    """Numbers as [rows, *shape], zero if null, and the mask of rows without nulls."""
    if isinstance(array.type, pa.FixedShapeTensorType):
        values, valid = _numbers_of(array.storage)
        values = values.reshape(len(array), *array.type.shape, *values.shape[2:])
        axes = [1 + axis for axis in tensor_axes(array.type)]
        rest = range(1 + len(axes), values.ndim)
        return np.ascontiguousarray(values.transpose(0, *axes, *rest)), valid
    array = _plain_of(array)
    valid = _valid_of(array)
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        # Null rows have values too.
        values, inner = _numbers_of(array.values.slice(array.offset * size, len(array) * size))
        values = values.reshape(len(array), size, *values.shape[1:])
        if inner is not None:
            inner = np.logical_and.reduce(inner.reshape(len(array), size), axis=1)
        if valid is None:
            return values, inner
        values = np.where(valid.reshape(-1, *[1] * (values.ndim - 1)), values, np.zeros((), values.dtype))
        return values, valid if inner is None else valid & inner
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif pa.types.is_decimal(kind):
        array = _floats(array)
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        array = array.view(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(pa.int64())
    if valid is not None:
        array = array.fill_null(pa.scalar(0, array.type))
    numbers = array.to_numpy()
    return numbers.view(np.bool_) if pa.types.is_boolean(kind) else numbers, valid


def _floats(array: Any) -> Any:
    """Decimals as float64; a SourceError if a value would lose digits."""
    import pyarrow.compute as pc  # takes longer than pyarrow itself

    texts = array.cast(pa.string())
    floats = texts.cast(pa.float64())  # a direct cast is not always exact
    if array.type.precision <= _EXACT_DIGITS:
        return floats
    kind = array.type
    exact = pa.decimal256(_MOST_DIGITS, max(kind.scale, _MOST_DIGITS - 1 - kind.precision + kind.scale))
    loss: object = None
    try:  # neither the shortest text for the float is the same number, nor the float
        lossy = pc.not_equal(floats.cast(pa.string()).cast(exact), array.cast(exact))
        if pc.any(lossy).as_py():
            lossy = pc.and_(lossy, pc.not_equal(floats.cast(exact), array.cast(exact)))
        if pc.any(lossy).as_py():
            loss = f"{texts.filter(lossy)[0]}, which would become {floats.filter(lossy)[0].as_py()!r}"
    except pa.ArrowException as error:  # the float has more digits
        loss = error
    if loss is not None:
        raise SourceError(
            "a decimal would lose digits as float64",
            expected="a value that float64 holds, as all of up to 15 digits are",
            found=loss,
            remedy="cast the column when you write it (to int64 or text), or leave it out with columns=",
        )
    return floats


def _list_elements(array: Any) -> tuple[Any, Int64]:
    """The elements of a list column, and int64 [rows + 1] where each row starts; null rows are empty."""
    import pyarrow.compute as pc  # takes longer than pyarrow itself

    if not len(array):  # its only offset may have any value
        return array.values[:0], np.zeros(1, np.int64)
    lengths = pc.list_value_length(array).fill_null(0).to_numpy()
    return array.flatten(), starts_of(lengths)  # without the elements of null rows


def _objects_of(array: Any, where: str) -> ColumnBuffer:
    """Rows that are decoded to Python objects when they are read."""

    def decode(rows: Int64) -> Array:
        decoded = np.empty(len(rows), object)
        with arrow_errors(where):
            if len(rows) and (np.diff(rows) == 1).all():
                decoded[:] = _objects(array.slice(int(rows[0]), len(rows)))
                return decoded
            try:
                decoded[:] = _objects(array.take(pa.array(rows)))
            except pa.ArrowNotImplementedError:  # run-end encoded
                decoded[:] = [_objects(array.slice(row, 1))[0] for row in rows.tolist()]
        return decoded

    # A view of one None: a value per row that takes no memory.
    values = np.broadcast_to(np.array(None, object), len(array))
    return ColumnBuffer(values, extra_bytes=int(array.nbytes), decode=decode)


def _objects(array: Any) -> list[Any]:
    """Rows as Python objects; lists of numbers at any depth are arrays, or lists if they contain a null.

    The type of a row does not depend on the rows decoded with it.
    """
    array = _plain_of(array)
    if not is_list(array.type):
        rows: list[Any] = array.to_pylist()
        return rows
    child, offsets = _list_elements(array)
    if element_of(child.type) is not None:
        values, inner = _numbers_of(child)
        # A copy: views of the buffer would keep the file open.
        rows = list[Any](np.split(values.copy(), offsets[1:-1])) if len(array) else []
        for row in [] if inner is None else np.unique(_rows_at(np.flatnonzero(~inner), offsets)).tolist():
            rows[row] = child[offsets[row] : offsets[row + 1]].to_pylist()
    else:
        objects = _objects(child)
        rows = [objects[first:last] for first, last in pairwise(offsets.tolist())]
    valid = _valid_of(array)
    for row in [] if valid is None else np.flatnonzero(~valid).tolist():
        rows[row] = None
    return rows


def _rows_at(places: Int64, starts: Int64) -> Int64:
    """The rows in which elements are, of rows that start there: int64 [rows + 1]."""
    return starts.searchsorted(places, side="right") - 1
