"""Memory-mapped files. Their pages belong to the kernel's page cache, which keeps and evicts them."""

import os

import numpy as np
import numpy.typing as npt

from rankfeed._util.mapped_memory import MappedMemory
from rankfeed.errors import SourceError


class MappedFile(MappedMemory):
    """A mapping of a file that is not empty; keeps the file open, so that its size can be checked."""

    _descriptor = -1
    _close = staticmethod(os.close)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        super().__init__(self._descriptor, os.fstat(self._descriptor).st_size)

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._descriptor

    def __del__(self) -> None:
        super().__del__()
        if self._descriptor >= 0:
            self._close(self._descriptor)


def map_file(path: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """The bytes of a file as a read-only array, which keeps the mapping alive; raises SourceError."""
    try:
        if os.path.getsize(path) == 0:
            return np.empty(0, np.uint8)  # cannot be mapped
        return np.asarray(MappedFile(path))
    except (OSError, ValueError) as error:
        raise SourceError("the file cannot be read", found=error, where=os.fspath(path)) from error
