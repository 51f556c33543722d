"""Memory-mapped files. Their pages belong to the kernel's page cache, which keeps and evicts them."""

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError, SourceError


def map_file(path: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """The bytes of a file as a read-only array, which keeps the mapping alive; raises SourceError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            if size == 0:
                return np.empty(0, np.uint8)  # an empty file cannot be mapped
            mapping = mmap.mmap(handle, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        raise SourceError("the file cannot be read", found=error, where=os.fspath(path)) from error
    return np.frombuffer(mapping, np.uint8)


def check_not_truncated(array: npt.NDArray[Any], where: str | os.PathLike[str]) -> None:
    """Check with fstat that the file below an array of `map_file` is not truncated; other arrays pass.

    Accessing truncated pages kills the process (SIGBUS). A file that is truncated between this check and the
    access is not detected.
    """
    base: Any = array.base
    while type(base) is np.ndarray:
        base = base.base
    mapping: Any = base.obj if type(base) is memoryview else None
    if type(mapping) is not mmap.mmap:
        return
    found: Any
    try:
        if (size := mapping.size()) >= len(mapping):
            return
        found = f"{size} bytes"
    except OSError as error:  # another host removed it from a network file system
        found = error
    raise CorruptError(
        "a file was changed while it was in use",
        expected=f"{len(mapping)} bytes, as when it was opened",
        found=found,
        where=where,
        remedy="start the job again",
    )
