"""Sources whose rows are decoded a chunk at a time: row groups, ranges of a fragment, compressed shards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_int
from rankfeed.columns import ColumnBuffer, Columns, column_from_parts
from rankfeed.sources.chunk_cache import Chunk, ChunkCache
from rankfeed.sources.source import Int64, Source, by_chunk, check_columns, check_ids

#: Decoded bytes that a process keeps of one source.
CACHE_BYTES = 1 << 30
#: Of a window that suits data larger than that: 64 lanes have such a window and a chunk or two open at a time.
_WINDOW_BYTES = 2 << 20


class ChunkedSource(Source):
    """A source that decodes chunks whole and keeps those used last.

    To add one, call ``_init_chunks`` in the initialiser and give ``fields``, ``fingerprint``, ``blocks`` and
    ``_load_chunk``; where single rows can be read cheaply, ``_take`` as well.
    """

    default_shuffle: ClassVar[Literal["global", "window"]] = "window"
    #: What does not travel to other processes, besides the cache: handles, say.
    _transient: ClassVar[tuple[str, ...]] = ()

    def _init_chunks(
        self, rows_per_chunk: Sequence[int] | Int64, cache_bytes: int = CACHE_BYTES, *, data_bytes: int = 0
    ) -> None:
        """Say how the rows fall into chunks, in the order of sample ids.

        Args:
            rows_per_chunk: int64 [chunks].
            cache_bytes: decoded bytes to keep.
            data_bytes: of the whole data set, decoded, about; 0 where nobody knows. It decides on the window
                that suits, which is part of the order: so it depends on the data alone, not on what is read of
                them nor on the cache.
        """
        self._chunk_starts = np.zeros(len(rows_per_chunk) + 1, np.int64)
        np.cumsum(np.asarray(rows_per_chunk, np.int64), out=self._chunk_starts[1:])
        self._cache_bytes = check_int("cache_bytes", cache_bytes, at_least=0)
        self._cache = ChunkCache(self._cache_bytes)
        rows = int(self._chunk_starts[-1])
        # Four chunks: while one is used up the next are decoded, side by side.
        self.looks_ahead = max(1, 4 * rows // max(1, len(rows_per_chunk)))
        if data_bytes > CACHE_BYTES // 2:
            self.best_window = max(1, _WINDOW_BYTES * rows // data_bytes)

    @abstractmethod
    def _load_chunk(self, number: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        """Decode some columns of a chunk. Called in any thread of the process that reads.

        Raises:
            RankfeedError: it cannot be read; names the place.
        """

    def _take(self, ids: Int64, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        """Some columns of single rows, for formats that can: ``ids`` are sorted, none twice."""
        raise NotImplementedError

    def _num_samples(self) -> int:
        return int(self._chunk_starts[-1])

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples: pointers into decoded chunks.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or the data cannot be read.
            CorruptError: they are damaged.
        """
        ids = check_ids(sample_ids, len(self))
        names = tuple(check_columns(columns, self.fields))
        parts: dict[str, list[Any]] = {name: [] for name in names}
        single: list[tuple[Int64, Int64 | None]] = []
        takes = type(self)._take is not ChunkedSource._take
        wanted = by_chunk(ids, self._chunk_starts)
        found = self._cache.find(
            [(number, names) for number, _, _ in wanted], [len(rows) for _, rows, _ in wanted]
        )
        for (number, rows, slots), chunk in zip(wanted, found, strict=True):
            if chunk is None and takes and not self._cache.has_room:
                single.append((rows + self._chunk_starts[number], slots))
                continue
            at_hand = chunk or self._cache.get((number, names), self._loader(number, names))
            for name in names:
                parts[name].append(at_hand[name].part(rows, slots))
        if single:
            self._add_single(single, names, parts)
        fields = self.fields
        return Columns({name: column_from_parts(fields[name], parts[name]) for name in names}, len(ids))

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """Decode what will be read next, in the background."""
        names = tuple(check_columns(columns, self.fields))
        chunks = self._chunk_starts.searchsorted(check_ids(sample_ids, len(self)), side="right") - 1
        # Most batches lie in one chunk.
        some = chunks[:1] if (chunks == chunks[:1]).all() else np.unique(chunks)
        for key in self._cache.missing([(number, names) for number in some.tolist()]):
            self._cache.ahead(key, self._loader(*key))

    def _chunk(self, number: int, names: tuple[str, ...], used: int) -> Chunk:
        """A chunk, decoded if it has to be; ``used`` of its rows are read now."""
        (found,) = self._cache.find([(number, names)], [used])
        return found or self._cache.get((number, names), self._loader(number, names))

    def _loader(self, number: int, names: tuple[str, ...]) -> Callable[[], Chunk]:
        return lambda: self._load_chunk(number, names)

    def _add_single(
        self, single: list[tuple[Int64, Int64 | None]], names: tuple[str, ...], parts: dict[str, list[Any]]
    ) -> None:
        """Rows of chunks that are not worth reading whole, in one call."""
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
