"""Base of sources that decode a chunk of rows at a time: row groups, ranges of a fragment, compressed shards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_int
from rankfeed.columns import ColumnBuffer, Columns, column_from_parts
from rankfeed.sources.chunk_cache import Chunk, ChunkCache
from rankfeed.sources.source import Int64, Source, by_chunk, check_columns, check_ids, starts_of

#: Decoded bytes that a process keeps of one source.
CACHE_BYTES = 1 << 30
#: Bytes of a window for data larger than that: 64 lanes each have a window and one or two chunks in use.
_WINDOW_BYTES = 2 << 20
#: Chunks to announce ahead: while one is read, the next ones are decoded.
_CHUNKS_AHEAD = 4


class ChunkedSource(Source):
    """A source that decodes whole chunks and caches those used last.

    A subclass calls ``_init_chunks`` and implements ``fields``, ``fingerprint``, ``blocks`` and ``_load_chunk``;
    ``_take`` too if it can read single rows cheaply.
    """

    default_shuffle: ClassVar[Literal["global", "window"]] = "window"
    #: Attributes that are not pickled, besides the cache.
    _transient: ClassVar[tuple[str, ...]] = ()

    def _init_chunks(
        self, rows_per_chunk: Sequence[int] | Int64, cache_bytes: int = CACHE_BYTES, *, data_bytes: int = 0
    ) -> None:
        """Define the chunks in the order of sample ids.

        ``data_bytes``, the approximate decoded size of the dataset (0 if unknown), decides the default window. The
        window is part of the order, so it depends on the data alone, not on columns or cache.
        """
        self._chunk_starts = starts_of(rows_per_chunk)
        self._cache_bytes = check_int("cache_bytes", cache_bytes, at_least=0)
        self._cache = ChunkCache(self._cache_bytes)
        rows = int(self._chunk_starts[-1])
        self.prefetch_distance = max(1, _CHUNKS_AHEAD * rows // max(1, len(rows_per_chunk)))
        if data_bytes > CACHE_BYTES // 2:
            self.best_window = max(1, _WINDOW_BYTES * rows // data_bytes)

    @abstractmethod
    def _load_chunk(self, number: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        """Decode some columns of a chunk, in any thread of the reading process."""

    def _take(self, ids: Int64, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        """Read single rows; ``ids`` are sorted and unique. Optional."""
        raise NotImplementedError

    def _num_samples(self) -> int:
        return int(self._chunk_starts[-1])

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        ids = check_ids(sample_ids, len(self))
        names = tuple(check_columns(columns, self.fields))
        parts: dict[str, list[Any]] = {name: [] for name in names}
        single: list[tuple[Int64, Int64 | None]] = []
        can_take = type(self)._take is not ChunkedSource._take
        wanted = by_chunk(ids, self._chunk_starts)
        cached = self._cache.find(
            [(number, names) for number, _, _ in wanted], [len(rows) for _, rows, _ in wanted]
        )
        for (number, rows, slots), chunk in zip(wanted, cached, strict=True):
            if chunk is None and can_take and not self._cache.has_room:
                single.append((rows + self._chunk_starts[number], slots))
                continue
            loaded = chunk or self._cache.get((number, names), self._loader(number, names))
            for name in names:
                parts[name].append(loaded[name].part(rows, slots))
        if single:
            self._add_single(single, names, parts)
        fields = self.fields
        return Columns({name: column_from_parts(fields[name], parts[name]) for name in names}, len(ids))

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        names = tuple(check_columns(columns, self.fields))
        chunks = self._chunk_starts.searchsorted(check_ids(sample_ids, len(self)), side="right") - 1
        # Most batches lie in one chunk.
        some = chunks[:1] if (chunks == chunks[:1]).all() else np.unique(chunks)
        for key in self._cache.missing([(number, names) for number in some.tolist()]):
            self._cache.prefetch(key, self._loader(*key))

    def _chunk(self, number: int, names: tuple[str, ...], used: int) -> Chunk:
        """A chunk, of which ``used`` rows are read now."""
        (cached,) = self._cache.find([(number, names)], [used])
        return cached or self._cache.get((number, names), self._loader(number, names))

    def _loader(self, number: int, names: tuple[str, ...]) -> Callable[[], Chunk]:
        return lambda: self._load_chunk(number, names)

    def _add_single(
        self, single: list[tuple[Int64, Int64 | None]], names: tuple[str, ...], parts: dict[str, list[Any]]
    ) -> None:
        """Read rows of chunks that are not worth decoding, in one call."""
        unique, places = np.unique(np.concatenate([ids for ids, _ in single]), return_inverse=True)
        slots = (
            None if single[0][1] is None else np.concatenate([slots for _, slots in single if slots is not None])
        )
        taken = self._take(unique, names)
        for name in names:
            parts[name].append(taken[name].part(places, slots))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_cache", *self._transient)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _cache=ChunkCache(state["_cache_bytes"]))
        self.__dict__.update(dict.fromkeys(self._transient))
