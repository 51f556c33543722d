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
from rankfeed.sources.source import starts_of

#: Keys of each kind that are kept as examples, and places of each.
EXAMPLES, _PLACES = 8, 4
#: A file has this many partitions.
PARTITIONS = 512
#: Memory that counting takes, as a multiple of keys and numbers themselves.
OVERHEAD = 6
#: Keys kept in memory before they are written, few enough to be sorted in the cache; the type of their numbers.
_BUFFER, _NUMBER = 1 << 17, np.dtype(np.uint32)
_MIX = np.uint64(0x9E3779B97F4A7C15)
#: Numbers that several passes over them find in the cache.
_IN_CACHE = 1 << 14


@dataclass(frozen=True)
class StepLog:
    """Where the deliveries of a rank are: of each step the first one, and the worker (-1: unknown)."""

    starts: Int64  # int64 [steps + 1]
    workers: npt.NDArray[np.int16]
    digests: npt.NDArray[np.uint64]  # of the keys of each step

    @classmethod
    def of(cls, sizes: npt.ArrayLike, workers: npt.ArrayLike, digests: npt.ArrayLike) -> StepLog:
        """Of the number of deliveries, the worker, and a digest of the keys, of each step."""
        starts = starts_of(np.asarray(sizes, np.int64))
        return cls(starts, np.asarray(workers, np.int16), np.asarray(digests, np.uint64))


def repeated_batches(logs: Sequence[StepLog]) -> int:
    """Deliveries in batches that were delivered before as they are, on this or another rank."""
    sizes = np.concatenate([np.diff(log.starts) for log in logs])
    _, first = np.unique(np.concatenate([log.digests for log in logs]), return_index=True)
    return int(sizes.sum() - sizes[first].sum())


@dataclass(frozen=True)
class Keys:
    """Keys of some deliveries of a rank, and their numbers (empty for expected keys), counted from its first."""

    keys: KeyArray
    numbers: Int64


@dataclass
class KeyCounts:
    """How often keys were delivered; counts of different keys can be added."""

    deliveries: int = 0
    unique: int = 0
    #: Deliveries beyond the first of a key that is expected several times.
    duplicates: int = 0
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
    return _distinct_and_repeated(keys)[0]


def _distinct_and_repeated(keys: KeyArray) -> tuple[KeyArray, KeyArray]:
    """Each key once, and each of those that occur more than once, both sorted."""
    ordered = np.sort(keys)  # faster than hashing, as `np.unique` does
    again = ordered[1:] == ordered[:-1]
    if not again.any():
        return ordered, ordered[:0]
    return np.delete(ordered, np.flatnonzero(again)), distinct(ordered[1:][again])


def joined(parts: Iterable[KeyArray]) -> KeyArray:
    """All keys, of which no two parts have different types unless they are empty."""
    return np.concatenate([part for part in parts if len(part)] or [np.empty(0, np.int64)])


def count(
    delivered: Sequence[Keys],
    logs: Sequence[StepLog],
    expected: KeyArray,
    times: Int64 | None = None,
    *,
    interval: int = 1,
) -> KeyCounts:
    """Count the deliveries of all ranks.

    Expected keys are `distinct`; ``times`` (int64 [keys], at least 1) says how often each is expected, once by
    default. A key that is not expected may be delivered once without counting as repeated.
    """
    keys = joined(part.keys for part in delivered)
    unique, repeated = _distinct_and_repeated(keys)
    places = _find(unique, expected)
    is_known = places >= 0
    lack = np.ones(len(expected), np.int64) if times is None else times.copy()
    if times is None:
        lack[places[is_known]] = 0
    else:
        lack -= np.bincount(_find(keys, expected) + 1, minlength=len(expected) + 1)[1:]
    missing, unknown = expected[lack > 0], unique[~is_known]
    counts = KeyCounts(len(keys), len(unique), missing=int(lack.clip(0).sum()), unknown=len(unknown))
    counts.digest, counts.missing_digest = _digest(unique), _digest(missing)
    counts.missing_keys, counts.unknown_keys = missing[:EXAMPLES].tolist(), unknown[:EXAMPLES].tolist()
    allowed = np.ones(len(repeated), np.int64)
    if times is not None:
        known = _find(repeated, expected)
        allowed = np.where(known >= 0, times[known], 1)
    if len(repeated):
        _locate(counts, repeated, allowed, delivered, logs, interval)
    return counts


