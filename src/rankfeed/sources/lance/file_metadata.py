"""Checking the metadata of Lance data files before Lance reads them.

If the encoding of a page has an unknown name, Lance's error contains the name. With a zero byte in it, pylance 14
ends the process (``CString::new`` in arrow-rs' ``ffi_stream``), so the names are checked first. The layout is that
of Lance's ``file2.proto``: a footer of 40 bytes, a table of the columns' metadata, and a protobuf message for
each.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import IO

from rankfeed.errors import CorruptError

_FOOTER = struct.Struct("<QQQIIHH4s")
#: Versions with this layout; (0, 3) was written by the first of them.
_VERSIONS = ((0, 3), (2, 0), (2, 1), (2, 2), (2, 3))
#: Numbers of protobuf fields: the encoding of a column, its pages, and the encoding of a page.
_ENCODING, _PAGES, _PAGE_ENCODING = 1, 2, 4
#: An encoding stored in place, its bytes, and the name in these (a ``google.protobuf.Any``).
_DIRECT, _BYTES, _NAME = 2, 1, 1


def check_encodings(path: str, where: str) -> None:
    """Raise a CorruptError if an encoding of a data file has an invalid name."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            for name in _encoding_names(file, size):
                if not (name.isascii() and name.decode("ascii").isprintable()):
                    raise ValueError(f"an encoding named {name[:80]!r}")
        except (ValueError, struct.error) as error:
            raise CorruptError(
                "the metadata of a data file are damaged",
                expected="names of encodings",
                found=f"{error} in {path}",
                where=where,
                remedy="restore the file from a copy, or open an older version of the table (version=...)",
            ) from error


def _encoding_names(file: IO[bytes], size: int) -> Iterator[bytes]:
    file.seek(max(0, size - _FOOTER.size))
    _, start, end, _, columns, major, minor, _ = _FOOTER.unpack(file.read(_FOOTER.size))
    if (major, minor) not in _VERSIONS:
        return
    if not (start <= end <= size and end - start == 16 * columns):
        raise ValueError(f"a table of {columns} columns from byte {start} to {end}")
    file.seek(start)
    for offset, length in struct.iter_unpack("<QQ", file.read(end - start)):
        if offset + length > size:
            raise ValueError(f"a column's metadata from byte {offset}, {length} bytes")
        file.seek(offset)
        column = file.read(length)
        encodings = _values(column, _ENCODING)
        for page in _values(column, _PAGES):
            encodings += _values(page, _PAGE_ENCODING)
        for encoding in encodings:
            for direct in _values(encoding, _DIRECT):
                for message in _values(direct, _BYTES):
                    yield from _values(message, _NAME)


def _values(message: bytes, number: int) -> list[bytes]:
    """The length-delimited fields of a protobuf message with this number.

    Examples:
        >>> _values(bytes([8, 5, 18, 2, 65, 66]), 2)
        [b'AB']
    """
    values = []
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire_type = key & 7
        if wire_type == 0:
            _, at = _varint(message, at)
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        elif wire_type == 2:
            length, at = _varint(message, at)
            if at + length > len(message):
                raise ValueError(f"a field of {length} bytes where {len(message) - at} are left")
            if key >> 3 == number:
                values.append(message[at : at + length])
            at += length
        else:
            raise ValueError(f"a field of wire type {wire_type}")
    if at > len(message):
        raise ValueError("a truncated field")
    return values


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("a truncated number")
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
