"""Recycled batch buffers: faulting in fresh pages costs several times the copy that fills them.

A buffer is used again when the last array or tensor over it is gone: each of them holds a reference to it.
"""

import ctypes
import math
import sys
from collections import deque
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]

#: Smaller buffers are left to the allocator, which recycles them as well.
_MIN_BYTES = 1 << 16
#: Buffers kept of each size, and how many of them are tried before a new one is made.
_MAX_KEPT, _TRIED = 32, 4
#: From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class BufferPool:
    """Allocates arrays from recycled memory. Thread-safe: a thread that looks at a buffer has taken it out."""

    def __init__(self) -> None:
        #: By size: those that arrays may be over, the most recently used last.
        self._kept: dict[int, deque[Buffer]] = {}

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _MIN_BYTES or not _COUNTS_REFERENCES:
            return np.empty(shape, dtype)
        size = 1 << (nbytes - 1).bit_length()
        kept = self._kept.setdefault(size, deque(maxlen=_MAX_KEPT))
        buffer = _take_unused(kept)
        if buffer is None:
            buffer = np.empty(size, np.uint8)
        array = np.ndarray(shape, dtype, buffer)
        kept.append(buffer)  # where it is full, the one that was used first is no longer kept
        return array


def _take_unused(kept: deque[Buffer]) -> Buffer | None:
    """Take out a buffer that no array is over; None if there is none among the first few."""
    for _ in range(_TRIED):
        try:
            buffer = kept.popleft()
        except IndexError:
            return None
        if sys.getrefcount(buffer) <= _UNUSED:
            return buffer
        kept.append(buffer)
    return None


def _references(kept: deque[Buffer]) -> int:
    buffer = kept.popleft()
    return sys.getrefcount(buffer)


#: References to a buffer that only a local variable refers to: 2, or 1 in CPython 3.14. A debugger may add some.
_UNUSED = min(2, _references(deque([np.empty(1, np.uint8)])))
#: Without the GIL, references that other threads have are not counted at once.
_COUNTS_REFERENCES: bool = getattr(sys, "_is_gil_enabled", lambda: True)()


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
