"""Arrow's columns as numpy sees them: views of Arrow's own buffers, copied only where they must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Field, Stored
from rankfeed.errors import CorruptError, RankfeedError, SourceError
from rankfeed.sources.arrow_types import (
    VALID,
    Nulls,
    element_of,
    field_at,
    field_of,
    fields_of,
    is_list,
    leaves_of,
    roots_of,
)

__all__ = ["VALID", "Nulls", "arrow_errors", "fields_of", "roots_of", "stored_of"]

Array = npt.NDArray[Any]
#: Which rows (or elements) are not null; None where all are, which is the rule and costs nothing.
Valid = npt.NDArray[np.bool_] | None


def stored_of(
    table: Any, fields: Mapping[str, Field], *, where: str, first_row: int = 0, nulls: Nulls = "error"
) -> dict[str, Stored]:
    """The columns of a table or record batch as they lie, or decoded.

    Args:
        table: a `pyarrow.Table` or `pyarrow.RecordBatch` with the columns that are needed.
        fields: those wanted, as :func:`fields_of` named them.
        where: the file (and part of it), for errors.
        first_row: number of the table's first row in that file, for errors.
        nulls: as for :func:`fields_of`.

    Raises:
        SourceError: a null; names file, row and column.
        CorruptError: a column is not of the type that it should be.

    Examples:
        >>> import pyarrow as pa
        >>> table = pa.table({"x": pa.array([[1, 2], [3]])})
        >>> stored = stored_of(table, fields_of(table.schema), where="here")["x"]
        >>> stored.values, stored.offsets
        (array([1, 2, 3]), array([0, 2, 3]))
    """
    paths = dict(leaves_of(table.schema))
    out: dict[str, Stored] = {}
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
        with arrow_errors(where):
            array = _descended(table, paths[column])
            stored, valid = _stored(array, field_of(array.type))
        if nulls == "error" and valid is not None and not valid.all():
            raise SourceError(
                "a value is null",
                expected=f"a value of {field}",
                found="null",
                where=f"{where}, row {first_row + int(np.argmin(valid))}, column {column!r}",
                remedy='leave the column out with columns=, or open with nulls="mask"',
            )
        if column in fields:
            out[column] = stored
        if column + VALID in fields and nulls == "mask":
            out[column + VALID] = Stored(np.ones(stored.rows, np.bool_) if valid is None else valid)
    return {name: out[name] for name in fields}


@contextmanager
def arrow_errors(where: str, remedy: str = "fetch the file anew, or write it again") -> Iterator[None]:
    """Turns what pyarrow raises into errors that name the file.

    Raises:
        SourceError: the file cannot be opened.
        CorruptError: anything else.
    """
    import pyarrow as pa

    try:
        yield
    except RankfeedError:
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise SourceError("the file cannot be read", found=_first_line(error), where=where) from error
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError) as error:
        raise CorruptError("the data are damaged", found=_first_line(error), where=where, remedy=remedy) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _descended(table: Any, path: tuple[str, ...]) -> Any:
    """One contiguous array of a column; a struct's null makes what is in it null."""
    import pyarrow as pa

    array = table.column(path[0])
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
        if isinstance(array, pa.ChunkedArray):  # combined to none, or to several of 2 GiB
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    for name in path[1:]:
        # flatten, unlike field, minds the struct's own nulls and where its slice begins.
        array = array.flatten()[array.type.get_field_index(name)]
    return array


def _stored(array: Any, field: Field) -> tuple[Stored, Valid]:
    """A column's values, and which rows are valid: not null, and without a null in them."""
    array = _plain(array)
    if field.kind == "dense":
        values, valid = _numbers(array)
        values = values.reshape(len(array), *field.shape)
        return Stored(values), _all_of(valid)
    valid = _valid(array)
    if field.kind in ("bytes", "str"):
        return _text(array), valid
    if field.kind == "object":
        values = np.empty(len(array), object)
        values[:] = _objects(array)
        return Stored(values), valid
    child, offsets = _list(array)
    values, inner = _numbers(_plain(child))
    whole = _all_of(inner)
    if whole is not None and not whole.all():
        bad = np.flatnonzero(~whole)
        valid = np.ones(len(array), np.bool_) if valid is None else valid.copy()
        valid[offsets.searchsorted(bad, side="right") - 1] = False
    return Stored(values, offsets), valid


def _all_of(valid: Valid) -> Valid:
    """Which rows have no null in them."""
    if valid is None or valid.ndim == 1:
        return valid
    whole: npt.NDArray[np.bool_] = np.logical_and.reduce(valid, axis=tuple(range(1, valid.ndim)))
    return whole


