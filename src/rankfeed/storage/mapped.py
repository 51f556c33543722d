"""Memory-mapped files. Their pages belong to the kernel's page cache, which keeps and evicts them."""

import ctypes
import os

import numpy as np
import numpy.typing as npt

from rankfeed._util.mapped_memory import MappedMemory
from rankfeed._util.native import native_library
from rankfeed.storage.file_errors import file_errors


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


def map_file(path: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """The bytes of a file as a read-only array, which keeps the mapping alive; raises SourceError."""
    with file_errors(path):
        if os.path.getsize(path) == 0:
            return np.empty(0, np.uint8)  # cannot be mapped
        return np.asarray(MappedFile(path))
