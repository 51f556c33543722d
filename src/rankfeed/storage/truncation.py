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


def check_not_truncated(file: Any, where: str | os.PathLike[str]) -> None:
    """Check that a mapped file, as `file_of` returns it, is not truncated and was read completely.

    Called before its pages are accessed, since without the native library a truncated page ends the process
    (SIGBUS); and after numpy or another library read them, which may have read zeros.
    """
    if file is None:
        return
    problem: object = "pages that cannot be read"
    try:
        if (size := os.fstat(file.fileno()).st_size) < len(file):
            problem = f"{size} bytes"
        elif not file.is_lost:
            return
    except OSError as error:  # another host removed it from a network file system
        problem = error
    raise CorruptError(
        "a file was changed while it was in use",
        expected=f"{len(file)} bytes, as when it was opened",
        found=problem,
        where=where,
        remedy="start the job again",
    )
