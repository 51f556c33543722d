"""Decoding the column encodings of MDS.

Numbers, arrays, bytes and text are read for a whole batch at once; images, JSON and pickles value by value.
"""

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes, Column, Field, RowSlices, RowTake, column_from_parts
from rankfeed.errors import CorruptError, RankfeedError, SourceError, describe_error
from rankfeed.sources.mds.images import IMAGES
from rankfeed.sources.scattered import RowOffsets, ScatteredRows, packed_runs, rows_at
from rankfeed.sources.source import with_where

Data = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

#: Code in the header of an array -> dtype.
_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_VALUE_ERRORS = (ValueError, InvalidOperation, OverflowError, RecursionError, KeyError, IndexError)


@dataclass(frozen=True)
class StoredValues:
    """Some values of a column in a shard."""

    data: Data  # the shard
    starts: Int64  # of each value, inside the shard
    lengths: Int64  # in bytes
    where: Callable[[int], str]  # names the sample of a value in error messages
    slots: Int64 | None = None  # positions in the batch; None for all, in order

    def check(
        self,
        bad: npt.NDArray[np.bool_],
        expected: object,
        found: Callable[[int], object],
        which: Int64 | None = None,
    ) -> None:
        """Raise a CorruptError about the first bad value; ``which`` are their positions (None for all values)."""
        if bad.any():
            row = int(np.argmax(bad))
            raise _damaged(expected, found(row), self.where(row if which is None else int(which[row])))


class Encoding(ABC):
    """How the values of a column are stored; can be pickled."""

    #: Whether reading a value can run code that it contains.
    unsafe = False

    @abstractmethod
    def field(self, probe: Callable[[], StoredValues]) -> Field:
        """The field of the column; ``probe`` reads some of its values."""

    @abstractmethod
    def part(self, field: Field, values: StoredValues) -> Any:
        """Some values as a part of a column."""

    def column(self, field: Field, parts: Sequence[Any]) -> Column:
        """The column of a batch."""
        return column_from_parts(field, parts)


class FixedEncoding(Encoding):
    """Numbers and arrays of one dtype and shape."""

    def __init__(self, dtype: str, shape: tuple[int, ...] = ()) -> None:
        self._field = Field("dense", dtype, shape)

    def field(self, probe: Callable[[], StoredValues]) -> Field:
        return self._field

    def part(self, field: Field, values: StoredValues) -> RowOffsets:
        size = field.row_bytes()
        values.check(
            values.lengths != size, f"{size} bytes of {field}", lambda row: f"{values.lengths[row]} bytes"
        )
        return RowOffsets(values.data, values.starts, values.slots)

    def column(self, field: Field, parts: Sequence[Any]) -> Column:
        return ScatteredRows(parts, np.dtype(field.dtype).newbyteorder("<"), field.shape)


class BytesEncoding(Encoding):
    """Bytes, or text in UTF-8: pointers into the shard."""

    def __init__(self, *, text: bool) -> None:
        self._text = text

    def field(self, probe: Callable[[], StoredValues]) -> Field:
        return Field("str" if self._text else "bytes")

    def part(self, field: Field, values: StoredValues) -> RowSlices:
        return RowSlices(values.data, values.starts, values.lengths, values.slots, place=values.where)

    def column(self, field: Field, parts: Sequence[Any]) -> Column:
        return Bytes(parts, text=self._text)


