"""Decoding the column encodings of MDS.

Numbers, arrays, bytes and text are read for a whole batch at once; images, JSON and pickles value by value.
"""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np

from rankfeed._util.imports import need
from rankfeed.columns.columns import Dense, Part
from rankfeed.columns.field import Field
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.scattered import ByteSlices, decode_each, place_of, rows_at
from rankfeed.sources.source import Int64

#: Code in the header of an array -> dtype.
_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_OBJECT = Field("object")


class Encoding:
    """How the values of a column are stored: here, bytes, text in UTF-8, or numbers and arrays of one shape.

    Can be pickled.
    """

    def __init__(self, field: Field) -> None:
        self._field = field

    def field(self, probe: Callable[[], list[ByteSlices]]) -> Field:
        """The field of the column; ``probe`` reads some of its values."""
        return self._field

    def part(self, field: Field, values: ByteSlices) -> Part:
        """Some values as a part of a column."""
        if field.kind != "dense":
            return values.pointers()
        size = field.row_bytes()
        if (bad := np.flatnonzero(values.lengths != size)).size:
            raise _damaged(f"{size} bytes of {field}", f"{values.lengths[bad[0]]} bytes", values, bad[0])
        return values.pointers(size)


class ArrayEncoding(Encoding):
    """Arrays with their shape, and their dtype if it is not the column's.

    A value is: a byte for the dtype if the column has none; a byte with the number of dimensions (times four) and
    the width of their sizes (0 to 3: 1, 2, 4 or 8 bytes); these sizes; the elements. The column is ragged if the
    probed arrays differ in their first dimension at most, otherwise it has objects.
    """

    def __init__(self, dtype: str | None, *, as_objects: bool = False) -> None:
        super().__init__(_OBJECT)
        self._dtype, self._as_objects = dtype, as_objects

    def field(self, probe: Callable[[], list[ByteSlices]]) -> Field:
        layouts = {
            (group.dtype, *(tuple(shape) for shape in np.unique(group.shapes[:, 1:], axis=0).tolist()))
            for group in _read_headers(probe()[0], self._dtype)
        }
        if self._as_objects or len(layouts) != 1 or len(first := next(iter(layouts))) != 2:
            return _OBJECT
        return Field("ragged", str(first[0]), tuple(first[1]))

    def part(self, field: Field, values: ByteSlices) -> Part:
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
            return arrays
        for group in groups:
            same = group.dtype == field.dtype and group.shapes.shape[1] == len(field.shape) + 1
            unlike = (group.shapes[:, 1:] != field.shape).any(1) if same else np.ones(len(group.which), np.bool_)
            if unlike.any():
                row = int(np.argmax(unlike))
                raise SourceError(
                    "an array is unlike the others of its column",
                    expected=field,
                    found=f"{group.dtype}{group.shapes[row].tolist()}",
                    where=place_of(values, int(group.which[row])),
                    remedy="name the column in objects=, to have its arrays as they are, in a list",
                )
        return values._replace(starts=starts, lengths=lengths).pointers(field.row_bytes())


@dataclass(frozen=True)
class _ArrayHeaders:
    """Arrays whose headers start with the same bytes."""

    which: Int64  # positions among the values
    dtype: str
    size: int  # of each header, in bytes
    shapes: Int64  # [arrays, dimensions]


def _read_headers(values: ByteSlices, dtype: str | None) -> list[_ArrayHeaders]:
    """Read headers of arrays (of ``dtype``, or each of its own), and check that the elements fill the rest."""
    first = 1 if dtype else 2
    if (bad := np.flatnonzero(values.lengths < first)).size:
        raise _damaged("a header of an array", f"{values.lengths[bad[0]]} bytes", values, bad[0])
    raw = rows_at(values.data, values.starts, first).astype(np.int64)
    codes = raw[:, 0] if dtype else raw[:, 0] << 8 | raw[:, 1]
    groups = []
    for code in np.unique(codes).tolist():
        which = np.flatnonzero(codes == code)
        name = dtype or _DTYPES.get(code >> 8)
        ndim, width = (code & 0xFF) >> 2, 1 << (code & 3)
        size = first + ndim * width
        if name is None or ndim == 0:
            raise _damaged("an array with a dtype and a shape", f"code {code:#x}", values, which[0])
        lengths = values.lengths[which] - size
        if (bad := which[lengths < 0]).size:
            raise _damaged(f"an array with a header of {size} bytes", "fewer bytes", values, bad[0])
        shapes = rows_at(values.data, values.starts[which] + first, ndim * width).view(f"<u{width}")
        # As floats: a product of damaged sizes overflows, and valid ones are exact.
        wrong = shapes.astype(np.float64).prod(1) * np.dtype(name).itemsize != lengths
        wrong |= (shapes == 0).any(1)
        if wrong.any():
            shape = f"shape {shapes[np.argmax(wrong)].tolist()}"
            raise _damaged("as many elements as the value has bytes for", shape, values, which[wrong][0])
        groups.append(_ArrayHeaders(which, name, size, shapes.astype(np.int64)))
    return groups


