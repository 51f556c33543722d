"""Decoded chunks (row groups, ranges of a fragment, compressed shards) that are kept as long as there is room.

Shared by the threads of a process: where one decodes a chunk, others that need it wait for it.

In an epoch each row is read once, so a chunk whose rows were all read is spent, and goes first. One that nobody
asked for in a long while, as its own rhythm goes, is stale: other workers read the rest of it. All others are
alive, and to throw one out for another would only swap them: each chunk would be decoded again and again.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed.columns import ColumnBuffer
from rankfeed.errors import RankfeedError
from rankfeed.sources.lookups import LOOKUPS

Chunk = Mapping[str, ColumnBuffer]
_Key = TypeVar("_Key", bound=Hashable)

#: A chunk is stale when it was left alone so many times longer than it was on average before.
_PATIENCE = 8
#: Times a chunk must have been asked for before its rhythm is known.
_KNOWN = 4
#: Living chunks thrown out before a warning says so.
_TOLERATED = 64
#: Chunks asked for ahead of need and not yet there.
_MOST_AHEAD = 16
#: Threads that decode ahead of need. Libraries release Python's lock meanwhile.
_THREADS = 2


@dataclass
class _Entry:
    """A chunk that is there; times are counted in rows asked for of all chunks."""

    chunk: Chunk
    nbytes: int
    rows: int
    used: int
    first: int
    last: int
    asked: int = 1

    def is_over(self, now: int) -> bool:
        """Whether it is spent, or stale."""
        if self.used >= self.rows:
            return True
        return self.asked >= _KNOWN and (now - self.last) * (self.asked - 1) > _PATIENCE * (self.last - self.first)


@dataclass
class _Pending:
    """A chunk that some thread is decoding."""

    done: threading.Event = field(default_factory=threading.Event)
    chunk: Chunk | None = None


class ChunkCache:
    """A bounded cache of decoded chunks. Safe to use from several threads, and after fork.

    Args:
        max_bytes: decoded bytes to keep; the chunk used last stays, whatever its size.

    Examples:
        >>> import numpy as np
        >>> cache = ChunkCache(100)
        >>> chunk = cache.get("a", lambda: {"x": ColumnBuffer(np.arange(10))})
        >>> cache.find(["a", "b"], used=[1, 1]) == [chunk, None]
        True
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        #: In the order in which they go: spent ones, then by when they were last asked for.
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._bytes = 0
        self._largest = 0
        self._now = 0
        #: Rows that were read of chunks that are not there.
        self._elsewhere: dict[Hashable, int] = {}
        self._lost = 0
        init_in_each_process(self.start_anew)

    def start_anew(self) -> None:
        """In a forked child what is decoded is inherited; locks and threads of the parent mean nothing there."""
        self._lock = threading.Lock()
        self._pending: dict[Hashable, _Pending] = {}
        self._asked: set[Hashable] = set()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def has_room(self) -> bool:
        """Whether another chunk can be kept without throwing out a living one."""
        with self._lock:
            return self._has_room()

    def _has_room(self, beside: int = 0) -> bool:
        """Whether there is room for a chunk, beside so many others."""
        # Those on their way take room as well: two that are decoded at once are not to throw each other out.
        needed = self._bytes + self._largest * (1 + beside + len(self._pending)) - self.max_bytes
        for entry in self._entries.values():
            if needed <= 0 or not entry.is_over(self._now):
                break
            needed -= entry.nbytes
        return needed <= 0 or not self._entries

    def find(self, keys: Sequence[Hashable], used: Sequence[int]) -> list[Chunk | None]:
        """Chunks, as far as they are there; so many rows of each are read now, from it or from elsewhere."""
        with self._lock:
            return [self._used(key, count) for key, count in zip(keys, used, strict=True)]

    def _used(self, key: Hashable, count: int) -> Chunk | None:
        self._now += count
        entry = self._entries.get(key)
        LOOKUPS.add(count, found=entry is not None)
        if entry is None:
            self._elsewhere[key] = self._elsewhere.get(key, 0) + count
            return None
        if entry.used >= entry.rows:
            entry.used = 0  # another epoch
        entry.used += count
        entry.last = self._now
        entry.asked += 1
        self._entries.move_to_end(key, last=entry.used < entry.rows)
        return entry.chunk

    def missing(self, keys: Iterable[_Key]) -> list[_Key]:
        """Those of some chunks that are neither there nor on their way, if there is room for one."""
        with self._lock:
            if not self._has_room():
                return []
            return [key for key in keys if key not in self._entries and key not in self._pending]

    def get(self, key: Hashable, load: Callable[[], Chunk]) -> Chunk:
        """A chunk that :meth:`find` did not find, decoded; what ``load`` raises goes to whoever called with it."""
        while True:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None:
                    return entry.chunk
                self._asked.discard(key)
                pending = self._pending.get(key)
                if pending is None:
                    mine = self._pending[key] = _Pending()
                    break
            pending.done.wait()
            if pending.chunk is not None:
                return pending.chunk
            # Whoever decoded it failed; try again, so that the error reaches this caller too.
        return self._load(key, mine, load)

    def _load(self, key: Hashable, mine: _Pending, load: Callable[[], Chunk]) -> Chunk:
        """Decode a chunk that others wait for."""
        try:
            mine.chunk = load()
            self._keep(key, mine.chunk)
            return mine.chunk
        finally:
            with self._lock:
                self._pending.pop(key, None)
            mine.done.set()

    def ahead(self, key: Hashable, load: Callable[[], Chunk]) -> None:
        """Have a chunk decoded in the background, unless many are waiting already."""
        with self._lock:
            if len(self._asked) >= _MOST_AHEAD or key in self._asked:
                return
            self._asked.add(key)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rankfeed-ahead")
            pool = self._pool
        pool.submit(self._try, key, load)

    def _try(self, key: Hashable, load: Callable[[], Chunk]) -> None:
        with self._lock:
            late = key not in self._asked  # somebody needed it meanwhile, and may be through with it
            there = key in self._entries or key in self._pending
            # One that a reader cannot wait for must find room, too.
            wanted = not late and not there and self._has_room(beside=1)
            mine = self._pending.setdefault(key, _Pending()) if wanted else None
        try:
            if mine is not None:
                with suppress(RankfeedError):  # whoever needs the chunk meets the error
                    self._load(key, mine, load)
        finally:
            with self._lock:
                self._asked.discard(key)

    def _keep(self, key: Hashable, chunk: Chunk) -> None:
        nbytes = sum(stored.nbytes for stored in chunk.values())
        rows = max(1, max((stored.rows for stored in chunk.values()), default=0))
        with self._lock:
            # What was read of it in epochs before does not count; but one that was just read whole is spent.
            read = self._elsewhere.pop(key, 0)
            used = read % rows or min(read, rows)
            self._entries[key] = _Entry(chunk, nbytes, rows, used, self._now, self._now)
            self._entries.move_to_end(key, last=used < rows)
            self._bytes += nbytes
            self._largest = max(self._largest, nbytes)
            while self._bytes > self.max_bytes and len(self._entries) > 1:
                _, gone = self._entries.popitem(last=False)
                self._bytes -= gone.nbytes
                self._lost += not gone.is_over(self._now)
            thrashing = self._lost == _TOLERATED
            self._lost += thrashing  # said once
        if thrashing:
            warnings.warn(
                "data are decoded again and again: this order keeps more of them open than "
                f"cache_bytes={self.max_bytes} holds. Shuffle with a smaller window= or fewer lanes=, or open "
                "the data with a larger cache_bytes=.",
                stacklevel=2,
            )
