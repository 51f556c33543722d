"""Memory-mapped files. Their pages belong to the kernel's page cache, which keeps and evicts them."""

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import SourceError


class MappedFile:
    """A read-only mapping of a file that is not empty; keeps the file open, so that its size can be checked.

    (An `mmap.mmap` does not tell its descriptor, and before Python 3.13 a second one would be needed.)
    """

    _descriptor, _address = -1, 0

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size
        address = _libc().mmap(None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, self._descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self._address = address
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (self._size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __len__(self) -> int:
        return self._size

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._descriptor

    def __del__(self) -> None:
        if self._address:
            _libc().munmap(self._address, self._size)
        if self._descriptor >= 0:
            os.close(self._descriptor)


def map_file(path: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """The bytes of a file as a read-only array, which keeps the mapping alive; raises SourceError."""
    try:
        if os.path.getsize(path) == 0:
            return np.empty(0, np.uint8)  # cannot be mapped
        return np.asarray(MappedFile(path))
    except (OSError, ValueError) as error:
        raise SourceError("the file cannot be read", found=error, where=os.fspath(path)) from error


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    number: Any = ctypes.c_int
    pointer: Any = ctypes.c_void_p
    libc.mmap.argtypes = [pointer, ctypes.c_size_t, number, number, number, ctypes.c_int64]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, ctypes.c_size_t]
    return libc