class ValueEncoding(Encoding):
    """Values that are decoded one by one."""

    def __init__(self, decode: Callable[[bytes], Any], field: Field = _OBJECT) -> None:
        super().__init__(field)
        self._decode = decode

    def part(self, field: Field, values: ByteSlices) -> Part:
        dtype = np.dtype(field.dtype or object)
        decoded = np.fromiter(decode_each(values, self._decode), dtype, len(values.starts))
        return decoded if field.kind == "object" else Dense.of(decoded).pointers


def _damaged(expected: object, found: object, values: ByteSlices, row: np.int64) -> CorruptError:
    return CorruptError("a value is damaged", expected=expected, found=found, where=place_of(values, int(row)))


def _integer(value: bytes) -> np.int64:
    return np.int64(int(value))  # an OverflowError for more than 64 bits


def _json(value: bytes) -> Any:
    return json.loads(value.decode())  # faster than from bytes


def _decimal(value: bytes) -> Decimal:
    return Decimal(value.decode())


def _image(value: bytes) -> Any:
    """A JPEG or PNG."""
    image = need("PIL.Image", extra="image").open(BytesIO(value), formats=("JPEG", "PNG"))
    image.load()
    return image


def _raw_image(value: bytes) -> Any:
    """An image as Pillow stores it: width, height and length of the mode's name (uint32), the name, pixels."""
    library = need("PIL.Image", extra="image")
    width, height, length = np.frombuffer(value, "<u4", 3).tolist()
    mode = value[12 : 12 + length].decode("ascii")
    pixels = value[12 + length :]
    bits = {"1": 1, "L": 8, "P": 8, "LA": 16, "La": 16, "PA": 16, "I;16": 16, "RGB": 24, "YCbCr": 24, "LAB": 24}
    bits |= {"HSV": 24, "RGBA": 32, "RGBa": 32, "RGBX": 32, "CMYK": 32, "I": 32, "F": 32}
    # Checked before Pillow allocates memory for it.
    if not width or not height or (width * bits.get(mode, 0) + 7) // 8 * height != len(pixels):
        raise ValueError(f"{len(pixels)} bytes for {width} x {height} in mode {mode!r}")
    return library.frombytes(mode, (width, height), pixels)


def _images(decode: Callable[[bytes], Any], start: int, value: bytes) -> list[Any]:
    """A list of images: their number at ``start``, their sizes (uint32), then the images."""
    (count,) = np.frombuffer(value, "<u4", 1, start).tolist()
    images, place = [], start + 4 + 4 * count
    for size in np.frombuffer(value, "<u4", count, start + 4).tolist():
        if place + size > len(value):
            raise ValueError(f"an image of {size} bytes where {len(value) - place} are left")
        images.append(decode(value[place : place + size]))
        place += size
    return images


_BYTES = Encoding(Field("bytes"))
#: Refused by the source unless the caller allows it.
PICKLE = ValueEncoding(pickle.loads)
_ENCODINGS: dict[str, Encoding] = {
    "int": Encoding(Field("dense", "int64")),
    **{name: Encoding(Field("dense", name)) for name in _DTYPES.values()},
    "bytes": _BYTES,
    "str": Encoding(Field("str")),
    "str_int": ValueEncoding(_integer, Field("dense", "int64")),
    "str_float": ValueEncoding(float, Field("dense", "float64")),
    "str_decimal": ValueEncoding(_decimal),
}
#: Encodings that are left as bytes on request.
_DECODED: dict[str, Encoding] = {
    "json": ValueEncoding(_json),
    "pkl": PICKLE,
    "pil": ValueEncoding(_raw_image),
    **dict.fromkeys(("jpeg", "png"), ValueEncoding(_image)),
    **dict.fromkeys(("jpeg_array", "jpegarray"), ValueEncoding(partial(_images, _image, 0))),
    **dict.fromkeys(("list[jpeg]", "list[png]"), ValueEncoding(partial(_images, _image, 4))),
    "list[pil]": ValueEncoding(partial(_images, _raw_image, 4)),
}


def encoding_of(name: str, column: str, where: str, *, decode: bool = True, as_objects: bool = False) -> Encoding:
    """The encoding that an index names, such as "int", or "ndarray:float32:3,224,224", for a column."""
    kind, *options = name.split(":")
    dtype = options[0] if options else None
    if kind == "ndarray" and len(options) < 3 and (dtype is None or dtype in _DTYPES.values()):
        if dtype is None or len(options) == 1:
            return ArrayEncoding(dtype, as_objects=as_objects)
        extents = options[1].split(",")
        if all(extent.isascii() and extent.isdigit() and len(extent) < 10 and int(extent) for extent in extents):
            return Encoding(Field("dense", dtype, tuple(map(int, extents))))
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
