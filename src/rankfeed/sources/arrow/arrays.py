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
from rankfeed.sources.arrow.types import element_of, is_list, tensor_axes

Array = npt.NDArray[Any]
#: Mask of rows (or elements) that are not null; None if none is null.
Valid = npt.NDArray[np.bool_] | None
#: Rows of a union that are decoded at once to find its nulls.
_UNION_ROWS = 4096
#: float64 holds all decimals of this many digits.
_EXACT_DIGITS = 15


def rows_without_nulls(valid: Valid) -> Valid:
    """Mask of the rows without a null in them."""
    if valid is None or valid.ndim == 1:
        return valid
    whole: npt.NDArray[np.bool_] = np.logical_and.reduce(valid, axis=tuple(range(1, valid.ndim)))
    return whole


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
    return array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None


def numbers_of(array: Any) -> tuple[Array, Valid]:
    """Numbers as [rows, *shape], zero if null, and the mask of valid ones: [rows] or [rows, elements]."""
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
        size = kind.list_size
        child = array.values.slice(array.offset * size, len(array) * size)
        values, inner = numbers_of(child)
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
        array = _floats(array)
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        array = array.view(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(pa.int64())
    if array.null_count:
        array = array.fill_null(pa.scalar(0, array.type))
    if pa.types.is_boolean(kind):
        return array.to_numpy().view(np.bool_), valid
    return array.to_numpy(), valid


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


def text_of(array: Any) -> ColumnBuffer:
    """Text or bytes; empty if null."""
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
        array.validate(full=True)  # UTF-8, here where the file is known
    return stored


def _segments(array: Any) -> ColumnBuffer:
    """Text or bytes as views of the buffers."""
    import pyarrow as pa

    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    if not len(array):
        return ColumnBuffer(np.empty(0, np.uint8), np.zeros(1, np.int64))
    _, places, data = array.buffers()
    dtype = np.dtype(np.int64 if wide else np.int32)
    offsets = np.frombuffer(places, dtype, len(array) + 1, array.offset * dtype.itemsize).astype(np.int64)
    values = np.empty(0, np.uint8) if data is None or not data.size else np.frombuffer(data, np.uint8)
    _check_offsets(offsets, len(values))
    first, last = int(offsets[0]), int(offsets[-1])
    return ColumnBuffer(values[first:last], offsets - first)


def list_elements(array: Any) -> tuple[Any, npt.NDArray[np.int64]]:
    """The elements of a list column, and int64 [rows + 1] where each row starts; null rows are empty."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        # A cast in pyarrow 26 writes wrong offsets.
        array.validate(full=True)
        lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)
        return array.flatten(), np.concatenate([[0], np.cumsum(lengths)])
    if not len(array):  # its only offset may have any value
        return array.values[:0], np.zeros(1, np.int64)
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    child = array.values
    _check_offsets(offsets, len(child))
    lengths = np.diff(offsets)
    valid = valid_of(array)
    if valid is not None and (hidden := ~valid & (lengths > 0)).any():
        # Null rows may have elements, which are left out.
        keep = np.repeat(~hidden, lengths)
        child = child.slice(int(offsets[0]), int(offsets[-1] - offsets[0])).filter(pa.array(keep))
        lengths[hidden] = 0
        return child, np.concatenate([[0], np.cumsum(lengths)])
    return child.slice(int(offsets[0]), int(offsets[-1] - offsets[0])), offsets - offsets[0]


def _check_offsets(offsets: npt.NDArray[np.int64], size: int) -> None:
    """Refuse offsets outside of the values, which a damaged file may have."""
    if len(offsets) and (offsets[0] < 0 or offsets[-1] > size or (offsets[1:] < offsets[:-1]).any()):
        raise CorruptError(
            "the offsets of a column are damaged",
            expected=f"ascending numbers from 0 to {size}",
            found=f"{offsets.min()} to {offsets.max()}",
        )


def objects_of(array: Any, where: str) -> tuple[ColumnBuffer, Valid]:
    """Rows that are decoded to Python objects when they are read, and the mask of those that are not None."""
    # A view of one None: a value per row that takes no memory.
    values = np.broadcast_to(np.array(None, object), len(array))

    def decode(rows: npt.NDArray[np.int64]) -> Array:
        decoded = np.empty(len(rows), object)
        with arrow_errors(where):
            decoded[:] = _objects_at(array, rows)
        return decoded

    return ColumnBuffer(values, extra_bytes=int(array.nbytes), decode=decode), _not_none(array)


def _objects_at(array: Any, rows: npt.NDArray[np.int64]) -> list[Any]:
    import pyarrow as pa

    if len(rows) and rows[0] + len(rows) - 1 == rows[-1] and (np.diff(rows) == 1).all():
        return _objects(array.slice(int(rows[0]), len(rows)))
    try:
        return _objects(array.take(pa.array(rows)))
    except pa.ArrowNotImplementedError:  # run-end encoded
        return [_objects(array.slice(row, 1))[0] for row in rows.tolist()]


def _not_none(array: Any) -> Valid:
    """Mask of the rows that are not None; Arrow counts no nulls in unions and run-end encoded arrays."""
    import pyarrow as pa

    if pa.types.is_run_end_encoded(array.type):
        runs = valid_of(array.values)
        ends = array.run_ends.to_numpy().astype(np.int64)
        return (
            None if runs is None else runs[ends.searchsorted(array.offset + np.arange(len(array)), side="right")]
        )
    if pa.types.is_union(array.type):
        pieces = (array.slice(first, _UNION_ROWS) for first in range(0, len(array), _UNION_ROWS))
        return np.array([each is not None for piece in pieces for each in piece.to_pylist()], np.bool_)
    return valid_of(array)


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
        whole = rows_without_nulls(inner)
        if whole is not None and not whole.all():
            bad = np.unique(offsets.searchsorted(np.flatnonzero(~whole), side="right") - 1)
            for row in bad.tolist():
                rows[row] = child[offsets[row] : offsets[row + 1]].to_pylist()
    else:
        objects = _objects(child)
        ends = offsets.tolist()
        rows = [objects[first:last] for first, last in pairwise(ends)]
    valid = valid_of(array)
    if valid is not None:
        for row in np.flatnonzero(~valid).tolist():
            rows[row] = None
    return rows
