"""Decoding the column encodings of MDS.

Numbers, arrays, bytes and text are read for a whole batch at once; images, JSON and pickles value by value.
"""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes, Column, Field, RowSlices, RowTake, column_from_parts
from rankfeed.errors import CorruptError, RankfeedError, SourceError, safe_str
from rankfeed.sources.mds.arrays import DTYPES, ArrayHeaders, read_headers
from rankfeed.sources.mds.images import IMAGES
from rankfeed.sources.scattered import RowOffsets, ScatteredRows, packed_runs
from rankfeed.sources.source import with_where

Data = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
#: Names the sample of a row in error messages.
Where = Callable[[int], str]


class Encoding(ABC):
    """How the values of a column are stored.

    ``data`` is the shard (uint8), ``starts`` and ``lengths`` are where the values are in it (int64 [m]), and
    ``slots`` their positions in the batch (None for all, in order).
    """

    #: Whether reading a value can run code that it contains.
    unsafe = False

    @abstractmethod
    def field(self, data: Data, starts: Int64, lengths: Int64, where: Where) -> Field:
        """The field of the column, from some of its values."""

    @abstractmethod
    def part(
        self, field: Field, data: Data, starts: Int64, lengths: Int64, slots: Int64 | None, where: Where
    ) -> Any:
        """Some values as a part of a column."""

    def column(self, field: Field, parts: Sequence[Any]) -> Column:
        """The column of a batch."""
        return column_from_parts(field, parts)


class FixedEncoding(Encoding):
    """Numbers and arrays of one dtype and shape."""

    def __init__(self, dtype: str, shape: tuple[int, ...] = ()) -> None:
        self._field = Field("dense", dtype, shape)
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def field(self, data: Data, starts: Int64, lengths: Int64, where: Where) -> Field:
        return self._field

    def part(
        self, field: Field, data: Data, starts: Int64, lengths: Int64, slots: Int64 | None, where: Where
    ) -> RowOffsets:
        size = self._field.row_bytes()
        if (lengths != size).any():
            row = int(np.argmax(lengths != size))
            raise _damaged(f"{size} bytes of {self._field}", f"{lengths[row]} bytes", where(row))
        return RowOffsets(data, starts, slots)

    def column(self, field: Field, parts: Sequence[Any]) -> Column:
        return ScatteredRows(parts, self._dtype, self._field.shape)


class BytesEncoding(Encoding):
    """Bytes, or text in UTF-8: pointers into the shard."""

    def __init__(self, *, text: bool) -> None:
        self._text = text

    def field(self, data: Data, starts: Int64, lengths: Int64, where: Where) -> Field:
        return Field("str" if self._text else "bytes")

    def part(
        self, field: Field, data: Data, starts: Int64, lengths: Int64, slots: Int64 | None, where: Where
    ) -> RowSlices:
        return RowSlices(data, starts, lengths, slots, place=where)

    def column(self, field: Field, parts: Sequence[Any]) -> Column:
        return Bytes(parts, text=self._text)


