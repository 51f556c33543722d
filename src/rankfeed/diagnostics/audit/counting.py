"""How often each of many keys comes, exactly, in bounded memory: dealt out to files by hash, sorted one by one.

All of a key's deliveries are in the file of its hash, so that each file can be counted alone; there are as many
files as it takes for one to fit. This is the partitioning of a Grace hash join (M. Kitsuregawa et al., 1983).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from rankfeed.diagnostics.keys import Words

#: Examples that are kept of what is wrong.
EXAMPLES = 8
#: How much more than the keys themselves counting them takes.
_OVERHEAD = 6
#: Files to write at once, at most.
_MOST_BITS = 9
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Count:
    """How often keys came in an epoch.

    Attributes:
        deliveries: all of them.
        unique: different keys.
        missing: keys that should have come and did not.
        unknown: keys that came and should not.
        repeated_keys: the first that came more than once; shape (k, 1) or (k, 2), and how often each: ``times``.
        missing_keys: the first that did not come.
        unknown_keys: the first that should not.
    """

    deliveries: int
    unique: int
    missing: int
    unknown: int
    repeated_keys: Words
    times: tuple[int, ...]
    missing_keys: Words
    unknown_keys: Words

    @classmethod
    def none(cls, width: int) -> Count:
        """Of no keys, of so many words."""
        keys = np.zeros((0, width), np.uint64)
        return cls(0, 0, 0, 0, keys, (), keys, keys)

    def plus(self, other: Count) -> Count:
        """Both together, where no key is in both."""
        return Count(
            self.deliveries + other.deliveries,
            self.unique + other.unique,
            self.missing + other.missing,
            self.unknown + other.unknown,
            _some(self.repeated_keys, other.repeated_keys),
            (*self.times, *other.times)[:EXAMPLES],
            _some(self.missing_keys, other.missing_keys),
            _some(self.unknown_keys, other.unknown_keys),
        )


def count(delivered: Words, expected: Words) -> Count:
    """Count keys.

    Args:
        delivered: as they came, in any order.
        expected: those that should come, sorted and each once, as `distinct` gives them.

    Examples:
        >>> words = lambda *keys: np.array(keys, np.uint64)[:, None]
        >>> found = count(words(5, 3, 5, 9), words(3, 4, 5))
        >>> found.deliveries, found.unique, found.missing, found.unknown
        (4, 3, 1, 1)
        >>> found.repeated_keys.tolist(), found.times, found.missing_keys.tolist(), found.unknown_keys.tolist()
        ([[5]], (2,), [[4]], [[9]])
    """
    keys, times = distinct(delivered)
    more = np.flatnonzero(times > 1)[:EXAMPLES]
    if np.array_equal(keys, expected):  # quicker to see, and mostly so
        missing = unknown = np.zeros(len(keys), bool)
    else:
        missing, unknown = ~is_in(expected, keys), ~is_in(keys, expected)
    return Count(
        len(delivered),
        len(keys),
        int(missing.sum()),
        int(unknown.sum()),
        keys[more],
        tuple(times[more].tolist()),
        expected[missing][:EXAMPLES],
        keys[unknown][:EXAMPLES],
    )


def distinct(words: Words) -> tuple[Words, npt.NDArray[np.int64]]:
    """Each key once, sorted, and how often it was there.

    Examples:
        >>> keys, times = distinct(np.array([[2, 1], [2, 0], [2, 1]], np.uint64))
        >>> keys.tolist(), times.tolist()
        ([[2, 0], [2, 1]], [1, 2])
    """
    if words.shape[1] == 1:
        ordered = np.sort(words[:, 0])[:, None]  # along one dimension: many times faster
    else:
        ordered = words[np.lexsort(words.T[::-1])]
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:, 0] != ordered[:-1, 0]
    for column in range(1, words.shape[1]):
        first[1:] |= ordered[1:, column] != ordered[:-1, column]
    starts = np.flatnonzero(first)
    return ordered[starts], np.diff(starts, append=len(ordered))


def is_in(words: Words, among: Words) -> npt.NDArray[np.bool_]:
    """Which keys are among others; ``among`` is sorted, each once."""
    if not len(among) or not len(words):
        return np.zeros(len(words), bool)
    wanted, known = _comparable(words), _comparable(among)
    places = np.searchsorted(known, wanted)
    found: npt.NDArray[np.bool_] = known[np.minimum(places, len(known) - 1)] == wanted
    return found


def _comparable(words: Words) -> npt.NDArray[np.void] | Words:
    """Keys as something that has an order in numpy: that of `distinct`."""
    if words.shape[1] == 1:
        return words[:, 0]
    return np.ascontiguousarray(words.astype(">u8")).view("S16")[:, 0]


def bits_for(keys: int, width: int, memory: int) -> int:
    """So many bits of a hash say which file a key is in.

    Args:
        keys: how many there are to be counted together.
        width: words of each.
        memory: bytes that counting a file may take.

    Examples:
        >>> bits_for(1000, 1, 1 << 20), bits_for(10**8, 1, 256 << 20)
        (0, 5)
    """
    files = -(-keys * width * 8 * _OVERHEAD // memory)
    return min(_MOST_BITS, max(0, files - 1).bit_length())


class Dealt:
    """Keys in files by their hashes.

    Args:
        folder: where the files are.
        name: what they begin with.
        width: words of a key.
        bits: of the hash that say which file.
    """

    def __init__(self, folder: Path, name: str, width: int, bits: int) -> None:
        self._folder, self._name, self._width, self._bits = folder, name, width, bits

    def deal(self, chunks: Iterable[Words]) -> None:
        """Write keys into their files.

        Raises:
            OSError: they cannot be written.
        """
        with ExitStack() as stack:
            files = [
                stack.enter_context(self._path(number).open("wb", buffering=0))
                for number in range(1 << self._bits)
            ]
            for words in chunks:
                if not self._bits:
                    _write(files[0], np.ascontiguousarray(words))
                    continue
                numbers = (words[:, 0] * _MIX >> np.uint64(64 - self._bits)).astype(np.uint16)
                ordered = words[np.argsort(numbers, kind="stable")]
                ends = np.cumsum(np.bincount(numbers, minlength=len(files))).tolist()
                for file, start, end in zip(files, [0, *ends], ends, strict=False):
                    if end > start:
                        _write(file, ordered[start:end])

    def read(self, number: int) -> Words:
        """The keys of a file, which is removed."""
        path = self._path(number)
        words = np.fromfile(path, np.uint64).reshape(-1, self._width)
        path.unlink()
        return words

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number:03d}"


def _write(file: BinaryIO, words: Words) -> None:
    """Write all of it: a disk that is about to be full takes a part, and says so at the next."""
    left = words.data.cast("B") if words.size else memoryview(b"")
    while left:
        left = left[file.write(left) :]


def _some(one: Words, other: Words) -> Words:
    return np.concatenate([one, other])[:EXAMPLES]
