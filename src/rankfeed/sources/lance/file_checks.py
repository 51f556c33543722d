"""Checking the files of a Lance table before Lance reads them.

Lance reads truncated files without an error. And if the encoding of a page has an unknown name, Lance's error
contains the name: with a zero byte in it, pylance 14 ends the process (``CString::new`` in arrow-rs'
``ffi_stream``). The layout is that of Lance's ``file2.proto``: a footer of 40 bytes, a table of the columns'
metadata, and a protobuf message for each.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import IO

from rankfeed.errors import CorruptError, SourceError

CLEANED_UP = "open the table again; to keep a version from being cleaned up while it is read, tag it"
DAMAGED = "restore the file from a copy, or open an older version of the table (version=...)"

_MAGIC = b"LANC"
_FOOTER = struct.Struct("<QQQIIHH4s")
#: Versions with this layout; (0, 3) was written by the first of them.
_VERSIONS = ((0, 3), (2, 0), (2, 1), (2, 2), (2, 3))
#: Numbers of protobuf fields: the encoding of a column, its pages, and the encoding of a page.
_ENCODING, _PAGES, _PAGE_ENCODING = 1, 2, 4
#: From an encoding to its name: stored in place, its bytes, and the name in these (a ``google.protobuf.Any``).
_NAME = (2, 1, 1)


def check_file(path: str, size: int | None, where: str) -> None:
    """Check existence, size (if known) and end of a file, and the encodings of a data file."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if size and found != size:
                raise CorruptError(
                    "a data file has another size than the table's manifest says",
                    expected=f"{size} bytes",
                    found=f"{found} bytes in {path}",
                    where=where,
                    remedy=DAMAGED,
                )
            if path.endswith(".lance"):
                for name in _encoding_names(file, found):
                    if not (name.isascii() and name.decode("ascii").isprintable()):
                        raise ValueError(f"an encoding named {name[:80]!r}")
    except FileNotFoundError as error:
        raise file_missing(path, where) from error
    except OSError as error:
        raise SourceError("a file of the table cannot be read", found=error, where=where) from error
    except (ValueError, struct.error) as error:
        raise CorruptError(
            "the metadata at the end of a data file are damaged",
            found=f"{error} in {path}",
            where=where,
            remedy=DAMAGED,
        ) from error


def file_missing(found: str, where: str) -> CorruptError:
    """The error for a file that no longer exists."""
    return CorruptError(
        "a file of the table is missing",
        expected="all files of this version: was it cleaned up while it was in use?",
        found=found,
        where=where,
        remedy=CLEANED_UP,
    )


def _encoding_names(file: IO[bytes], size: int) -> Iterator[bytes]:
    file.seek(max(0, size - _FOOTER.size))
    _, start, end, _, columns, major, minor, magic = _FOOTER.unpack(file.read(_FOOTER.size))
    if magic != _MAGIC:
        raise ValueError(f"{magic!r} instead of {_MAGIC!r}")
    if (major, minor) not in _VERSIONS:
        return
    if not (start <= end <= size and end - start == 16 * columns):
        raise ValueError(f"a table of {columns} columns from byte {start} to {end}")
    file.seek(start)
    for offset, length in list(struct.iter_unpack("<QQ", file.read(end - start))):
        if offset + length > size:
            raise ValueError(f"a column's metadata from byte {offset}, {length} bytes")
        file.seek(offset)
        column = file.read(length)
        messages = _values(column, _ENCODING)
        for page in _values(column, _PAGES):
            messages += _values(page, _PAGE_ENCODING)
        for number in _NAME:
            messages = [value for message in messages for value in _values(message, number)]
        yield from messages


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
            continue
        if wire_type not in (1, 2, 5):
            raise ValueError(f"a field of wire type {wire_type}")
        length = 8 if wire_type == 1 else 4
        if wire_type == 2:
            length, at = _varint(message, at)
        if at + length > len(message):
            raise ValueError(f"a field of {length} bytes where {len(message) - at} are left")
        if (wire_type, key >> 3) == (2, number):
            values.append(message[at : at + length])
        at += length
    return values


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        value |= (message[at] & 127) << shift
        at += 1
        if message[at - 1] < 128:
            return value, at
    raise ValueError("a truncated number")