class ArrayEncoding(Encoding):
    """Arrays with their shape, and their dtype if it is not the column's.

    The column is ragged if the probed arrays differ in their first dimension at most, otherwise it has objects.
    """

    def __init__(self, dtype: str | None, *, as_objects: bool = False) -> None:
        self._dtype = dtype
        self._as_objects = as_objects

    def field(self, data: Data, starts: Int64, lengths: Int64, where: Where) -> Field:
        found = {
            (header.dtype, *(tuple(shape) for shape in np.unique(header.shapes[:, 1:], axis=0).tolist()))
            for header in read_headers(data, starts, lengths, self._dtype, where)
        }
        if self._as_objects or len(found) != 1 or len(first := next(iter(found))) != 2:
            return Field("object")
        return Field("ragged", str(first[0]), tuple(first[1]))

    def part(
        self, field: Field, data: Data, starts: Int64, lengths: Int64, slots: Int64 | None, where: Where
    ) -> RowTake | RowSlices:
        found = read_headers(data, starts, lengths, self._dtype, where)
        if field.kind == "object":
            values = np.empty(len(starts), object)
            for header in found:
                for row, start, length, shape in header.rows(starts, lengths):
                    values[row] = data[start : start + length].copy().view(header.dtype).reshape(shape)
            return RowTake(values, np.arange(len(values)), slots)
        header_sizes = np.zeros(len(starts), np.int64)
        for header in found:
            _check_alike(field, header, where)
            header_sizes[header.which] = header.size
        packed, targets = packed_runs(data, starts + header_sizes, lengths - header_sizes)
        size = field.row_bytes()
        elements = packed.view(np.dtype(field.dtype).newbyteorder("<")).reshape(-1, *field.shape)
        return RowSlices(elements, targets // size, (lengths - header_sizes) // size, slots)


def _check_alike(field: Field, header: ArrayHeaders, where: Where) -> None:
    same = header.dtype == field.dtype and header.shapes.shape[1] == len(field.shape) + 1
    unlike = (header.shapes[:, 1:] != field.shape).any(1) if same else np.ones(len(header.which), np.bool_)
    if unlike.any():
        row = int(np.argmax(unlike))
        raise SourceError(
            "an array is unlike the others of its column",
            expected=field,
            found=f"{header.dtype}{header.shapes[row].tolist()}",
            where=where(int(header.which[row])),
            remedy="name the column in objects=, to have its arrays as they are, in a list",
        )


class ValueEncoding(Encoding):
    """Values that are decoded one by one."""

    def __init__(self, decode: Callable[[bytes], Any], dtype: str | None = None, *, unsafe: bool = False) -> None:
        self._decode = decode
        self._field = Field("object") if dtype is None else Field("dense", dtype)
        self.unsafe = unsafe

    def field(self, data: Data, starts: Int64, lengths: Int64, where: Where) -> Field:
        return self._field

    def part(
        self, field: Field, data: Data, starts: Int64, lengths: Int64, slots: Int64 | None, where: Where
    ) -> RowTake:
        values = np.empty(len(starts), object if field.kind == "object" else field.dtype)
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            try:
                values[row] = self._decode(data[start : start + length].tobytes())
            except RankfeedError as error:
                raise with_where(error, where(row)) from error
            except Exception as error:
                if not (self.unsafe or isinstance(error, _VALUE_ERRORS)):
                    raise
                expected = "a pickle" if self.unsafe else "a value of its encoding"
                raise _damaged(expected, f"{type(error).__name__}: {safe_str(error)}", where(row)) from error
        return RowTake(values, np.arange(len(values)), slots)


_VALUE_ERRORS = (ValueError, InvalidOperation, OverflowError, RecursionError, KeyError, IndexError)


def encoding_of(name: str, column: str, where: str, *, decode: bool = True, as_objects: bool = False) -> Encoding:
    """The encoding that an index names.

    Args:
        name: such as "int", or "ndarray:float32:3,224,224".
        column: its column, for error messages.
        where: the index, for error messages.
        decode: whether images, JSON and pickles are decoded, or left as bytes.
        as_objects: whether arrays with their own shape are delivered as objects.
    """
    kind, *options = name.split(":")
    if kind == "ndarray" and len(options) < 3:
        dtype = options[0] if options else None
        shape = tuple(_extent(each) for each in options[1].split(",")) if len(options) == 2 else None
        if (dtype is None or dtype in DTYPES.values()) and (shape is None or 0 not in shape):
            if dtype is None or shape is None:
                return ArrayEncoding(dtype, as_objects=as_objects)
            return FixedEncoding(dtype, shape)
    elif not options and kind in _NUMBERS:
        return FixedEncoding(_NUMBERS[kind])
    elif not options and kind in _SIMPLE:
        return _SIMPLE[kind]
    elif not options and kind in _VALUES:
        return _VALUES[kind] if decode else BytesEncoding(text=False)
    raise SourceError(
        "an unknown encoding",
        expected="one of " + ", ".join(["ndarray", *_NUMBERS, *_SIMPLE, *_VALUES]),
        found=repr(name[:60]),
        where=f"{where}, column {column!r}",
        remedy="leave the column out with columns=",
    )


def _extent(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _damaged(expected: object, found: object, where: str) -> CorruptError:
    remedy = "fetch the shard again, or write the dataset again"
    return CorruptError("a value is damaged", expected=expected, found=found, where=where, remedy=remedy)


_NUMBERS = {"int": "int64", **{name: name for name in DTYPES.values()}}
_SIMPLE: dict[str, Encoding] = {
    "bytes": BytesEncoding(text=False),
    "str": BytesEncoding(text=True),
    "str_int": ValueEncoding(lambda value: int(value.decode()), "int64"),
    "str_float": ValueEncoding(lambda value: float(value.decode()), "float64"),
    "str_decimal": ValueEncoding(lambda value: Decimal(value.decode())),
}
_VALUES: dict[str, Encoding] = {
    "json": ValueEncoding(lambda value: json.loads(value.decode())),
    # Refused by the source unless the caller allows it.
    "pkl": ValueEncoding(pickle.loads, unsafe=True),
    **{name: ValueEncoding(decode) for name, decode in IMAGES.items()},
}
