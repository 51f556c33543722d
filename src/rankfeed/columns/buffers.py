"""Recycled batch buffers: faulting in fresh pages costs several times the copy that fills them.

A buffer returns to its pool when the last array or tensor over it is gone.
"""

import ctypes
import math
from collections import deque
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]

#: Smaller buffers are left to the allocator, which recycles them as well.
_MIN_BYTES = 1 << 16
#: Free buffers kept of each size.
_MAX_FREE = 32
#: From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class BufferPool:
    """Allocates arrays from recycled memory. Thread-safe."""

    def __init__(self) -> None:
        # Only atomic deque operations: the garbage collector may return a buffer at any point, also inside this
        # class, where a lock would deadlock.
        self._free: dict[int, deque[Buffer]] = {}

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _MIN_BYTES:
            return np.empty(shape, dtype)
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, deque(maxlen=_MAX_FREE))
        try:
            buffer = free.pop()
        except IndexError:
            buffer = np.empty(size, np.uint8)
        return np.asarray(_PooledBuffer(buffer, free))[:nbytes].view(dtype).reshape(shape)


class _PooledBuffer:
    """The base of all arrays over a buffer; returns it to the pool when the last one is gone."""

    __slots__ = ("__array_interface__", "_buffer", "_free")

    def __init__(self, buffer: Buffer, free: deque[Buffer]) -> None:
        self._buffer = buffer
        self._free = free
        self.__array_interface__ = buffer.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._buffer)


@cache
def retain_heap() -> None:
    """Let glibc keep up to 64 MiB of freed memory.

    Byte strings cannot be pooled. When a batch of them is freed, glibc returns the end of its heap to the system
    and faults in fresh pages for the next batch, at half the rate. Other C libraries are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_TRIM_THRESHOLD, 64 << 20)
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
