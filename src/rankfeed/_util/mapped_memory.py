"""Memory-mapped descriptors as arrays, without a second descriptor."""

import ctypes
import mmap
import os
from functools import cache
from typing import Any


class MappedMemory:
    """Some bytes of a file or memfd in memory: ``np.asarray`` of it is an array of uint8 that keeps them mapped.

    (An `mmap.mmap` duplicates its descriptor, and does not tell the number.) The descriptor stays open; the offset
    is a multiple of the page size.
    """

    _address = 0

    def __init__(self, descriptor: int, size: int, *, offset: int = 0, writable: bool = False) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc().mmap(None, size, protection, mmap.MAP_SHARED, descriptor, offset)
        if address == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self._address, self._size = address, size
        self._unmap = _libc().munmap  # an attribute, since module globals are gone at the interpreter's exit
        self.__array_interface__ = {
            "data": (address, not writable),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __len__(self) -> int:
        return self._size

    def __del__(self) -> None:
        if self._address:
            self._unmap(self._address, self._size)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    integer: Any = ctypes.c_int
    pointer: Any = ctypes.c_void_p
    libc.mmap.argtypes = [pointer, ctypes.c_size_t, integer, integer, integer, ctypes.c_int64]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, ctypes.c_size_t]
    return libc
