"""Arrow arrays as numpy arrays: views of Arrow's buffers, copied only if necessary."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import ColumnBuffer
from rankfeed.errors import CorruptError
from rankfeed.sources.arrow.errors import InexactDecimalError, arrow_errors
from rankfeed.sources.arrow.types import element_of, is_list, is_list_view, tensor_axes
from rankfeed.sources.source import Int64, starts_of

Array = npt.NDArray[Any]
#: Mask of rows (or elements) that are not null; None if none is null.
Valid = npt.NDArray[np.bool_] | None
#: float64 holds all decimals of this many digits.
_EXACT_DIGITS = 15


def plain_of(array: Any) -> Any:
    """An array without dictionary and extension types."""
    import pyarrow as pa

    while True:
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        elif pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        else:
            return array


def valid_of(array: Any) -> Valid:
    """Mask of the rows that are not null."""
    import pyarrow as pa

    # Unions and run-end encoded arrays count no nulls.
    if not array.null_count and not pa.types.is_union(array.type) and not pa.types.is_run_end_encoded(array.type):
        return None
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return None if valid.all() else valid


def numbers_of(array: Any) -> tuple[Array, Valid]:
    """Numbers as [rows, *shape], zero if null, and the mask of rows without nulls."""
    import pyarrow as pa

    if isinstance(array.type, pa.FixedShapeTensorType):
        values, valid = numbers_of(array.storage)
        values = values.reshape(len(array), *array.type.shape, *values.shape[2:])
        axes = [1 + axis for axis in tensor_axes(array.type)]
        rest = range(1 + len(axes), values.ndim)
        return np.ascontiguousarray(values.transpose(0, *axes, *rest)), valid
    array = plain_of(array)
    valid = valid_of(array)
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        values, inner = numbers_of(fixed_size_elements(array))
        values = values.reshape(len(array), kind.list_size, *values.shape[1:])
        if inner is not None:
            inner = np.logical_and.reduce(inner.reshape(len(array), kind.list_size), axis=1)
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
    """Decimals as float64; an InexactDecimalError if a value would lose digits."""
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = array.cast(pa.string())
    floats = texts.cast(pa.float64())  # a direct cast is not always exact
    if array.type.precision <= _EXACT_DIGITS:
        return floats
    digits = pc.utf8_trim(pc.replace_substring_regex(texts, r"E.*|[^0-9]", ""), "0")
    long = pc.greater(pc.utf8_length(digits), _EXACT_DIGITS)
    if array.type.scale <= 0:
        long = pc.and_(long, pc.greater_equal(pc.abs(floats), 2.0**53))
    long = long.fill_null(False)
    for text, value in zip(texts.filter(long).to_pylist(), floats.filter(long).to_pylist(), strict=True):
        if Decimal(text) not in (Decimal(value), Decimal(repr(value))):
            raise InexactDecimalError(f"{text}, which would become {value!r}")
    return floats


def text_of(array: Any, *, is_text: bool) -> ColumnBuffer:
    """Text or bytes as views of the buffers; empty if null."""
    import pyarrow as pa

    array = array.cast(pa.large_string() if is_text else pa.large_binary())  # values are copied if they are views
    if array.null_count:
        array = array.fill_null("" if is_text else b"")
    if not len(array):
        return ColumnBuffer(np.empty(0, np.uint8), np.zeros(1, np.int64))
    _, places, data = array.buffers()
    offsets = np.frombuffer(places, np.int64, len(array) + 1, array.offset * 8)
    values = np.empty(0, np.uint8) if data is None or not data.size else np.frombuffer(data, np.uint8)
    _check_offsets(offsets, len(values))
    if is_text:
        array.validate(full=True)  # UTF-8, here where the file is known
    return ColumnBuffer(values[offsets[0] : offsets[-1]], offsets - offsets[0])


def fixed_size_elements(array: Any) -> Any:
    """The elements of fixed-size lists, also those of null rows."""
    size = array.type.list_size
    return array.values.slice(array.offset * size, len(array) * size)


def list_elements(array: Any) -> tuple[Any, Int64]:
    """The elements of a list column, and int64 [rows + 1] where each row starts; null rows are empty."""
    import pyarrow.compute as pc

    if not len(array):  # its only offset may have any value
        return array.values[:0], np.zeros(1, np.int64)
    if is_list_view(array.type):
        array.validate(full=True)
        lengths = pc.list_value_length(array).fill_null(0).to_numpy()
    else:
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        _check_offsets(offsets, len(array.values))
        valid = valid_of(array)
        lengths = np.diff(offsets) if valid is None else np.where(valid, np.diff(offsets), 0)
    return array.flatten(), starts_of(lengths)  # without the elements of null rows


def _check_offsets(offsets: Int64, size: int) -> None:
    """Refuse offsets outside of the values, which a damaged file may have."""
    if len(offsets) and (offsets[0] < 0 or offsets[-1] > size or (offsets[1:] < offsets[:-1]).any()):
        raise CorruptError(
            "the offsets of a column are damaged",
            expected=f"ascending numbers from 0 to {size}",
            found=f"{offsets.min()} to {offsets.max()}",
        )


def objects_of(array: Any, where: str) -> ColumnBuffer:
    """Rows that are decoded to Python objects when they are read."""
    import pyarrow as pa

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
    array = plain_of(array)
    if not is_list(array.type):
        rows: list[Any] = array.to_pylist()
        return rows
    child, offsets = list_elements(array)
    if element_of(child.type) is not None:
        values, inner = numbers_of(child)
        # A copy: views of the buffer would keep the file open.
        rows = list[Any](np.split(values.copy(), offsets[1:-1])) if len(array) else []
        for row in [] if inner is None else np.unique(rows_at(np.flatnonzero(~inner), offsets)).tolist():
            rows[row] = child[offsets[row] : offsets[row + 1]].to_pylist()
    else:
        objects = _objects(child)
        rows = [objects[first:last] for first, last in pairwise(offsets.tolist())]
    valid = valid_of(array)
    for row in [] if valid is None else np.flatnonzero(~valid).tolist():
        rows[row] = None
    return rows


def rows_at(places: Int64, starts: Int64) -> Int64:
    """The rows in which elements are, of rows that start there: int64 [rows + 1]."""
    return starts.searchsorted(places, side="right") - 1
