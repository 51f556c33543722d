"""What a Lance data file says of its own pages, looked at before Lance does.

Where a page's encoding has a name that Lance does not know, its error quotes that name. With a zero byte in it
the error cannot be handed on, and pylance 14 ends the process (``CString::new`` in arrow-rs' ``ffi_stream``).
So the names are read here first. The layout is that of Lance's ``file2.proto``: a footer of 40 bytes, a table
of the columns' metadata, and each of these a protobuf message.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import IO

from rankfeed.errors import CorruptError

_FOOTER = struct.Struct("<QQQIIHH4s")
#: Of files that are laid out so: (0, 3) is what the first of them said.
_VERSIONS = ((0, 3), (2, 0), (2, 1), (2, 2), (2, 3))
#: Numbers of protobuf fields: a column's own encoding, its pages, and a page's encoding.
_ENCODING, _PAGES, _PAGE_ENCODING = 1, 2, 4
#: An encoding that is given in place, its bytes, and in these (a ``google.protobuf.Any``) the name.
_DIRECT, _BYTES, _NAME = 2, 1, 1

REMEDY = "restore the file from a copy, or open an older version of the table (version=...)"


def check_encodings(path: str, where: str) -> None:
    """Whether the encodings of a data file have names.

    Args:
        path: of a file that ends as a Lance data file does.
        where: table, version and fragment, for errors.

    Raises:
        CorruptError: one has not, or what says so is damaged.
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            for name in _names(file, size):
                if not (name.isascii() and name.decode("ascii").isprintable()):
                    raise ValueError(f"an encoding called {name[:80]!r}")
        except (ValueError, struct.error) as error:
            raise CorruptError(
                "the metadata of a data file are damaged",
                expected="names of encodings",
                found=f"{error} in {path}",
                where=where,
                remedy=REMEDY,
            ) from error


def _names(file: IO[bytes], size: int) -> Iterator[bytes]:
    file.seek(max(0, size - _FOOTER.size))
    _, start, end, _, columns, major, minor, _ = _FOOTER.unpack(file.read(_FOOTER.size))
    if (major, minor) not in _VERSIONS:
        return
    if not (start <= end <= size and end - start == 16 * columns):
        raise ValueError(f"a table of {columns} columns from byte {start} to {end}")
    file.seek(start)
    for at, length in struct.iter_unpack("<QQ", file.read(end - start)):
        if at + length > size:
            raise ValueError(f"a column's metadata from byte {at}, {length} bytes")
        file.seek(at)
        yield from _names_of(file.read(length))


def _names_of(column: bytes) -> Iterator[bytes]:
    for number, value in _fields(column):
        if number == _ENCODING:
            yield from _name_of(value)
        elif number == _PAGES:
            for inner, encoding in _fields(value):
                if inner == _PAGE_ENCODING:
                    yield from _name_of(encoding)


def _name_of(encoding: bytes) -> Iterator[bytes]:
    for kind, direct in _fields(encoding):
        if kind == _DIRECT:
            for number, message in _fields(direct):
                if number == _BYTES:
                    yield from (name for part, name in _fields(message) if part == _NAME)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protobuf message that have a length, by their numbers.

    Raises:
        ValueError: it is none.

    Examples:
        >>> list(_fields(bytes([8, 5, 18, 2, 65, 66])))
        [(2, b'AB')]
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            _, at = _varint(message, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        elif wire == 2:
            length, at = _varint(message, at)
            if at + length > len(message):
                raise ValueError(f"a field of {length} bytes where {len(message) - at} are left")
            yield key >> 3, message[at : at + length]
            at += length
        else:
            raise ValueError(f"a field of kind {wire}")
    if at > len(message):
        raise ValueError("a field that is cut")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("a number that is cut")
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
