"""Reading JSON files that come with data: untrusted, bounded in size, and checked against a type."""

import os
from typing import TypeVar

import msgspec

from rankfeed.errors import CorruptError
from rankfeed.storage.file_errors import file_errors

T = TypeVar("T")

_MOST_BYTES = 1 << 30


def read_json(path: str | os.PathLike[str], kind: type[T]) -> T:
    """The content of a JSON file as a typed struct."""
    with file_errors(path, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if os.stat(path).st_size > _MOST_BYTES:
            raise CorruptError("the index is too large", where=path, expected=f"up to {_MOST_BYTES} bytes")
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=kind)
