"""The multiset of the keys that a loader delivers: counted exactly, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from rankfeed.diagnostics.keys import Words
from rankfeed.plan.plan import Int64

#: Keys of each kind that are kept as examples.
EXAMPLES = 8
#: A file has this many partitions.
PARTITIONS = 512
#: Memory that counting takes, as a multiple of the keys themselves.
OVERHEAD = 6
#: Records that are kept in memory before they are written.
_BUFFER = 1 << 20
_MIX = np.uint64(0x9E3779B97F4A7C15)
#: Bits of a place: step, row and worker + 1 (0: unknown); larger rows and workers are not distinguished.
_ROW_BITS, _WORKER_BITS = 22, 10


def pack_places(step: int, rows: int, worker: int | None) -> Words:
    """Where each row of a batch was delivered, as one word that sorts by step and row."""
    numbers = np.minimum(np.arange(rows, dtype=np.uint64), np.uint64((1 << _ROW_BITS) - 1))
    number = 0 if worker is None else min(worker + 1, (1 << _WORKER_BITS) - 1)
    return (np.uint64(step << _ROW_BITS) + numbers << np.uint64(_WORKER_BITS)) + np.uint64(number)


def unpack_places(places: Words) -> tuple[Int64, Int64, Int64]:
    """Steps, rows and workers (-1: unknown)."""
    steps, rows = places >> np.uint64(_ROW_BITS + _WORKER_BITS), places >> np.uint64(_WORKER_BITS)
    rows, workers = rows & np.uint64((1 << _ROW_BITS) - 1), places & np.uint64((1 << _WORKER_BITS) - 1)
    return steps.astype(np.int64), rows.astype(np.int64), workers.astype(np.int64) - 1


@dataclass(frozen=True)
class KeyCounts:
    """How often keys were delivered."""

    deliveries: int
    unique: int
    missing: int
    unknown: int
    digest: int
    missing_digest: int
    missing_keys: Words
    unknown_keys: Words

    @classmethod
    def none(cls, width: int) -> KeyCounts:
        keys = np.empty((0, width), np.uint64)
        return cls(0, 0, 0, 0, 0, 0, keys, keys)

    def __add__(self, other: KeyCounts) -> KeyCounts:
        """The counts of both, which have no key in common."""
        return KeyCounts(
            self.deliveries + other.deliveries,
            self.unique + other.unique,
            self.missing + other.missing,
            self.unknown + other.unknown,
            (self.digest + other.digest) % (1 << 64),
            (self.missing_digest + other.missing_digest) % (1 << 64),
            np.concatenate([self.missing_keys, other.missing_keys])[:EXAMPLES],
            np.concatenate([self.unknown_keys, other.unknown_keys])[:EXAMPLES],
        )


def count(delivered: Words, expected: Words) -> KeyCounts:
    """Count keys."""
    keys, _ = distinct(delivered)
    if np.array_equal(keys, expected):  # common, and faster
        missing = unknown = np.zeros(len(keys), bool)
    else:
        missing, unknown = ~is_in(expected, keys), ~is_in(keys, expected)
    return KeyCounts(
        len(delivered),
        len(keys),
        int(missing.sum()),
        int(unknown.sum()),
        _digest(keys),
        _digest(expected[missing]),
        expected[missing][:EXAMPLES],
        keys[unknown][:EXAMPLES],
    )


def _digest(keys: Words) -> int:
    mixed = (keys[:, 0] ^ (keys[:, -1] >> np.uint64(7))) * _MIX
    return int(np.sum((mixed ^ (mixed >> np.uint64(29))) * _MIX, dtype=np.uint64))


@dataclass(frozen=True)
class Repeats:
    """All deliveries of the keys that were delivered more than once, sorted by key, place and rank."""

    keys: Words
    ranks: Int64
    places: Words

    @property
    def first(self) -> npt.NDArray[np.bool_]:
        """Which deliveries are the first of their key; all others are repeats."""
        return _starts(self.keys)

    @property
    def between_ranks(self) -> int:
        """Repeats of a key on another rank."""
        return len(distinct(self._with(self.ranks))[0]) - int(self.first.sum())

    @property
    def between_workers(self) -> int:
        """Repeats of a key in another worker of the same rank; unknown workers count as one."""
        _, _, workers = unpack_places(self.places)
        per_rank, _ = distinct(self._with(self.ranks))
        return len(distinct(self._with(self.ranks, workers))[0]) - len(per_rank)

    def _with(self, *columns: Int64) -> Words:
        return np.column_stack([self.keys, *(column.astype(np.uint64) for column in columns)])


def repeats(delivered: Words, places: Words, ranks: Int64) -> Repeats:
    """The deliveries of repeated keys."""
    keys, times = distinct(delivered)
    chosen = np.flatnonzero(is_in(delivered, keys[times > 1]))
    words, places, ranks = delivered[chosen], places[chosen], ranks[chosen]
    order = np.lexsort((ranks, places, *words.T[::-1]))
    return Repeats(words[order], ranks[order], places[order])


def distinct(words: Words) -> tuple[Words, Int64]:
    """Each key once, sorted, and how often it occurs."""
    if words.shape[1] == 1:
        ordered = np.sort(words[:, 0])[:, None]  # along one dimension: many times faster
    else:
        ordered = words[np.lexsort(words.T[::-1])]
    starts = np.flatnonzero(_starts(ordered))
    return ordered[starts], np.diff(starts, append=len(ordered))


def _starts(ordered: Words) -> npt.NDArray[np.bool_]:
    """Where another key begins."""
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:, 0] != ordered[:-1, 0]
    for column in range(1, ordered.shape[1]):
        first[1:] |= ordered[1:, column] != ordered[:-1, column]
    return first


def is_in(words: Words, among: Words) -> npt.NDArray[np.bool_]:
    """Which keys are among others; ``among`` is sorted, each once."""
    if not len(among) or not len(words):
        return np.zeros(len(words), bool)
    wanted, known = _comparable(words), _comparable(among)
    places = np.searchsorted(known, wanted)
    found: npt.NDArray[np.bool_] = known[np.minimum(places, len(known) - 1)] == wanted
    return found


def _comparable(words: Words) -> npt.NDArray[np.void] | Words:
    """Keys as scalars in the order of `distinct`."""
    if words.shape[1] == 1:
        return words[:, 0]
    return np.ascontiguousarray(words.astype(">u8")).view("S16")[:, 0]


@dataclass
class HashPartitions:
    """Records, partitioned by a hash of their first word; a file takes those that exceed the buffer."""

    path: Path
    columns: int
    memory: int = 256 << 20
    _buffer: Words = field(init=False, repr=False)
    _filled: int = field(default=0, init=False)
    _bounds: list[Int64] = field(default_factory=list, init=False, repr=False)
    _written: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        rows = min(_BUFFER, max(256, self.memory // (8 * self.columns * 2 * OVERHEAD)))
        self._buffer = np.empty((rows, self.columns), np.uint64)

    def __len__(self) -> int:
        """Number of records."""
        return self._written + self._filled

    def add(self, records: Words) -> None:
        """Add records, shape (n, columns)."""
        while len(records):
            part = records[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            records = records[len(part) :]
            if self._filled == len(self._buffer):
                self._write()

    def _write(self) -> None:
        records = self._buffer[: self._filled]
        numbers = _partition(records)
        ordered = records[np.argsort(numbers, kind="stable")]
        ends = np.cumsum(np.bincount(numbers, minlength=PARTITIONS))
        with self.path.open("ab", buffering=0) as file:
            _write_all(file, ordered)
        self._bounds.append(self._written + np.concatenate([[0], ends]))
        self._written, self._filled = self._written + len(records), 0

    def read(self, low: int, high: int) -> Words:
        """The records of the partitions from ``low`` to ``high``."""
        kept = self._buffer[: self._filled]
        if (low, high) != (0, PARTITIONS):
            numbers = _partition(kept)
            kept = kept[(numbers >= low) & (numbers < high)]
        if not self._bounds:
            return kept
        size = 8 * self.columns
        with self.path.open("rb") as file:
            parts = []
            for bounds in self._bounds:
                file.seek(int(bounds[low]) * size)
                parts.append(np.fromfile(file, np.uint64, int(bounds[high] - bounds[low]) * self.columns))
        return np.concatenate([kept, *(part.reshape(-1, self.columns) for part in parts)])


def partition_ranges(records: int, columns: int, memory: int) -> Sequence[tuple[int, int]]:
    """Ranges of partitions that can be counted in the given memory, one after the other."""
    rounds = -(-records * columns * 8 * OVERHEAD // memory)
    width = max(1, PARTITIONS // max(1, rounds))
    return [(low, min(low + width, PARTITIONS)) for low in range(0, PARTITIONS, width)]


def _partition(records: Words) -> npt.NDArray[np.uint16]:
    hashes: npt.NDArray[np.uint16] = (records[:, 0] * _MIX >> np.uint64(64 - PARTITIONS.bit_length() + 1)).astype(
        np.uint16
    )
    return hashes


def _write_all(file: BinaryIO, records: Words) -> None:
    """A write to a disk that is almost full is incomplete; the next one raises."""
    left = np.ascontiguousarray(records).data.cast("B")
    while left:
        left = left[file.write(left) :]
