"""Shards that somebody else has indexed: where each sample begins is given, the rest is found when it is read.

Such an index is never believed. A sample is checked when it is first read: at the offset given there has to be a
header, of a sample with another key than the one before; up to the next offset all members have that key; and at
the next offset another sample begins. So an index of another archive, one out of date, or one that leaves
something out is found out at the first sample that it has wrong, for the price of two more headers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.tar.headers import TarReader, Window
from rankfeed.sources.tar.scan import check_member, readable, split_name, two_alike

Int64 = npt.NDArray[np.int64]

REMEDY = 'remove the foreign index, make it anew, or pass index="own"'


def check_offsets(offsets: Int64, tar: str, source: str) -> None:
    """Look whether offsets can be those of a shard: rising from the first sample on to the end of the archive.

    Args:
        offsets: int64 [samples + 1].
        tar: path of the shard.
        source: where the offsets come from, for errors.

    Raises:
        CorruptError: they cannot; names what is wrong.
    """
    if len(offsets) < 1 or (len(offsets) == 1 and offsets[0] != 0):
        raise _wrong("offsets of samples, and of the end", f"{len(offsets)} numbers", source)
    if offsets[0] < 0 or (offsets % 512).any() or (offsets[1:] <= offsets[:-1]).any():
        raise _wrong("rising multiples of 512", "others", source)
    with Window(tar) as window:
        if offsets[-1] > window.size:
            raise _wrong(f"offsets up to {window.size}, the size of {tar}", int(offsets[-1]), source)
        ahead = TarReader(window)
        if offsets[0] > 0:  # what comes before the first sample is no sample
            member = ahead.next()
            while member is not None and member.start < offsets[0] and split_name(member.name) is None:
                member = ahead.next()
            if member is None or member.start < offsets[0]:
                raise _wrong("the first sample of the shard", f"offset {offsets[0]}", source)
        last = TarReader(window, int(offsets[-1]))
        while (member := last.next()) is not None:
            if split_name(member.name) is not None:
                raise _wrong(f"the end of {tar}", f"a member at offset {member.start}", source)
        last.check_end()


class LazyIndex:
    """Like a :class:`TarIndex`, of a shard whose samples' offsets are known.

    Args:
        tar: path of the shard.
        offsets: int64 [samples + 1], checked by :func:`check_offsets`.
        source: where they come from, for errors.
        check: called when the shard's headers were read: raises if it is another one than it was.
    """

    def __init__(self, tar: str, offsets: Int64, source: str, *, check: Callable[[], None]) -> None:
        self.offsets = offsets
        self._tar = tar
        self._source = source
        self._check = check
        #: The extensions that samples may have; None for any.
        self.allowed: frozenset[str] | None = None
        # Zeros are not resident until they are written: memory grows with the samples that are read.
        self._known = np.zeros(len(offsets) - 1, bool)
        self._starts: dict[str, Int64] = {}
        self._sizes: dict[str, Int64] = {}  # one more than the size; 0: no such member

    def extensions_of(self, row: int) -> dict[str, int]:
        """The extensions that a sample has, and how many bytes each."""
        members = self._members(row)[1]
        return {extension: size for extension, (_, size) in members.items()}

    def locate(self, extension: str, rows: Int64) -> tuple[Int64, Int64]:
        """As :meth:`TarIndex.locate`.

        Raises:
            CorruptError: the foreign index is wrong about one of these samples.
        """
        unknown = np.unique(rows[~self._known[rows]])
        if len(unknown):
            with Window(self._tar) as window:
                for row in unknown.tolist():
                    self._learn(row, window)
            self._check()
        if extension not in self._sizes:
            return np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64)
        return self._starts[extension][rows], self._sizes[extension][rows] - 1

    def key_runs(self, rows: Int64) -> tuple[npt.NDArray[np.uint8], Int64, Int64]:
        """As :meth:`TarIndex.key_runs`: read from the headers, so that nothing is kept."""
        keys = [self._members(row)[0] for row in rows.tolist()]
        lengths = np.array([len(key) for key in keys], np.int64)
        return np.frombuffer(b"".join(keys), np.uint8), np.cumsum(lengths) - lengths, lengths

    def key(self, row: int) -> str:
        """The key of a sample."""
        return self._members(row)[0].decode()

    # Threads may learn the same sample at once: they write the same numbers, and say last that they are there.
    def _learn(self, row: int, window: Window) -> None:
        """Read the headers of a sample, and remember where its members lie."""
        members = self._members(row, window)[1]
        if self.allowed is not None and not self.allowed.issuperset(members):
            raise SourceError(
                "a sample has a member that the samples which were looked at lack",
                expected="members " + ", ".join(sorted(self.allowed)),
                found=", ".join(sorted(members.keys() - self.allowed)),
                where=f"{self._tar}, offset {self.offsets[row]}",
                remedy='pass index="own", which looks at all samples; and columns= or missing= for what to do',
            )
        for extension, (start, size) in members.items():
            if extension not in self._sizes:
                self._starts.setdefault(extension, np.zeros(len(self._known), np.int64))
                self._sizes.setdefault(extension, np.zeros(len(self._known), np.int64))
            self._starts[extension][row], self._sizes[extension][row] = start, size + 1
        self._known[row] = True

    def _members(self, row: int, window: Window | None = None) -> tuple[bytes, dict[str, tuple[int, int]]]:
        """The key of a sample and its members' places, checked."""
        if window is None:
            with Window(self._tar) as opened:
                found = self._members(row, opened)
            self._check()
            return found
        first, last = self.offsets[row : row + 2].tolist()
        where = f"{self._source}, entry {row}"
        key, members = b"", dict[str, tuple[int, int]]()
        reader = TarReader(window, first)
        following: bytes | None = None
        while (member := reader.next()) is not None:
            parts = split_name(member.name)
            if parts is None:
                continue
            if member.start >= last:
                if row + 2 < len(self.offsets) and member.start != last:
                    raise _wrong(f"a sample at offset {last} of {self._tar}", f"one at {member.start}", where)
                following = parts[0]
                break
            if not members and member.start != first:
                raise _wrong(f"a sample at offset {first} of {self._tar}", f"one at {member.start}", where)
            if members and parts[0] != key:
                raise _wrong(f"one sample from offset {first} to {last}", f"another at {member.start}", where)
            check_member(member, parts[1], self._tar)
            if parts[1] in members:
                raise two_alike(parts[1], members[parts[1]][0], member, self._tar)
            key, members[parts[1]] = parts[0], (member.data, member.size)
        if not members:
            raise _wrong(f"a sample at offset {first} of {self._tar}", "none", where)
        if following == key or (row > 0 and self._first_key(int(self.offsets[row - 1]), window) == key):
            raise _wrong(f"all of sample {key!r} from offset {first} to {last}", "a part of it", where)
        if max(data + size for data, size in members.values()) > last:
            raise _wrong(f"the end of sample {key!r}", f"offset {last}", where)
        return readable(key), members

    def _first_key(self, offset: int, window: Window) -> bytes | None:
        reader = TarReader(window, int(offset))
        while (member := reader.next()) is not None:
            parts = split_name(member.name)
            if parts is not None:
                return parts[0]
        return None


def _wrong(expected: str, found: object, where: str) -> CorruptError:
    return CorruptError(
        "the index of a tar shard does not fit it", expected=expected, found=found, where=where, remedy=REMEDY
    )
