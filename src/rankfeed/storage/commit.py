"""Files that are there whole or not at all: written under a name of their own, made durable, then moved."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

#: What a file under a temporary name starts with.
TEMPORARY = ".tmp-"


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that no other process, on this host or another, gives to a file."""
    host = "".join(sign if sign.isalnum() else "-" for sign in socket.gethostname())[:32]
    return path.with_name(f"{TEMPORARY}{host}-{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file open for writing that appears under its name when the block ends, and not when it fails.

    Args:
        path: its name in the end; what lies there is replaced in one step.

    Raises:
        OSError: it cannot be written; nothing is left behind.

    Examples:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp(), "a")
        >>> with atomic_file(target) as file:
        ...     _ = file.write(b"all of it")
        ...     target.exists()
        False
        >>> target.read_bytes()
        b'all of it'
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
    make_durable(target.parent)


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Put a small file there, whole or not at all.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    with atomic_file(path) as file:
        file.write(content)


def make_directory(path: Path) -> None:
    """Create a directory for rankfeed's own files, or take the one that is there.

    Raises:
        OSError: it cannot be created, or there is a symbolic link, through which nothing is written.
    """
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link, and nothing is written through one", os.fspath(path))


def make_durable(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder survive a power cut."""
    # Some file systems refuse to sync a folder; their names are as durable as they get.
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