class ArrayEncoding(Encoding):
    """Arrays with their shape, and their dtype if it is not the column's.

    A value is: a byte for the dtype if the column has none; a byte with the number of dimensions (times four) and
    the width of their sizes (0 to 3: 1, 2, 4 or 8 bytes); these sizes; the elements. The column is ragged if the
    probed arrays differ in their first dimension at most, otherwise it has objects.
    """

    def __init__(self, dtype: str | None, *, as_objects: bool = False) -> None:
        self._dtype = dtype
        self._as_objects = as_objects

    def field(self, probe: Callable[[], StoredValues]) -> Field:
        found = {
            (group.dtype, *(tuple(shape) for shape in np.unique(group.shapes[:, 1:], axis=0).tolist()))
            for group in _read_headers(probe(), self._dtype)
        }
        if self._as_objects or len(found) != 1 or len(first := next(iter(found))) != 2:
            return Field("object")
        return Field("ragged", str(first[0]), tuple(first[1]))

    def part(self, field: Field, values: StoredValues) -> RowTake | RowSlices:
        groups = _read_headers(values, self._dtype)
        header_sizes = np.zeros(len(values.starts), np.int64)
        for group in groups:
            header_sizes[group.which] = group.size
        starts, lengths = values.starts + header_sizes, values.lengths - header_sizes
        if field.kind == "object":
            arrays = np.empty(len(starts), object)
            for group in groups:
                for row, shape in zip(group.which.tolist(), group.shapes.tolist(), strict=True):
                    content = values.data[starts[row] : starts[row] + lengths[row]]
                    arrays[row] = content.copy().view(group.dtype).reshape(shape)
            return RowTake(arrays, np.arange(len(arrays)), values.slots)
        for group in groups:
            _check_alike(field, group, values.where)
        packed, targets = packed_runs(values.data, starts, lengths)
        size = field.row_bytes()
        elements = packed.view(np.dtype(field.dtype).newbyteorder("<")).reshape(-1, *field.shape)
        return RowSlices(elements, targets // size, lengths // size, values.slots)


@dataclass(frozen=True)
class _ArrayHeaders:
    """Arrays whose headers start with the same bytes."""

    which: Int64  # positions among the values
    dtype: str
    size: int  # of each header, in bytes
    shapes: Int64  # [arrays, dimensions]


def _read_headers(values: StoredValues, dtype: str | None) -> list[_ArrayHeaders]:
    """Read headers of arrays (of ``dtype``, or each of its own), and check that the elements fill the rest."""
    first = 1 if dtype else 2
    values.check(values.lengths < first, "a header of an array", lambda row: f"{values.lengths[row]} bytes")
    raw = rows_at(values.data, values.starts, first).astype(np.int64)
    codes = raw[:, 0] if dtype else raw[:, 0] << 8 | raw[:, 1]
    groups = []
    for code in np.unique(codes).tolist():
        which = np.flatnonzero(codes == code)
        found = dtype or _DTYPES.get(code >> 8)
        ndim, width = (code & 0xFF) >> 2, 1 << (code & 3)
        size = first + ndim * width
        if found is None or ndim == 0:
            raise _damaged("an array with a dtype and a shape", f"code {code:#x}", values.where(int(which[0])))
        lengths = values.lengths[which] - size
        values.check(lengths < 0, f"an array with a header of {size} bytes", lambda _: "fewer bytes", which)
        shapes = rows_at(values.data, values.starts[which] + first, ndim * width).view(f"<u{width}")
        # As floats: a product of damaged sizes overflows, and valid ones are exact.
        wrong = shapes.astype(np.float64).prod(1) * np.dtype(found).itemsize != lengths
        wrong |= (shapes == 0).any(1)
        values.check(
            wrong,
            "as many elements as the value has bytes for",
            lambda row, shapes=shapes: f"shape {shapes[row].tolist()}",  # type: ignore[misc]
            which,
        )
        groups.append(_ArrayHeaders(which, found, size, shapes.astype(np.int64)))
    return groups


def _check_alike(field: Field, group: _ArrayHeaders, where: Callable[[int], str]) -> None:
    same = group.dtype == field.dtype and group.shapes.shape[1] == len(field.shape) + 1
    unlike = (group.shapes[:, 1:] != field.shape).any(1) if same else np.ones(len(group.which), np.bool_)
    if unlike.any():
        row = int(np.argmax(unlike))
        raise SourceError(
            "an array is unlike the others of its column",
            expected=field,
            found=f"{group.dtype}{group.shapes[row].tolist()}",
            where=where(int(group.which[row])),
            remedy="name the column in objects=, to have its arrays as they are, in a list",
        )


class ValueEncoding(Encoding):
    """Values that are decoded one by one."""

    def __init__(self, decode: Callable[[bytes], Any], dtype: str | None = None, *, unsafe: bool = False) -> None:
        self._decode = decode
        self._field = Field("object") if dtype is None else Field("dense", dtype)
        self.unsafe = unsafe

    def field(self, probe: Callable[[], StoredValues]) -> Field:
        return self._field

    def part(self, field: Field, values: StoredValues) -> RowTake:
        decoded = np.empty(len(values.starts), object if field.kind == "object" else field.dtype)
        ends = values.starts + values.lengths
        for row, (start, end) in enumerate(zip(values.starts.tolist(), ends.tolist(), strict=True)):
            try:
                decoded[row] = self._decode(values.data[start:end].tobytes())
            except RankfeedError as error:
                raise with_where(error, values.where(row)) from error
            except Exception as error:
                if not (self.unsafe or isinstance(error, _VALUE_ERRORS)):
                    raise
                expected = "a pickle" if self.unsafe else "a value of its encoding"
                raise _damaged(expected, describe_error(error), values.where(row)) from error
        return RowTake(decoded, np.arange(len(decoded)), values.slots)


def _damaged(expected: object, found: object, where: str) -> CorruptError:
    return CorruptError("a value is damaged", expected=expected, found=found, where=where)


def _decimal(value: bytes) -> Decimal:
    return Decimal(value.decode())


def _json(value: bytes) -> Any:
    return json.loads(value.decode())


_BYTES = BytesEncoding(text=False)
_ENCODINGS: dict[str, Encoding] = {
    "int": FixedEncoding("int64"),
    **{name: FixedEncoding(name) for name in _DTYPES.values()},
    "bytes": _BYTES,
    "str": BytesEncoding(text=True),
    "str_int": ValueEncoding(int, "int64"),
    "str_float": ValueEncoding(float, "float64"),
    "str_decimal": ValueEncoding(_decimal),
}
#: Encodings that are left as bytes on request.
_DECODED: dict[str, Encoding] = {
    "json": ValueEncoding(_json),
    # Refused by the source unless the caller allows it.
    "pkl": ValueEncoding(pickle.loads, unsafe=True),
    **{name: ValueEncoding(decode) for name, decode in IMAGES.items()},
}


def encoding_of(name: str, column: str, where: str, *, decode: bool = True, as_objects: bool = False) -> Encoding:
    """The encoding that an index names, such as "int", or "ndarray:float32:3,224,224", for a column.

    ``decode`` is whether images, JSON and pickles are decoded, or left as bytes; ``as_objects`` whether arrays
    with their own shape are delivered as objects; ``where`` names the index in error messages.
    """
    kind, *options = name.split(":")
    dtype = options[0] if options else None
    if kind == "ndarray" and len(options) < 3 and (dtype is None or dtype in _DTYPES.values()):
        if dtype is None or len(options) == 1:
            return ArrayEncoding(dtype, as_objects=as_objects)
        extents = options[1].split(",")
        if all(each.isascii() and each.isdigit() and len(each) < 10 and int(each) for each in extents):
            return FixedEncoding(dtype, tuple(map(int, extents)))
    elif name in _ENCODINGS:
        return _ENCODINGS[name]
    elif name in _DECODED:
        return _DECODED[name] if decode else _BYTES
    raise SourceError(
        "an unknown encoding",
        expected="one of " + ", ".join(["ndarray", *_ENCODINGS, *_DECODED]),
        found=repr(name[:60]),
        where=f"{where}, column {column!r}",
        remedy="leave the column out with columns=",
    )
