"""Memory that is used again: fresh pages cost several times the copy that fills them.

A buffer goes back to its pool by itself, when the last array or tensor over it is gone.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from functools import cache
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

    Examples:
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
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _SMALLEST:
            return np.empty(shape, dtype)
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, deque(maxlen=_KEPT))
        try:
            buffer = free.pop()
        except IndexError:
            buffer = np.empty(size, np.uint8)
        return np.asarray(_Lease(buffer, free))[:nbytes].view(dtype).reshape(shape)


@cache
def keep_heap() -> None:
    """Have the C library keep the memory that byte strings are freed from, up to 64 MiB.

    They cannot live in a pool, and glibc gives the end of its heap back at once when a batch of them is freed,
    only to ask for fresh pages for the next one: half the rate. Where the library is another, nothing is done.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_TRIM_THRESHOLD, 64 << 20)
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)


#: Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class _Lease:
    """Stands between a buffer and the arrays over it, and is gone when the last of them is."""

    __slots__ = ("__array_interface__", "_buffer", "_home")

    def __init__(self, buffer: Buffer, home: deque[Buffer]) -> None:
        self._buffer = buffer
        self._home = home
        self.__array_interface__ = buffer.__array_interface__

    def __del__(self) -> None:
        self._home.append(self._buffer)
