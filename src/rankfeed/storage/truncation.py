"""Errors about shards and files that are truncated: before they are opened, and while they are mapped."""

import os
from typing import Any

from rankfeed.errors import CorruptError


def check_shard_size(
    path: str | os.PathLike[str], expected: int | None, listed_in: object, remedy: str | None = None
) -> None:
    """A CorruptError if a shard is missing, or has another size than the list of shards says (None: any)."""
    where = os.fspath(path)
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise CorruptError(
            "a shard is missing",
            expected=f"listed in {listed_in}",
            found=error.strerror,
            where=where,
            remedy=remedy,
        ) from error
    if expected not in (None, size):
        raise CorruptError(
            "a shard has another size than expected",
            expected=f"{expected} bytes, listed in {listed_in}",
            found=f"{size} bytes",
            where=where,
            remedy=remedy,
        )


def check_not_truncated(file: tuple[int, int], where: str | os.PathLike[str]) -> None:
    """Check with fstat that a mapped file, as `file_of` describes it, is not truncated.

    Accessing truncated pages kills the process (SIGBUS). A file that is truncated between this check and the
    access is not detected.
    """
    descriptor, mapped = file
    if descriptor < 0:
        return
    found: Any
    try:
        if (size := os.fstat(descriptor).st_size) >= mapped:
            return
        found = f"{size} bytes"
    except OSError as error:  # another host removed it from a network file system
        found = error
    raise CorruptError(
        "a file was changed while it was in use",
        expected=f"{mapped} bytes, as when it was opened",
        found=found,
        where=where,
        remedy="start the job again",
    )