def _plain(array: Any) -> Any:
    """Without dictionary and extension type."""
    import pyarrow as pa

    while True:
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        elif pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        else:
            return array


def _valid(array: Any) -> Valid:
    return array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None


def _numbers(array: Any) -> tuple[Array, Valid]:
    """Numbers as [rows, *shape], zero where null, and which elements are valid: [rows], or [rows, elements]."""
    import pyarrow as pa

    array = _plain(array)
    valid = _valid(array)
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        child = array.values.slice(array.offset * size, len(array) * size)
        values, inner = _numbers(child)
        values = values.reshape(len(array), size, *values.shape[1:])
        if inner is not None:
            inner = inner.reshape(len(array), inner.size // max(1, len(array)))
        if valid is None:
            return values, inner
        values = np.where(valid.reshape(-1, *[1] * (values.ndim - 1)), values, np.zeros((), values.dtype))
        return values, valid if inner is None or not size else valid[:, None] & inner
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif pa.types.is_decimal(kind):
        array = array.cast(pa.string()).cast(pa.float64())  # a direct cast is off by a bit now and then
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        array = array.view(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(pa.int64())
    if array.null_count:
        array = array.fill_null(pa.scalar(0, array.type))
    if pa.types.is_boolean(kind):
        return array.to_numpy().view(np.bool_), valid
    return array.to_numpy(), valid


def _text(array: Any) -> Stored:
    import pyarrow as pa

    kind = array.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if array.null_count:
        array = array.cast(pa.large_string() if text else pa.large_binary()).fill_null("" if text else b"")
    elif not any(
        same(kind)
        for same in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    ):
        array = array.cast(pa.large_string() if text else pa.large_binary())
    stored = _segments(array)
    if text:
        array.validate(full=True)  # here, where the file is known: whether it is UTF-8
    return stored


def _segments(array: Any) -> Stored:
    """Text or bytes as they lie, from the first byte of the first row to the last of the last."""
    import pyarrow as pa

    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    if not len(array):
        return Stored(np.empty(0, np.uint8), np.zeros(1, np.int64))
    _, places, data = array.buffers()
    dtype = np.dtype(np.int64 if wide else np.int32)
    offsets = np.frombuffer(places, dtype, len(array) + 1, array.offset * dtype.itemsize).astype(np.int64)
    values = np.empty(0, np.uint8) if data is None or not data.size else np.frombuffer(data, np.uint8)
    _check_offsets(offsets, len(values))
    first, last = int(offsets[0]), int(offsets[-1])
    return Stored(values[first:last], offsets - first)


def _list(array: Any) -> tuple[Any, npt.NDArray[np.int64]]:
    """The elements of a list column one after the other, and where each row starts; null rows are empty."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        # Not by a cast, which pyarrow 26 writes wrong offsets in.
        array.validate(full=True)
        lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)
        return array.flatten(), np.concatenate([[0], np.cumsum(lengths)])
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    child = array.values
    _check_offsets(offsets, len(child))
    lengths = np.diff(offsets)
    valid = _valid(array)
    if valid is not None and (hidden := ~valid & (lengths > 0)).any():
        # Arrow lets a null row have elements, which nobody sees: they are left out.
        keep = np.repeat(~hidden, lengths)
        child = child.slice(int(offsets[0]), int(offsets[-1] - offsets[0])).filter(pa.array(keep))
        lengths[hidden] = 0
        return child, np.concatenate([[0], np.cumsum(lengths)])
    return child.slice(int(offsets[0]), int(offsets[-1] - offsets[0])), offsets - offsets[0]


def _check_offsets(offsets: npt.NDArray[np.int64], size: int) -> None:
    """Refuse offsets that lead out of the values: a file may say anything."""
    if len(offsets) and (offsets[0] < 0 or offsets[-1] > size or (offsets[1:] < offsets[:-1]).any()):
        raise CorruptError(
            "the offsets of a column are damaged",
            expected=f"rising numbers from 0 to {size}",
            found=f"{offsets.min()} to {offsets.max()}",
        )


def _objects(array: Any) -> list[Any]:
    """Rows as Python objects: lists of numbers are arrays, however deep they lie."""
    array = _plain(array)
    if not is_list(array.type) or array.null_count:
        rows: list[Any] = array.to_pylist()
        return rows
    child, offsets = _list(array)
    if element_of(child.type) is not None and child.null_count == 0:
        values, valid = _numbers(child)
        if valid is None or valid.all():
            return np.split(values, offsets[1:-1]) if len(array) else []
    inner = _objects(child)
    return [inner[first:last] for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
