"""Memory that is used again: fresh pages cost several times the copy that fills them.

A buffer goes back to its pool by itself, when the last array or tensor over it is gone.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]

#: Below this many bytes the allocator's own reuse is as good.
_SMALLEST = 1 << 16
#: Free buffers kept of each size.
_KEPT = 32


class BufferPool:
    """Gives out arrays over recycled memory. Safe to use from several threads.

    Example:
        >>> pool = BufferPool()
        >>> first = pool.allocate((1024, 64), np.dtype("float32"))
        >>> address = first.ctypes.data
        >>> del first
        >>> pool.allocate((1024, 60), np.dtype("float32")).ctypes.data == address
        True
    """

    def __init__(self) -> None:
        # Only single deque operations touch it: a buffer may come back in the middle of anything, because
        # the garbage collector may run anywhere, and a lock would then wait for itself.
        self._free: dict[int, deque[Buffer]] = {}

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array."""
        count = 1
        for extent in shape:
            count *= extent
        nbytes = count * dtype.itemsize
        if nbytes < _SMALLEST:
            return np.empty(shape, dtype)
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, deque(maxlen=_KEPT))
        try:
            buffer = free.pop()
        except IndexError:
            buffer = np.empty(size, np.uint8)
        return np.asarray(_Lease(buffer, free))[:nbytes].view(dtype).reshape(shape)


class _Lease:
    """Stands between a buffer and the arrays over it, and is gone when the last of them is."""

    __slots__ = ("__array_interface__", "_buffer", "_home")

    def __init__(self, buffer: Buffer, home: deque[Buffer]) -> None:
        self._buffer = buffer
        self._home = home
        self.__array_interface__ = buffer.__array_interface__

    def __del__(self) -> None:
        self._home.append(self._buffer)
