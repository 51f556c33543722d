"""Bypasses the attribute and name caches of network file systems.

A host caches which names exist, which directory a name refers to, and the size and times of a file. Each function
here uses a call that the host cannot answer from its cache.
"""

import errno
import os
from contextlib import AbstractContextManager, suppress


def is_gone(error: OSError) -> bool:
    """Whether an error means that a file or directory no longer exists (ESTALE: another host removed it)."""
    return isinstance(error, (FileNotFoundError, NotADirectoryError)) or error.errno == errno.ESTALE


class SuppressGone(AbstractContextManager[None, bool]):
    """Suppresses errors that mean that a file or directory no longer exists."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, OSError) and is_gone(error)


def stat_uncached(path: str | os.PathLike[str]) -> os.stat_result:
    """Size and times of a file: opening it invalidates its cached attributes. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return os.fstat(file.fileno())


def refresh_path(path: str | os.PathLike[str]) -> None:
    """Make this host look up a name that other hosts may have created, replaced or removed.

    Listing the directory and creating a directory of that name are both answered by the server. If the name is
    gone, an empty directory exists for a moment.
    """
    folder, name = os.path.split(os.path.abspath(path))
    with suppress(OSError):
        if name in os.listdir(folder) or os.path.lexists(path):
            os.mkdir(path)
            os.rmdir(path)  # fails if another process has put a file there meanwhile
