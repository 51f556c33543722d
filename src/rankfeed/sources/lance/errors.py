"""Errors of the Lance library, and checks of its files, as errors that name the table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rankfeed.errors import CorruptError, RankfeedError, SourceError
from rankfeed.sources.lance.file_metadata import check_encodings

_MAGIC = b"LANC"
_CLEANED_UP = "open the table again; to keep a version from being cleaned up while it is read, tag it"
DAMAGED = "restore the file from a copy, or open an older version of the table (version=...)"


def check_file(path: str, size: int | None, where: str) -> None:
    """Check existence, size (if known) and end of a file, and the encodings of a data file."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            file.seek(-min(found, len(_MAGIC)), os.SEEK_END)
            end = file.read(len(_MAGIC))
    except FileNotFoundError as error:
        raise _file_missing(path, where) from error
    except OSError as error:
        raise SourceError("a file of the table cannot be read", found=error, where=where) from error
    if size and found != size:
        raise CorruptError(
            "a data file has another size than the table's manifest says",
            expected=f"{size} bytes",
            found=f"{found} bytes in {path}",
            where=where,
            remedy=DAMAGED,
        )
    if path.endswith(".lance"):
        if end != _MAGIC:
            raise CorruptError(
                "a data file has no end",
                expected=_MAGIC,
                found=f"{end!r} in {path}",
                where=where,
                remedy=DAMAGED,
            )
        check_encodings(path, where)


def _file_missing(found: str, where: str) -> CorruptError:
    return CorruptError(
        "a file of the table is missing",
        expected="all files of this version: was it cleaned up while it was in use?",
        found=found,
        where=where,
        remedy=_CLEANED_UP,
    )


def no_such_version(uri: str, version: int | str | None, error: object) -> SourceError:
    """The error for a table or version that does not exist, or no longer."""
    return SourceError(
        "there is no such table" if version is None else f"the table has no version {version}",
        found=short_message(error),
        where=uri,
        remedy=None if version is None else _CLEANED_UP,
    )


@contextmanager
def lance_errors(where: str) -> Iterator[None]:
    """Convert errors of the library to errors that name the table.

    A Rust panic arrives as `PanicException`, which is not an `Exception`.
    """
    try:
        yield
    except RankfeedError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt, or the end of the program
        text = short_message(error)
        if "not found" in text.lower() or "No such file" in text:
            raise _file_missing(text, where) from error
        raise CorruptError(
            "the table cannot be read: it may be damaged", found=text, where=where, remedy=DAMAGED
        ) from error


def short_message(error: object) -> str:
    """The message of an error of the library, without positions in its source."""
    text = str(error).split(", /home/")[0].split(", /Users/")[0].splitlines()
    return f"{type(error).__name__}: {text[0][:400] if text else ''}"
