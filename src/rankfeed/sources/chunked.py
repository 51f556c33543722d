"""Sources that decode chunks of rows (row groups, ranges of a fragment, shards), and the cache of these chunks.

An epoch reads each row once, so a chunk whose rows were all read is evicted first. A chunk that was not requested
for much longer than its usual interval is stale: other workers read the rest of it. All other chunks are live, and
evicting one for another would only decode both again and again.
"""

from __future__ import annotations

import copy
import threading
import warnings
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed._util.signals import reraise_interrupt
from rankfeed._util.validate import check_int
from rankfeed.columns.chunk_groups import by_chunk
from rankfeed.columns.columns import Column, ColumnBuffer, columns_from_buffers
from rankfeed.sources.source import GLOBAL_SHUFFLE_BYTES, Int64, Source, check_columns, check_ids, starts_of

Chunk = Mapping[str, ColumnBuffer]
#: Number of a chunk, and names of its columns.
Key = tuple[int, tuple[str, ...]]
Load = Callable[[int, tuple[str, ...]], Chunk]

#: A chunk is stale after this many of its average intervals between requests.
_STALE_INTERVALS = 8
#: Requests after which the interval of a chunk is known.
_KNOWN_REQUESTS = 4
#: Live chunks evicted before a warning.
_WARN_EVICTIONS = 64
_MOST_PENDING = 16
_PREFETCH_THREADS = 2
#: Decoded bytes that a process keeps of one source.
CACHE_BYTES = 1 << 30
#: Bytes of a window for data larger than that: 64 lanes each have a window and one or two chunks in use.
_WINDOW_BYTES = 2 << 20
#: Chunks to announce ahead: while one is read, the next ones are decoded.
_CHUNKS_AHEAD = 4


