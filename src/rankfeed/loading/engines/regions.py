"""Shared memory in which a worker process builds batches, and which the rank's tensors are views of.

The memory is one memfd for each worker, divided into regions. The worker takes a free region for each large array,
or a new one at the end; the rank returns a region when its last tensor over it is gone. So nothing waits for the
rank: batches that are kept only make the memory larger. It has no name, and is freed with its last mapping.
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.storage.mapped import MappedMemory

Buffer = npt.NDArray[np.uint8]

#: Smaller buffers are sent with the pickle of a batch.
MIN_BYTES = 1 << 16
#: Bytes mapped at once, or one larger region: a process has at most 65530 mappings (vm.max_map_count).
_WINDOW = 1 << 26
#: Regions returned at once.
_MAX_RETURNED = 256


class RegionSlice(NamedTuple):
    """Where a buffer is in the shared memory."""

    region: int  # offset of its region
    size: int  # of the region
    start: int  # within the region
    nbytes: int


class _Windows:
    """Maps a memfd, also behind its end, in windows; the offset of a region is a multiple of its size."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._mapped: dict[int, Buffer] = {}

    def buffer(self, offset: int, size: int) -> Buffer:
        """The bytes of a region."""
        window = max(size, _WINDOW)
        within = offset % window
        first = offset - within
        if first not in self._mapped:
            mapping = MappedMemory(self._memory, window, offset=first, writable=True)
            self._mapped[first] = np.asarray(mapping)
        return self._mapped[first][within : within + size]


class _Region:
    """A region as the worker sees it; free when no array is over it here and the rank has not borrowed it."""

    def __init__(self, buffer: Buffer, offset: int) -> None:
        self.buffer, self.offset, self.size = buffer, offset, len(buffer)
        self.address: int = buffer.__array_interface__["data"][0]
        self.is_lent = False


class _Handle:
    """The base of all arrays over a region in the worker."""

    __slots__ = ("__array_interface__", "_pool", "_region")

    def __init__(self, pool: "RegionPool", region: _Region) -> None:
        self._pool, self._region = pool, region
        self.__array_interface__ = region.buffer.__array_interface__

    def __del__(self) -> None:
        self._pool.release(self._region)


class RegionPool:
    """The worker's side: allocates arrays in shared memory, and lends them to the rank."""

    def __init__(self, memory: int) -> None:
        self._memory, self._end = memory, 0
        self._windows = _Windows(memory)
        #: By offset: all, and those that an array is over.
        self._regions: dict[int, _Region] = {}
        self._in_use: dict[int, _Region] = {}
        self._taken: dict[int, bool] = {}
        #: Free regions by size. Only atomic operations: the garbage collector may free one at any point.
        self._free: dict[int, deque[_Region]] = {}

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes < MIN_BYTES:
            return np.empty(shape, dtype)
        size = max(1 << (nbytes - 1).bit_length(), mmap.PAGESIZE)
        try:
            region = self._free.setdefault(size, deque()).pop()
        except IndexError:
            offset = -(-self._end // size) * size
            os.ftruncate(self._memory, offset + size)
            region = self._regions[offset] = _Region(self._windows.buffer(offset, size), offset)
            self._end = offset + size
        self._in_use[region.offset], self._taken[region.offset] = region, True
        return np.asarray(_Handle(self, region))[:nbytes].view(dtype).reshape(shape)

    def lend(self, buffer: memoryview) -> RegionSlice | None:
        """Where a buffer of a batch, which is not empty, is, or a copy; None for a small one in no region."""
        content = np.frombuffer(buffer, np.uint8)
        address = content.__array_interface__["data"][0]
        for region in self._in_use.copy().values():
            if region.address <= address < region.address + region.size:
                break
        else:
            if buffer.nbytes < MIN_BYTES:
                return None
            copy = self.allocate((len(content),), np.dtype(np.uint8))
            copy[:] = content
            return self.lend(copy.data)
        region.is_lent = True
        return RegionSlice(region.offset, region.size, address - region.address, len(content))

    def copy_kept(self, lent: Sequence[memoryview | RegionSlice]) -> list[memoryview | RegionSlice]:
        """The buffers of a batch, with copies of those over whose regions arrays still exist here."""
        regions = {part.region for part in lent if isinstance(part, RegionSlice)}
        kept = regions & self._in_use.copy().keys()  # they may be freed at any time
        copies = [
            self._copy(part) if isinstance(part, RegionSlice) and part.region in kept else part for part in lent
        ]
        for offset in kept:
            self.take_back(offset)
        return copies

    def _copy(self, lent: RegionSlice) -> memoryview | RegionSlice:
        copy = self._regions[lent.region].buffer[lent.start : lent.start + lent.nbytes].copy().data
        return self.lend(copy) or copy

    def take_back(self, offset: int) -> None:
        """Note that the rank does not use a region."""
        region = self._regions[offset]
        region.is_lent = False
        self._reuse(region)

    def release(self, region: _Region) -> None:
        """Note that no array is over a region."""
        del self._in_use[region.offset]
        self._reuse(region)

    def _reuse(self, region: _Region) -> None:
        """Free a region, unless it is used here or lent."""
        # The garbage collector may call this in the middle of itself: only one of two calls gets the region.
        if region.offset in self._in_use or region.is_lent:
            return
        if self._taken.pop(region.offset, None) is not None:
            self._free.setdefault(region.size, deque()).append(region)


class _Borrowed(weakref.ref[Buffer]):
    """A reference to an array over a region in the rank, which is the base of all others."""

    __slots__ = ("offset",)

    offset: int


class BorrowedRegions:
    """The rank's side of the memory of one worker."""

    def __init__(self, memory: int) -> None:
        self._windows = _Windows(memory)
        #: By offset; and those whose array is gone. No function of Python runs when a batch is freed: a signal
        #: handler that interrupted it could not raise to the caller.
        self._borrowed: dict[int, _Borrowed] = {}
        self._returned: deque[_Borrowed] = deque()
        self.last_bytes = 0  # size of the regions that were borrowed last

    def borrow(self, places: list[RegionSlice]) -> dict[RegionSlice, memoryview]:
        """The buffers at some places of a batch."""
        bases: dict[int, Buffer] = {}
        for place in places:
            if place.region not in bases:
                # Its own base is not an array, so it stays the base of its views.
                base = np.frombuffer(self._windows.buffer(place.region, place.size).data, np.uint8)
                borrowed = self._borrowed[place.region] = _Borrowed(base, self._returned.append)
                borrowed.offset, bases[place.region] = place.region, base
        self.last_bytes = sum(map(len, bases.values()))
        return {place: bases[place.region][place.start : place.start + place.nbytes].data for place in places}

    def take_returned(self) -> list[int]:
        """Offsets of regions that are free again; some, so that the message that has them is small."""
        count = min(len(self._returned), _MAX_RETURNED)
        offsets = [self._returned.popleft().offset for _ in range(count)]
        for offset in offsets:
            del self._borrowed[offset]
        return offsets
