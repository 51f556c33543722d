"""How MDS stores a column's values as bytes, and how they are read back: each encoding by its name.

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
from rankfeed.sources.mds.arrays import DTYPES, Header, headers
from rankfeed.sources.mds.images import IMAGES
from rankfeed.sources.scattered import Placed, Places, compacted

Data = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
#: Names the sample of a row, for errors.
Where = Callable[[int], str]


class Encoding(ABC):
    """How the values of a column are stored."""

    #: Whether reading a value can run code that it contains.
    unsafe = False

    @abstractmethod
    def field(self, data: Data, starts: Int64, lengths: Int64, where: Where) -> Field:
        """What the column holds, judged by some of its values."""

    @abstractmethod
    def part(
        self, field: Field, data: Data, starts: Int64, lengths: Int64, slots: Int64 | None, where: Where
    ) -> Any:
        """Some values, as a part of a batch's column.

        Args:
            field: what the column holds.
            data: uint8, the shard.
            starts: int64 [m], where each value lies, in bytes.
            lengths: int64 [m], how long it is.
            slots: int64 [m], its row of the batch; None for all, in order.
            where: names a value's sample.

        Raises:
            CorruptError: a value is damaged.
            SourceError: it is unlike the others.
        """

    def column(self, field: Field, parts: Sequence[Any]) -> Column:
        """The column of a batch."""
        return column_from_parts(field, parts)


class Fixed(Encoding):
    """Numbers and arrays of one type and shape."""

    def __init__(self, dtype: str, shape: tuple[int, ...] = ()) -> None:
        self._field = Field("dense", dtype, shape)
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def field(self, data: Data, starts: Int64, lengths: Int64, where: Where) -> Field:
        return self._field

    def part(
        self, field: Field, data: Data, starts: Int64, lengths: Int64, slots: Int64 | None, where: Where
    ) -> Places:
        size = self._field.row_bytes()
        if (lengths != size).any():
            row = int(np.argmax(lengths != size))
            raise _damaged(f"{size} bytes of {self._field}", f"{lengths[row]} bytes", where(row))
        return Places(data, starts, slots)

    def column(self, field: Field, parts: Sequence[Any]) -> Column:
        return Placed(parts, self._dtype, self._field.shape)


class Plain(Encoding):
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


class Arrays(Encoding):
    """Arrays that say their shape themselves, and their type if it is not the column's.

    They are a ragged column where those looked at differ in their first dimension at most, else objects.
    """

    def __init__(self, dtype: str | None, *, whole: bool = False) -> None:
        self._dtype = dtype
        self._whole = whole

    def field(self, data: Data, starts: Int64, lengths: Int64, where: Where) -> Field:
        found = {
            (header.dtype, *(tuple(shape) for shape in np.unique(header.shapes[:, 1:], axis=0).tolist()))
            for header in headers(data, starts, lengths, self._dtype, where)
        }
        if self._whole or len(found) != 1 or len(first := next(iter(found))) != 2:
            return Field("object")
        return Field("ragged", str(first[0]), tuple(first[1]))

    def part(
        self, field: Field, data: Data, starts: Int64, lengths: Int64, slots: Int64 | None, where: Where
    ) -> RowTake | RowSlices:
        found = headers(data, starts, lengths, self._dtype, where)
        if field.kind == "object":
            values = np.empty(len(starts), object)
            for header in found:
                for row, start, length, shape in header.rows(starts, lengths):
                    values[row] = data[start : start + length].copy().view(header.dtype).reshape(shape)
            return RowTake(values, np.arange(len(values)), slots)
        for header in found:
            self._check(field, header, where)
        skipped = np.zeros(len(starts), np.int64)
        for header in found:
            skipped[header.which] = header.size
        packed, targets = compacted(data, starts + skipped, lengths - skipped)
        size = field.row_bytes()
        elements = packed.view(np.dtype(field.dtype).newbyteorder("<")).reshape(-1, *field.shape)
        return RowSlices(elements, targets // size, (lengths - skipped) // size, slots)

    def _check(self, field: Field, header: Header, where: Where) -> None:
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


class Decoded(Encoding):
    """Values that are read one by one."""

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
                raise type(error)(
                    error.summary,
                    expected=error.expected,
                    found=error.found,
                    where=where(row),
                    remedy=error.remedy,
                ) from error
            except (ValueError, InvalidOperation, OverflowError, RecursionError, KeyError, IndexError) as error:
                raise _damaged(
                    "a value of its encoding", f"{type(error).__name__}: {safe_str(error)}", where(row)
                ) from error
            except Exception as error:
                if not self.unsafe:
                    raise
                raise _damaged("a pickle", f"{type(error).__name__}: {safe_str(error)}", where(row)) from error
        return RowTake(values, np.arange(len(values)), slots)


def encoding_of(name: str, column: str, where: str, *, decode: bool = True, whole: bool = False) -> Encoding:
    """The encoding that an index names.

    Args:
        name: such as "int", or "ndarray:float32:3,224,224".
        column: it is of, for errors.
        where: the index, for errors.
        decode: whether images, JSON and pickles are decoded, or left as the bytes that they are.
        whole: whether arrays that say their shape are kept as objects.

    Raises:
        SourceError: there is no such encoding.
    """
    kind, *options = name.split(":")
    if kind == "ndarray" and len(options) < 3:
        dtype = options[0] if options else None
        shape = tuple(_extent(each) for each in options[1].split(",")) if len(options) == 2 else None
        if (dtype is None or dtype in DTYPES.values()) and (shape is None or 0 not in shape):
            return Arrays(dtype, whole=whole) if dtype is None or shape is None else Fixed(dtype, shape)
    elif not options and kind in _NUMBERS:
        return Fixed(_NUMBERS[kind])
    elif not options and kind in _SIMPLE:
        return _SIMPLE[kind]
    elif not options and kind in _VALUES:
        return _VALUES[kind] if decode else Plain(text=False)
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
    remedy = "fetch the shard anew, or write the data set again"
    return CorruptError("a value is damaged", expected=expected, found=found, where=where, remedy=remedy)


def _text(value: bytes) -> str:
    return value.decode("utf-8")


_NUMBERS = {"int": "int64", **{name: name for name in DTYPES.values()}}
_SIMPLE: dict[str, Encoding] = {
    "bytes": Plain(text=False),
    "str": Plain(text=True),
    "str_int": Decoded(lambda value: int(_text(value)), "int64"),
    "str_float": Decoded(lambda value: float(_text(value)), "float64"),
    "str_decimal": Decoded(lambda value: Decimal(_text(value))),
}
_VALUES: dict[str, Encoding] = {
    "json": Decoded(lambda value: json.loads(_text(value))),
    # Refused by the source unless the caller allows it.
    "pkl": Decoded(pickle.loads, unsafe=True),
    **{name: Decoded(decode) for name, decode in IMAGES.items()},
}
