"""The multiset of the keys that a loader delivers: counted exactly, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.diagnostics.keys import KeyArray
from rankfeed.plan.plan import Int64

#: Keys of each kind that are kept as examples, and places of each.
EXAMPLES, _PLACES = 8, 4
#: A file has this many partitions.
PARTITIONS = 512
#: Memory that counting takes, as a multiple of the records themselves.
OVERHEAD = 6
#: Records that are kept in memory before they are written.
_BUFFER = 1 << 20
_MIX = np.uint64(0x9E3779B97F4A7C15)

#: Deliveries: key, step, row and worker (-1: unknown); of expected keys nothing but the key.
Records = npt.NDArray[np.void]


def records_of(keys: KeyArray, step: int = 0, worker: int | None = None) -> Records:
    """The deliveries of a batch."""
    records = np.empty(len(keys), [("key", keys.dtype), ("step", "u4"), ("row", "u4"), ("worker", "i2")])
    records["key"], records["step"], records["row"] = keys, step, np.arange(len(keys))
    records["worker"] = -1 if worker is None else worker
    return records


def joined(parts: Iterable[Records]) -> Records:
    """All records, of which no two parts have keys of different types unless they are empty."""
    filled = [part for part in parts if len(part)] or [records_of(np.empty(0, np.int64))]
    return np.concatenate([_whole(part) for part in filled]).view(filled[0].dtype)


def _whole(records: Records) -> npt.NDArray[np.void]:
    """The same records without fields, which NumPy copies each by itself, in several times the time."""
    return records.view(f"V{records.itemsize}")


@dataclass
class KeyCounts:
    """How often keys were delivered; counts of different keys can be added."""

    deliveries: int = 0
    unique: int = 0
    missing: int = 0
    unknown: int = 0
    digest: int = 0
    missing_digest: int = 0
    #: Repeats of a key on another rank, and in another worker of the same rank; unknown workers count as one.
    between_ranks: int = 0
    between_workers: int = 0
    #: Deliveries of keys that had been delivered before: by rank and interval of steps, and in a rank's last step.
    repeated: Counter[tuple[int, int]] = field(default_factory=Counter)
    repeated_at_end: Counter[int] = field(default_factory=Counter)
    #: Examples; of repeated keys with the number of deliveries and the first places (rank, worker, step, row).
    missing_keys: list[Any] = field(default_factory=list)
    unknown_keys: list[Any] = field(default_factory=list)
    repeated_keys: list[tuple[Any, int, list[tuple[int, ...]]]] = field(default_factory=list)

    def __add__(self, other: KeyCounts) -> KeyCounts:
        return KeyCounts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def distinct(keys: KeyArray) -> KeyArray:
    """Each key once, sorted."""
    return np.unique(keys, return_counts=True)[0]  # sorts, which is faster than hashing


def count(
    records: Records, ranks: Int64, expected: KeyArray, *, last_steps: Int64, interval: int = 1
) -> KeyCounts:
    """Count deliveries; expected keys are `distinct`, ranks are of each delivery, last steps of each rank."""
    keys, times = np.unique(records["key"], return_counts=True)
    places = _find(keys, expected)
    is_missing, is_known = np.ones(len(expected), bool), places >= 0
    is_missing[places[is_known]] = False
    missing, unknown = expected[is_missing], keys[~is_known]
    counts = KeyCounts(len(records), len(keys), len(missing), len(unknown), _digest(keys), _digest(missing))
    counts.missing_keys, counts.unknown_keys = missing[:EXAMPLES].tolist(), unknown[:EXAMPLES].tolist()
    if len(keys) == len(records):
        return counts
    keys = keys[times > 1]
    numbers = _find(records["key"], keys)
    chosen = np.flatnonzero(numbers >= 0)
    order = chosen[np.lexsort((ranks[chosen], records["row"][chosen], records["step"][chosen], numbers[chosen]))]
    numbers, ranks = numbers[order], ranks[order]
    steps, rows, workers = (records[name][order].astype(np.int64) for name in ("step", "row", "worker"))
    by_rank = numbers * len(last_steps) + ranks
    by_worker = by_rank * (workers.max() + 2) + workers + 1
    counts.between_ranks = len(np.unique(by_rank)) - len(keys)
    counts.between_workers = len(np.unique(by_worker)) - len(np.unique(by_rank))
    starts = np.searchsorted(numbers, np.arange(len(keys) + 1))
    again = np.ones(len(numbers), bool)
    again[starts[:-1]] = False
    places, times = np.unique(ranks[again] << 32 | steps[again] // interval, return_counts=True)
    counts.repeated.update(
        {divmod(place, 1 << 32): number for place, number in zip(places.tolist(), times.tolist(), strict=True)}
    )
    at_end, times = np.unique(ranks[again & (steps == last_steps[ranks])], return_counts=True)
    counts.repeated_at_end.update(dict(zip(at_end.tolist(), times.tolist(), strict=True)))
    for key, start, end in zip(keys[:EXAMPLES].tolist(), starts.tolist(), starts[1:].tolist(), strict=False):
        first = slice(start, min(end, start + _PLACES))
        at = [each[first].tolist() for each in (ranks, workers, steps, rows)]
        counts.repeated_keys.append((key, end - start, [*zip(*at, strict=True)]))
    return counts


def _find(keys: KeyArray, among: KeyArray) -> Int64:
    """Where each key is among others, which are sorted; -1: nowhere."""
    if not len(among):
        return np.full(len(keys), -1)
    places = np.searchsorted(among, keys).clip(max=len(among) - 1)
    return np.where(among[places] == keys, places, -1)


def _digest(keys: KeyArray) -> int:
    mixed = (_first_words(keys) + _MIX) * _MIX  # no small number is 0
    return int(np.sum((mixed ^ (mixed >> np.uint64(29))) * _MIX, dtype=np.uint64))


def _partition(keys: KeyArray) -> npt.NDArray[np.uint16]:
    return (_first_words(keys) * _MIX >> np.uint64(64 - PARTITIONS.bit_length() + 1)).astype(np.uint16)


def _first_words(keys: KeyArray) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64)[:: keys.itemsize // 8]


class HashPartitions:
    """Records, partitioned by a hash of their key; a file takes those that exceed the buffer."""

    def __init__(self, path: Path, memory: int = 256 << 20) -> None:
        self._path, self._memory = path, memory
        self._buffer = records_of(np.empty(0, np.int64))
        self._filled = self._written = 0
        #: Of each part of the file, where its partitions begin and end.
        self._bounds: list[Int64] = []

    def __len__(self) -> int:
        """Number of records."""
        return self._written + self._filled

    @property
    def size(self) -> int:
        """Bytes of the records."""
        return len(self) * self._buffer.itemsize

    def add(self, records: Records) -> None:
        """Add records, all with keys of one type."""
        if not len(self):
            rows = min(_BUFFER, max(256, self._memory // (records.itemsize * 2 * OVERHEAD)))
            self._buffer = np.empty(rows, records.dtype)
        while len(records):
            part = records[: len(self._buffer) - self._filled]
            _whole(self._buffer)[self._filled : self._filled + len(part)] = _whole(part)
            self._filled += len(part)
            records = records[len(part) :]
            if self._filled == len(self._buffer):
                self._write()

    def _write(self) -> None:
        numbers = _partition(self._buffer["key"])
        ends = np.cumsum(np.bincount(numbers, minlength=PARTITIONS))
        with self._path.open("ab") as file:
            file.write(self._buffer.take(np.argsort(numbers, kind="stable")).data)
        self._bounds.append(self._written + np.concatenate([[0], ends]))
        self._written, self._filled = len(self), 0

    def read(self, low: int, high: int) -> Records:
        """The records of the partitions from ``low`` to ``high``."""
        kept = self._buffer[: self._filled]
        numbers = _partition(kept["key"])
        parts = [_whole(kept)[(numbers >= low) & (numbers < high)]]
        for bounds in self._bounds:
            start, end = bounds[[low, high]].tolist()
            parts.append(np.fromfile(self._path, parts[0].dtype, end - start, offset=start * kept.itemsize))
        return np.concatenate(parts).view(kept.dtype)


def partition_ranges(size: int, memory: int) -> Sequence[tuple[int, int]]:
    """Ranges of partitions of records of this size that can be counted in the given memory, one after another."""
    rounds = -(-size * OVERHEAD // memory)
    width = max(1, PARTITIONS // max(1, rounds))
    return [(low, min(low + width, PARTITIONS)) for low in range(0, PARTITIONS, width)]
