"""Atomic file creation: write under a temporary name, fsync, rename."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

#: Prefix of temporary names.
TEMPORARY = ".tmp-"


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that no other process on any host uses."""
    host = "".join(sign if sign.isalnum() else "-" for sign in socket.gethostname())[:32]
    return path.with_name(f"{TEMPORARY}{host}-{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name when the block succeeds, replacing an existing file.

    Raises:
        OSError: it cannot be written; nothing is left behind.

    Examples:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp(), "a")
        >>> with atomic_file(target) as file:
        ...     _ = file.write(b"content")
        ...     target.exists()
        False
        >>> target.read_bytes()
        b'content'
    """
    target = Path(path)
    temporary = temporary_name(target)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(target.parent)


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a small file atomically.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    with atomic_file(path) as file:
        file.write(content)


def make_directory(path: Path) -> None:
    """Create a directory for files of rankfeed, unless it exists.

    Raises:
        OSError: it cannot be created, or is a symbolic link, through which nothing is written.
    """
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link, through which nothing is written", os.fspath(path))


def fsync_dir(folder: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable, if the file system supports it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