class ChunkedSource(Source):
    """A source that decodes whole chunks and caches those used last.

    A subclass sets ``decoded_bytes``, calls ``_init_samples`` and ``_init_chunks`` and implements ``_load_chunk``;
    also ``_take``, if it can read single rows cheaply.
    """

    #: Whether a chunk can only be decoded after those before it, so that one pass has to serve many requests:
    #: rows are announced as far ahead as the cache holds them, and only the next chunks are prefetched.
    _sequential_chunks: bool = False

    def _init_chunks(self, rows_per_chunk: Sequence[int] | Int64, cache_bytes: int = CACHE_BYTES) -> None:
        """Define the chunks in the order of sample ids."""
        self._chunk_starts = starts_of(rows_per_chunk)
        self.cache_bytes = check_int("cache_bytes", cache_bytes, at_least=0)
        self._cache = ChunkCache(self.cache_bytes)
        rows = int(self._chunk_starts[-1])
        self.prefetch_distance = max(1, _CHUNKS_AHEAD * rows // max(1, len(rows_per_chunk)))
        if self._sequential_chunks:
            share = self.cache_bytes // 2 / max(1, self.decoded_bytes)
            self.prefetch_distance = max(self.prefetch_distance, int(rows * min(1.0, share)))

    # Both define the order, so they depend on the data alone, not on columns or cache.
    @property
    def default_shuffle(self) -> Literal["global", "window"]:  # type: ignore[override]
        """Windows if the decoded data are large."""
        return "window" if self.decoded_bytes > GLOBAL_SHUFFLE_BYTES else "global"

    @property
    def best_window(self) -> int | None:  # type: ignore[override]
        """A window of few bytes if the decoded data are large."""
        if self.decoded_bytes <= GLOBAL_SHUFFLE_BYTES:
            return None
        return max(1, _WINDOW_BYTES * int(self._chunk_starts[-1]) // self.decoded_bytes)

    @abstractmethod
    def _load_chunk(self, index: int, names: tuple[str, ...]) -> Chunk:
        """Decode some columns of a chunk, in any thread of the reading process."""

    def _can_prefetch(self, index: int, names: tuple[str, ...]) -> bool:
        """Whether decoding a chunk that is announced does not decode many others on the way."""
        return True

    def _take(self, ids: Int64, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        """Read single rows; ``ids`` are sorted and unique. Optional."""
        raise NotImplementedError

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        with self._cache.enter() as is_nested:
            return (self._independent() if is_nested else self)._fetch_chunks(ids, tuple(names))

    def _independent(self) -> Self:
        """A copy with its own cache: for a signal handler that interrupted a call, which may hold a lock."""
        source = copy.copy(self)
        source._cache = ChunkCache(0)
        return source

    def _fetch_chunks(self, ids: Int64, names: tuple[str, ...]) -> dict[str, Column]:
        groups: list[tuple[int, Int64, Int64 | None]] = []
        chunks: list[Chunk] = []
        single: list[tuple[Int64, Any]] = []
        can_take, is_full = type(self)._take is not ChunkedSource._take, False
        requested = by_chunk(ids, self._chunk_starts)
        keys, counts = [(index, names) for index, _, _ in requested], [len(rows) for _, rows, _ in requested]
        for (index, rows, slots), chunk in zip(requested, self._cache.find(keys, counts), strict=True):
            if chunk is None and can_take:
                is_full = is_full or not self._cache.has_capacity()
                if is_full:
                    single.append((rows + self._chunk_starts[index], slots))
                    continue
            groups.append((index, rows, slots))
            chunks.append(chunk or self._cache.get((index, names), self._load_chunk))
        if single:  # rows of chunks that are not worth decoding, in one call
            unique, places = np.unique(np.concatenate([rows for rows, _ in single]), return_inverse=True)
            slots = None if single[0][1] is None else np.concatenate([positions for _, positions in single])
            groups.append((-1, places, slots))
            chunks.append(self._take(unique, names))
        if self._sequential_chunks:
            self._cache.forget(keys, counts)
            self._prefetch_announced()
        return columns_from_buffers(self.fields, names, groups, chunks)

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        self._expect(check_ids(sample_ids, len(self)), check_columns(columns, self.fields, self.derived))

    def _expect(self, ids: Int64, names: Sequence[str]) -> None:
        groups, columns = by_chunk(ids, self._chunk_starts), tuple(names)
        keys = [(index, columns) for index in groups.numbers]
        with self._cache.enter() as is_nested:
            if is_nested or not len(ids):
                return
            if self._sequential_chunks:
                self._cache.announce(keys, [len(rows) for _, rows, _ in groups], 2 * self.prefetch_distance)
                self._prefetch_announced()
                return
            for key in keys:
                if not self._cache.prefetch(key, self._load_chunk):
                    break

    def _prefetch_announced(self) -> None:
        """Prefetch the chunks that are needed next, as far as that is cheap."""
        for index, names in self._cache.announced(_CHUNKS_AHEAD):
            if self._can_prefetch(index, names):
                self._cache.prefetch((index, names), self._load_chunk)


class CacheLookups(threading.local):
    """Rows that this thread read from decoded chunks: how many were cached, and all."""

    so_far: tuple[int, int] = (0, 0)


LOOKUPS = CacheLookups()


@dataclass
class _Entry:
    """A cached chunk; times are counted in rows requested of all chunks. ``requests`` is 0 until one is made."""

    chunk: Chunk
    nbytes: int
    rows: int
    used: int
    first: int
    last: int
    requests: int = 1

    def is_expired(self, now: int) -> bool:
        """Whether all rows were read, the chunk is stale, or it was only decoded on the way to another one."""
        if self.used >= self.rows or not self.requests:
            return True
        idle = (now - self.last) * (self.requests - 1)
        return self.requests >= _KNOWN_REQUESTS and idle > _STALE_INTERVALS * (self.last - self.first)


class ChunkCache:
    """A cache of decoded chunks: at most ``max_bytes``, or the chunk used last. Thread-safe; works after fork.

    ``reserved`` are bytes that the decoder holds besides: expired chunks make room for them.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.reserved = 0
        #: Chunks that will be requested, in this order: rows, and the number of rows announced before them.
        self._announced: OrderedDict[Key, tuple[int, int]] = OrderedDict()
        self._announced_rows = self._all_announced = 0
        #: In the order of eviction: chunks that were read completely, then by last request.
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._bytes = self._largest = self._now = self._live_evictions = 0
        #: Rows that were read of chunks that are not cached.
        self._uncached_rows: dict[Key, int] = {}
        init_in_each_process(self._init_process)

    def _init_process(self) -> None:
        """Create locks and threads; a forked child inherits the chunks only."""
        self._lock = threading.Lock()
        #: Chunks that are being decoded, or wait for it.
        self._pending: dict[Key, Future[Chunk]] = {}
        #: Chunks to prefetch as soon as the size of one is known.
        self._deferred: dict[Key, Load] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._callers: set[int] = set()

    @contextmanager
    def enter(self) -> Iterator[bool]:
        """Mark a call of this thread; yields whether it is within another one."""
        thread = threading.get_ident()
        if thread in self._callers:
            yield True
            return
        try:
            self._callers.add(thread)
            yield False
        finally:
            self._callers.discard(thread)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChunkCache, (self.max_bytes,)

    def has_capacity(self) -> bool:
        """Whether another chunk can be cached without evicting a live one."""
        with self._lock:
            return self._has_capacity(1)

    def _has_capacity(self, chunks: int) -> bool:
        needed = self._bytes + self._largest * (chunks + len(self._pending)) - self.max_bytes
        for entry in self._entries.values():
            if needed <= 0 or not entry.is_expired(self._now):
                break
            needed -= entry.nbytes
        return needed <= 0 or not self._entries

    def find(self, keys: Sequence[Key], used: Sequence[int]) -> list[Chunk | None]:
        """Cached chunks, None for others; counts the rows that the caller reads of each."""
        chunks: list[Chunk | None] = []
        cached = 0
        with self._lock:
            for key, count in zip(keys, used, strict=True):
                self._now += count
                entry = self._entries.get(key)
                chunks.append(None if entry is None else entry.chunk)
                if entry is None:
                    self._uncached_rows[key] = self._uncached_rows.get(key, 0) + count
                    continue
                cached += count
                entry.used = count if entry.used >= entry.rows else entry.used + count  # or another epoch
                entry.last = self._now
                entry.requests += 1
                self._entries.move_to_end(key, last=entry.used < entry.rows)
        hits, total = LOOKUPS.so_far
        LOOKUPS.so_far = hits + cached, total + sum(used)
        return chunks

    def announce(self, keys: Sequence[Key], rows: Sequence[int], most_rows: int) -> None:
        """Record rows that will be requested: their chunks are kept. The oldest are forgotten beyond a limit."""
        with self._lock:
            for key, count in zip(keys, rows, strict=True):
                before, at = self._announced.get(key, (0, self._all_announced))
                self._announced[key] = before + count, at
            self._announced_rows += sum(rows)
            self._all_announced += sum(rows)
            while self._announced_rows > most_rows and len(self._announced) > len(keys):
                self._announced_rows -= self._announced.popitem(last=False)[1][0]

    def announced(self, count: int) -> list[Key]:
        """The chunks that are needed next and neither cached nor being decoded."""
        with self._lock:
            missing = (key for key in self._announced if key not in self._entries and key not in self._pending)
            return list(islice(missing, count))

    def forget(self, keys: Sequence[Key], rows: Sequence[int]) -> None:
        """Rows that were announced were read."""
        with self._lock:
            for key, count in zip(keys, rows, strict=True):
                left, at = self._announced.get(key, (0, 0))
                self._announced_rows -= min(count, left)
                if left > count:
                    self._announced[key] = left - count, at
                else:
                    self._announced.pop(key, None)

    def _next_use(self, key: Key) -> float:
        """When a chunk is needed next, compared with others; infinity if that is unknown."""
        return -1.0 if key in self._pending else self._announced.get(key, (0, inf))[1]

    def is_pending(self, key: Key) -> bool:
        """Whether a chunk is being decoded, or waits for it."""
        with self._lock:
            return key in self._pending

    def peek(self, key: Key) -> Chunk | None:
        """A chunk if it is cached; does not count as a request."""
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else entry.chunk

    def accepts(self, key: Key, nbytes: int) -> bool:
        """Whether a chunk that was decoded on the way to another one replaces nothing of more use."""
        with self._lock:
            if key in self._entries:
                return False
            excess = self._bytes + nbytes - self.max_bytes
            next_use = self._next_use(key)
            for other_key, entry in self._entries.items():
                if excess <= 0:
                    break
                other_use = self._next_use(other_key)
                if other_use > next_use or (other_use == inf and entry.is_expired(self._now)):
                    excess -= entry.nbytes
                elif not self._announced:
                    break  # expired chunks come first
            return excess <= 0

    def get(self, key: Key, load: Load) -> Chunk:
        """A chunk, decoded by ``load(*key)`` unless another thread does; raises the errors of ``load``."""
        future: Future[Chunk] = Future()
        pending: Future[Chunk] | None = None
        future.set_running_or_notify_cancel()
        try:
            with self._lock:
                if (entry := self._entries.get(key)) is not None:
                    return entry.chunk
                pending = self._pending.get(key)
                # A prefetch that has not begun, or a reader that was interrupted before it removed its own.
                if pending is None or pending.cancel() or pending.done():
                    pending = self._pending[key] = future
            if pending is future:
                future.set_result(self._load(key, load))
            return pending.result()
        except BaseException as error:
            if not future.done():  # others may wait for it
                future.set_exception(error)
            raise
        finally:
            del future, pending  # a cycle: the error refers to this frame

    def prefetch(self, key: Key, load: Load) -> bool:
        """Decode a chunk in the background; the reader that needs it meets the errors. False without capacity."""
        with self._lock:
            if key in self._entries or key in self._pending:
                return True
            if not self._largest and len(self._pending) >= _PREFETCH_THREADS:
                self._deferred[key] = load
                return True
            # Capacity for another one: that of a reader.
            if len(self._pending) >= _MOST_PENDING or not self._has_capacity(2):
                return False
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_PREFETCH_THREADS, thread_name_prefix="rankfeed-prefetch")
            self._pending[key] = self._pool.submit(self._load, key, load)
            return True

    def _load(self, key: Key, load: Load) -> Chunk:
        try:
            chunk = load(*key)
            self.insert(key, chunk)
            return chunk
        finally:
            with self._lock:
                self._pending.pop(key, None)
                deferred, self._deferred = self._deferred, {}
            try:
                for request in deferred.items():
                    self.prefetch(*request)
            except RuntimeError as error:  # the interpreter is about to exit
                reraise_interrupt(error)

    def insert(self, key: Key, chunk: Chunk, requests: int = 1) -> None:
        """Keep a chunk; one that was decoded on the way to another one has no ``requests``."""
        nbytes = sum(stored.nbytes for stored in chunk.values())
        rows = max(1, max((stored.rows for stored in chunk.values()), default=0))
        with self._lock:
            if key in self._entries:
                return
            # Earlier epochs do not count, but a chunk that was just read completely is expired.
            read = self._uncached_rows.pop(key, 0)
            used = read % rows or min(read, rows)
            self._entries[key] = _Entry(chunk, nbytes, rows, used, self._now, self._now, requests)
            self._entries.move_to_end(key, last=used < rows and requests > 0)
            self._bytes += nbytes
            self._largest = max(self._largest, nbytes)
            while self._bytes + self.reserved > self.max_bytes and len(self._entries) > 1:
                # The first of those that are not announced.
                victim = max(self._entries, key=self._next_use) if self._announced else next(iter(self._entries))
                is_expired = victim not in self._announced and self._entries[victim].is_expired(self._now)
                if self._bytes <= self.max_bytes and not is_expired:
                    break
                self._bytes -= self._entries.pop(victim).nbytes
                self._live_evictions += not is_expired
            is_thrashing = self._live_evictions == _WARN_EVICTIONS
            self._live_evictions += is_thrashing  # warn once
        if is_thrashing:
            warnings.warn(
                "the same data are decoded repeatedly: this order keeps more chunks in use than "
                f"cache_bytes={self.max_bytes} holds. Shuffle with a smaller window= or fewer lanes=, open "
                "the data with a larger cache_bytes=, or write them with smaller row groups or with rf.write.",
                stacklevel=2,
            )
