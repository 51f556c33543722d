"""What may be wrong with a Lance table, and the errors that say so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rankfeed.errors import CorruptError, RankfeedError, SourceError
from rankfeed.sources.lance.file_metadata import check_encodings

#: What a Lance data file ends with.
_MAGIC = b"LANC"
GONE = "open the table anew; to keep a version from being cleaned up while it is read, tag it"
DAMAGED = "restore the file from a copy, or open an older version of the table (version=...)"


def check_file(path: str, size: int | None, where: str) -> None:
    """Whether a file is there and whole, as far as its size and its end tell.

    Args:
        path: of it.
        size: bytes that it should have, where that is known.
        where: table, version and fragment, for errors.

    Raises:
        CorruptError: it is not.
        SourceError: it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            file.seek(-min(found, len(_MAGIC)), os.SEEK_END)
            end = file.read(len(_MAGIC))
    except FileNotFoundError as error:
        raise CorruptError(
            "a file of the table is missing",
            expected="all files of this version: was it cleaned up while it was in use?",
            found=path,
            where=where,
            remedy=GONE,
        ) from error
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
    if path.endswith(".lance") and end != _MAGIC:
        raise CorruptError(
            "a data file has no end",
            expected=_MAGIC,
            found=f"{end!r} in {path}",
            where=where,
            remedy=DAMAGED,
        )
    if path.endswith(".lance"):
        check_encodings(path, where)


def no_version(uri: str, version: int | str | None, error: object) -> SourceError:
    """The error of a version that is not there, or no longer."""
    return SourceError(
        "there is no such table" if version is None else f"the table has no version {version}",
        found=short(error),
        where=uri,
        remedy=None if version is None else GONE,
    )


@contextmanager
def native(where: str) -> Iterator[None]:
    """What the native library raises, turned into errors that say where.

    A panic of Rust arrives as `PanicException`, which is no `Exception`, so that most handlers would miss it.
    """
    try:
        yield
    except RankfeedError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt, or the end of the program
        text = short(error)
        if "not found" in text.lower() or "No such file" in text:
            raise CorruptError(
                "a file of the table is missing",
                expected="all files of this version: was it cleaned up while it was in use?",
                found=text,
                where=where,
                remedy=GONE,
            ) from error
        raise CorruptError(
            "the table cannot be read: it may be damaged", found=text, where=where, remedy=DAMAGED
        ) from error


def short(error: object) -> str:
    """What an error of the native library says, without the places in its own code."""
    text = str(error).split(", /home/")[0].split(", /Users/")[0].splitlines()
    return f"{type(error).__name__}: {text[0][:400] if text else ''}"
