"""Reading JSON files that come with data: untrusted, bounded in size, and checked against a type."""

import os
from typing import TypeVar

import msgspec

from rankfeed.errors import CorruptError, SourceError

T = TypeVar("T")

_MOST_BYTES = 1 << 30


def read_json(path: str | os.PathLike[str], kind: type[T]) -> T:
    """The content of a JSON file as a typed struct."""
    try:
        if os.stat(path).st_size > _MOST_BYTES:
            raise CorruptError("the index is too large", where=path, expected=f"up to {_MOST_BYTES} bytes")
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise SourceError("the index cannot be read", found=error.strerror, where=path) from error
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(
            "the index is damaged",
            found=error,
            where=path,
            remedy="fetch the index again, or write the data again",
        ) from error