def _locate(
    counts: KeyCounts,
    repeated: KeyArray,
    allowed: Int64,
    delivered: Sequence[Keys],
    logs: Sequence[StepLog],
    interval: int,
) -> None:
    """Count where repeated keys were delivered beyond the deliveries that are allowed of each."""
    places_by_rank = []
    for rank, (part, log) in enumerate(zip(delivered, logs, strict=True)):
        keys = _find(part.keys, repeated)
        chosen = np.flatnonzero(keys >= 0)
        numbers = part.numbers[chosen]
        steps = np.searchsorted(log.starts, numbers, side="right") - 1
        rows, workers = numbers - log.starts[steps], log.workers[steps].astype(np.int64)
        places_by_rank.append(np.stack([np.full(len(chosen), rank), rows, steps, keys[chosen], workers]))
    places = np.concatenate(places_by_rank, axis=1)
    ranks, rows, steps, keys, workers = places[:, np.lexsort(places[:4])]
    starts = np.searchsorted(keys, np.arange(len(repeated) + 1))
    times = np.diff(starts)
    excess = (times - allowed).clip(0)
    counts.duplicates = int((times - 1 - excess).sum())
    # A delivery too many is in a worker, between the workers of a rank, or between ranks.
    by_rank = keys * len(logs) + ranks
    within_ranks = _excess_within(by_rank, len(logs), allowed)
    places_of_rank = int(workers.max()) + 2
    within_workers = _excess_within(by_rank * places_of_rank + workers + 1, len(logs) * places_of_rank, allowed)
    counts.between_ranks = int(excess.sum()) - within_ranks
    counts.between_workers = within_ranks - within_workers
    again = np.arange(len(keys)) - starts[keys] >= allowed[keys]
    parts, times = np.unique(ranks[again] << 32 | steps[again] // interval, return_counts=True)
    for part, deliveries in zip(parts.tolist(), times.tolist(), strict=True):
        counts.repeated[divmod(part, 1 << 32)] = deliveries
    last_steps = np.array([len(log.workers) - 1 for log in logs])
    counts.repeated_at_end.update(ranks[again & (steps == last_steps[ranks])].tolist())
    for key in np.flatnonzero(excess)[:EXAMPLES].tolist():
        start, end = starts[key : key + 2].tolist()
        first = slice(start, min(end, start + _PLACES))
        at = [column[first].tolist() for column in (ranks, workers, steps, rows)]
        counts.repeated_keys.append((repeated[key].item(), end - start, [*zip(*at, strict=True)]))


def _excess_within(groups: Int64, groups_of_key: int, allowed: Int64) -> int:
    """Deliveries of a key in one group beyond the allowed ones; group g belongs to key g // groups_of_key."""
    group, times = np.unique(groups, return_counts=True)
    return int((times - allowed[group // groups_of_key]).clip(0).sum())


def _find(keys: KeyArray, among: KeyArray) -> Int64:
    """Where each key is among others, which are sorted; -1: nowhere."""
    if not len(among):
        return np.full(len(keys), -1)
    if np.array_equal(keys, among):
        return np.arange(len(keys))
    places = np.searchsorted(among, keys).clip(max=len(among) - 1)
    return np.where(among[places] == keys, places, -1)


def _digest(keys: KeyArray) -> int:
    words, total = _first_words(keys), np.uint64(0)
    for start in range(0, len(words), _IN_CACHE):
        mixed = words[start : start + _IN_CACHE] + _MIX  # no small number is 0
        mixed *= _MIX
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MIX
        total = np.add(total, np.sum(mixed, dtype=np.uint64), dtype=np.uint64)
    return int(total)


def _partition(keys: KeyArray) -> npt.NDArray[np.uint16]:
    return (_first_words(keys) * _MIX >> np.uint64(64 - PARTITIONS.bit_length() + 1)).astype(np.uint16)


def _first_words(keys: KeyArray) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64)[:: keys.itemsize // 8]


class HashPartitions:
    """Keys, partitioned by a hash, with their numbers if `numbered`; a file takes those that exceed the buffer."""

    def __init__(self, path: Path, memory: int = 256 << 20, *, numbered: bool = False) -> None:
        self._path, self._memory, self._numbered = path, memory, numbered
        self._buffer: KeyArray = np.empty(0, np.int64)
        self._item_bytes = self._filled = self._written = 0
        #: Of each part of the file, where its partitions begin and end.
        self._bounds: list[Int64] = []

    def __len__(self) -> int:
        """Number of keys."""
        return self._written + self._filled

    @property
    def size(self) -> int:
        """Bytes of keys and numbers."""
        return len(self) * self._item_bytes

    def add(self, keys: KeyArray) -> None:
        """Add keys, all of one type."""
        if not len(self):
            self._item_bytes = keys.itemsize + self._numbered * _NUMBER.itemsize
            rows = min(_BUFFER, max(256, self._memory // (self._item_bytes * 2 * OVERHEAD)))
            self._buffer = np.empty(rows, keys.dtype)
        while len(keys):
            part = keys[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            keys = keys[len(part) :]
            if self._filled == len(self._buffer):
                self._write()

    def _write(self) -> None:
        numbers = _partition(self._buffer)
        ends, order = np.cumsum(np.bincount(numbers, minlength=PARTITIONS)), np.argsort(numbers, kind="stable")
        with self._path.open("ab") as file:
            file.write(self._buffer.take(order).data)
            if self._numbered:
                file.write(order.astype(_NUMBER).data)  # within the part
        self._bounds.append(self._written + np.concatenate([[0], ends]))
        self._written, self._filled = len(self), 0

    def read(self, low: int, high: int) -> Keys:
        """The keys of the partitions from ``low`` to ``high``."""
        kept = self._buffer[: self._filled]
        partitions = _partition(kept)
        chosen = np.flatnonzero((partitions >= low) & (partitions < high))
        end = len(chosen) + sum(int(bounds[high] - bounds[low]) for bounds in self._bounds)
        keys, numbers = np.empty(end, kept.dtype), np.empty(end if self._numbered else 0, np.int64)
        columns = [(keys, kept.dtype), (numbers, _NUMBER)][: 1 + self._numbered]
        for bounds in self._bounds:
            first, start, stop, last = bounds[[0, low, high, -1]].tolist()
            offset, rows = first * self._item_bytes, slice(end - (stop - start), end)
            for values, dtype in columns:
                at = offset + (start - first) * dtype.itemsize
                values[rows] = np.fromfile(self._path, dtype, stop - start, offset=at)
                offset += (last - first) * dtype.itemsize
            numbers[rows] += first
            end = rows.start
        keys[:end], numbers[:end] = kept[chosen], self._written + chosen[: len(numbers)]
        return Keys(keys, numbers)


def partition_ranges(size: int, memory: int) -> Sequence[tuple[int, int]]:
    """Ranges of partitions of this size in all that can be counted in the given memory, one after another."""
    rounds = -(-size * OVERHEAD // memory)
    width = max(1, PARTITIONS // max(1, rounds))
    return [(low, min(low + width, PARTITIONS)) for low in range(0, PARTITIONS, width)]
