"""Memory-mapped files. Their pages belong to the kernel's page cache, which keeps and evicts them."""

import mmap
import os

import numpy as np
import numpy.typing as npt

from rankfeed.errors import SourceError


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
