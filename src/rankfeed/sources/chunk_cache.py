"""Decoded chunks (row groups, ranges of a fragment, compressed shards) that are kept as long as there is room.

Shared by the threads of a process: where one decodes a chunk, others that need it wait for it. The one used
longest ago goes first, which suits a window: its blocks are needed from when the window opens until it ends.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from rankfeed.columns import Stored
from rankfeed.errors import RankfeedError

Chunk = Mapping[str, Stored]
_Key = TypeVar("_Key", bound=Hashable)

#: Share of a chunk's rows that must have been used when it goes, or reading chunks whole was not worth it.
_WORTH = 1 / 16
#: Where it was not, one chunk in so many is read whole all the same, to find out when it is again.
_PROBE = 16
#: Chunks asked for ahead of need and not yet there.
_MOST_AHEAD = 16


@dataclass
class _Entry:
    chunk: Chunk
    nbytes: int
    rows: int
    used: int = 0


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
        >>> chunk = cache.get("a", lambda: {"x": Stored(np.arange(10))}, used=3)
        >>> cache.find(["a", "b"], used=[1, 1]) == [chunk, None]
        True
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._bytes = 0
        self._worth = 1.0
        self._misses = 0
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pending: dict[Hashable, _Pending] = {}
        self._asked: set[Hashable] = set()
        self._pool: ThreadPoolExecutor | None = None

    def _renew_after_fork(self) -> None:
        # What is decoded is inherited and stays; locks and threads of the parent mean nothing here.
        if self._pid != os.getpid():
            self._start()

    @property
    def pays(self) -> bool:
        """Whether to read a missing chunk whole: chunks that went had been used well (now and then, a trial)."""
        if self._worth >= _WORTH:
            return True
        self._misses += 1
        return self._misses % _PROBE == 0

    def find(self, keys: Sequence[Hashable], used: Sequence[int]) -> list[Chunk | None]:
        """Chunks, as far as they are there; of each so many rows are wanted."""
        self._renew_after_fork()
        with self._lock:
            return [self._used(key, count) for key, count in zip(keys, used, strict=True)]

    def _used(self, key: Hashable, count: int) -> Chunk | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        entry.used += count
        return entry.chunk

    def missing(self, keys: Iterable[_Key]) -> list[_Key]:
        """Those of some chunks that are neither there nor on their way, if chunks are worth reading whole."""
        self._renew_after_fork()
        with self._lock:
            if self._worth < _WORTH:
                return []
            return [key for key in keys if key not in self._entries and key not in self._pending]

    def get(self, key: Hashable, load: Callable[[], Chunk], used: int = 0) -> Chunk:
        """A chunk, decoded if it has to be; what ``load`` raises goes to whoever called with it."""
        self._renew_after_fork()
        while True:
            with self._lock:
                found = self._used(key, used)
                if found is not None:
                    return found
                pending = self._pending.get(key)
                if pending is None:
                    mine = self._pending[key] = _Pending()
                    break
            pending.done.wait()
            if pending.chunk is not None:
                return pending.chunk
            # Whoever decoded it failed; try again, so that the error reaches this caller too.
        try:
            mine.chunk = load()
            self._keep(key, mine.chunk, used)
            return mine.chunk
        finally:
            with self._lock:
                self._pending.pop(key, None)
            mine.done.set()

    def ahead(self, key: Hashable, load: Callable[[], Chunk]) -> None:
        """Have a chunk decoded in the background, unless many are waiting already."""
        self._renew_after_fork()
        with self._lock:
            if len(self._asked) >= _MOST_AHEAD or key in self._asked:
                return
            self._asked.add(key)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="rankfeed-ahead")
            pool = self._pool
        pool.submit(self._try, key, load)

    def _try(self, key: Hashable, load: Callable[[], Chunk]) -> None:
        try:
            with suppress(RankfeedError):  # whoever needs the chunk meets the error
                self.get(key, load)
        finally:
            with self._lock:
                self._asked.discard(key)

    def _keep(self, key: Hashable, chunk: Chunk, used: int) -> None:
        nbytes = sum(stored.nbytes for stored in chunk.values())
        rows = max((stored.rows for stored in chunk.values()), default=0)
        with self._lock:
            self._entries[key] = _Entry(chunk, nbytes, max(1, rows), used)
            self._bytes += nbytes
            while self._bytes > self.max_bytes and len(self._entries) > 1:
                _, gone = self._entries.popitem(last=False)
                self._bytes -= gone.nbytes
                self._worth = 0.75 * self._worth + 0.25 * min(1.0, gone.used / gone.rows)
