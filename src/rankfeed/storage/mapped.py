"""Maps files and memfds into memory, and checks that files are not truncated.

Pages of files belong to the kernel's page cache, which keeps and evicts them.
"""

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.native import native_library
from rankfeed._util.signals import reraise_interrupt
from rankfeed.errors import CorruptError
from rankfeed.storage.file_errors import file_errors

Bytes = npt.NDArray[np.uint8]


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
    libc: Any = ctypes.CDLL(None, use_errno=True)
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    libc.mmap.argtypes = [pointer, ctypes.c_size_t, integer, integer, integer, ctypes.c_int64]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, ctypes.c_size_t]
    return libc


class MappedFile(MappedMemory):
    """A mapping of a file that is not empty; keeps the file open, so that its size can be checked.

    With the native library, pages behind the end of a file that was truncated are read as zeros, and it is marked.
    """

    _descriptor = -1
    _guard: int | None = None
    _close = staticmethod(os.close)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        super().__init__(self._descriptor, os.fstat(self._descriptor).st_size)
        if (library := native_library()) is not None:
            self._unguard = library.rankfeed_unguard
            self._guard = library.rankfeed_guard(self._address, len(self))

    @property
    def is_lost(self) -> bool:
        """Whether some pages could not be read, and were replaced by zeros."""
        return self._guard is not None and ctypes.c_int64.from_address(self._guard).value != 0

    def fileno(self) -> int:
        return self._descriptor

    def __del__(self) -> None:
        if self._guard is not None:
            self._unguard(self._guard)
        super().__del__()
        if self._descriptor >= 0:
            self._close(self._descriptor)


def map_file(path: str | os.PathLike[str]) -> Bytes:
    """The bytes of a file as a read-only array, which keeps the mapping alive; raises SourceError."""
    with file_errors(path):
        if os.path.getsize(path) == 0:
            return np.empty(0, np.uint8)  # cannot be mapped
        return np.asarray(MappedFile(path))


def check_shard_size(
    path: str | os.PathLike[str], expected: int | None, listed_in: object, remedy: str | None = None
) -> None:
    """A CorruptError if a shard is missing, or has another size than the list of shards says (None: any)."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise CorruptError(
            "a shard is missing",
            expected=f"listed in {listed_in}",
            found=error.strerror,
            where=path,
            remedy=remedy,
        ) from error
    if expected not in (None, size):
        raise CorruptError(
            "a shard has another size than expected",
            expected=f"{expected} bytes, listed in {listed_in}",
            found=f"{size} bytes",
            where=path,
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
        reraise_interrupt(error)
        problem = error
    raise CorruptError(
        "a file was changed while it was in use",
        expected=f"{len(file)} bytes, as when it was opened",
        found=problem,
        where=where,
        remedy="start the job again",
    )
