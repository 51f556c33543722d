"""Indexes that are JSON files and name others: untrusted, so typed when decoded, and no name leads out."""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import TypeVar

import msgspec

from rankfeed.errors import CorruptError, SourceError, UnsafeError

T = TypeVar("T")

#: An index larger than this is none.
_MOST_BYTES = 1 << 30


def read_json(path: str | os.PathLike[str], kind: type[T]) -> T:
    """The content of a JSON file as a typed struct.

    Raises:
        SourceError: it cannot be read.
        CorruptError: it is no JSON, or holds something else.
    """
    try:
        if os.stat(path).st_size > _MOST_BYTES:
            raise CorruptError(
                "an index is too large to be one", where=path, expected=f"up to {_MOST_BYTES} bytes"
            )
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise SourceError("the index cannot be read", found=error.strerror, where=path) from error
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(
            "the index is damaged", found=error, where=path, remedy="fetch the index anew, or write the data again"
        ) from error


def inside(folder: str, name: str, where: str | os.PathLike[str]) -> str:
    """The path of a file that an index names.

    Args:
        folder: that names are relative to.
        name: with forward slashes.
        where: the index, for errors.

    Raises:
        UnsafeError: it leads out of the folder.

    Examples:
        >>> inside("/data", "part/shard.0.mds", "index.json")
        '/data/part/shard.0.mds'
    """
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\0" in name or "\\" in name:
        raise UnsafeError(
            "an index names a file outside its folder",
            expected=f"a path under {folder}",
            found=repr(name[:200]),
            where=where,
            remedy="do not read data sets from people you do not trust; correct the name in the index",
        )
    return os.path.join(folder, *pure.parts)
