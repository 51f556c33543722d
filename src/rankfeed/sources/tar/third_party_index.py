"""Sample offsets in indexes of other tools (``X.tar.idx``, Energon's ``index.sqlite``), verified on use.

Such an index has only the offset of each sample. When a sample is first read, its headers are: at the offset there
must be a header of a sample with another key than the one before, all members up to the next offset must have that
key, and at the next offset another sample must begin. So an index that is outdated, incomplete or of another
archive is detected at the first wrong sample, at the cost of two more headers.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError, RankfeedError, SourceError
from rankfeed.sources.tar.headers import TarReader, Window
from rankfeed.sources.tar.scan import check_member, duplicate_extension, readable_key, split_name
from rankfeed.sources.tar.shard_list import load_description

Int64 = npt.NDArray[np.int64]

_MOST_BYTES = 1 << 28
_REMEDY = 'remove the index, create it again, or pass index="own"'


def find_offsets(tar: str, meta: str | None = None, name: str | None = None) -> tuple[Int64, str] | None:
    """Sample offsets of a shard from ``X.tar.idx``, or from the database in ``meta``; None if none are valid.

    Returns:
        int64 [samples + 1], the offsets and the end of the last sample; and the file they are from.
    """
    beside = tar + ".idx"
    try:
        if os.path.isfile(beside):
            size = os.path.getsize(beside)
            if 0 < size <= _MOST_BYTES and size % 8 == 0:
                offsets = np.fromfile(beside, "<u8").astype(np.int64)
                _check_offsets(offsets, tar, beside)
                return offsets, beside
        elif meta is not None and name is not None:
            database = Path(meta, "index.sqlite")
            found = _read_database(database, meta, name)
            if found is not None:
                _check_offsets(found, tar, str(database))
                return found, str(database)
    except (RankfeedError, OSError):
        return None
    return None


def _read_database(database: Path, meta: str, name: str) -> Int64 | None:
    if not database.is_file():
        return None
    names = list(load_description(Path(meta, ".info.json"), Path(meta, ".info.yaml"))["shard_counts"])
    try:
        connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            # Not a view: reading one runs its query, which may never end.
            kind = connection.execute("SELECT type FROM sqlite_master WHERE name = 'samples'").fetchone()
            if kind != ("table",):
                return None
            rows = connection.execute(
                "SELECT byte_offset, byte_size FROM samples WHERE tar_file_id = ? ORDER BY sample_index",
                (names.index(name),),
            ).fetchall()
        finally:
            connection.close()
        table = np.array(rows, np.int64).reshape(-1, 2)
    except (sqlite3.Error, ValueError, TypeError, OverflowError):
        return None
    return np.append(table[:, 0], table[-1].sum()) if len(table) else None


def _check_offsets(offsets: Int64, tar: str, source: str) -> None:
    """Check that offsets rise from the first sample of the shard to the end of the archive."""
    if len(offsets) < 1 or (len(offsets) == 1 and offsets[0] != 0):
        raise _mismatch("offsets of samples, and of the end", f"{len(offsets)} numbers", source)
    if offsets[0] < 0 or (offsets % 512).any() or (offsets[1:] <= offsets[:-1]).any():
        raise _mismatch("rising multiples of 512", "others", source)
    with Window(tar) as window:
        if offsets[-1] > window.size:
            raise _mismatch(f"offsets up to {window.size}, the size of {tar}", int(offsets[-1]), source)
        ahead = TarReader(window)
        if offsets[0] > 0:  # only members that are no samples may come before
            member = ahead.next()
            while member is not None and member.start < offsets[0] and split_name(member.name) is None:
                member = ahead.next()
            if member is None or member.start < offsets[0]:
                raise _mismatch("the first sample of the shard", f"offset {offsets[0]}", source)
        last = TarReader(window, int(offsets[-1]))
        while (member := last.next()) is not None:
            if split_name(member.name) is not None:
                raise _mismatch(f"the end of {tar}", f"a member at offset {member.start}", source)
        last.check_end()


class ThirdPartyIndex:
    """The index of a shard whose sample offsets are known and whose members are found when they are first read.

    Args:
        tar: path of the shard.
        offsets: int64 [samples + 1], from `find_offsets`.
        source: the file that they are from, for error messages.
        check: called after headers were read; raises if the shard was changed.
    """

    def __init__(self, tar: str, offsets: Int64, source: str, *, check: Callable[[], None]) -> None:
        self.offsets = offsets
        self._tar = tar
        self._source = source
        self._check = check
        #: The extensions that samples may have; None for any.
        self.allowed: frozenset[str] | None = None
        # Zeros take memory when they are first written: it grows with the samples that are read.
        self._known = np.zeros(len(offsets) - 1, bool)
        self._starts: dict[str, Int64] = {}
        #: One more than the size; 0 if there is no such member.
        self._sizes: dict[str, Int64] = {}

    def extensions_of(self, row: int) -> list[str]:
        """The extensions of a sample."""
        return list(self._members(row)[1])

    def locate(self, extension: str, rows: Int64) -> tuple[Int64, Int64]:
        """As `TarIndex.locate`; a CorruptError if the index is wrong about one of these samples."""
        unknown = np.unique(rows[~self._known[rows]])
        if len(unknown):
            with Window(self._tar) as window:
                for row in unknown.tolist():
                    self._read_headers(row, window)
            self._check()
        if extension not in self._sizes:
            return np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64)
        return self._starts[extension][rows], self._sizes[extension][rows] - 1

    def key_runs(self, rows: Int64) -> tuple[npt.NDArray[np.uint8], Int64, Int64]:
        """As `TarIndex.key_runs`, read from the headers."""
        keys = [self._members(row)[0] for row in rows.tolist()]
        lengths = np.array([len(key) for key in keys], np.int64)
        return np.frombuffer(b"".join(keys), np.uint8), np.cumsum(lengths) - lengths, lengths

    def key(self, row: int) -> str:
        """The key of a sample."""
        return self._members(row)[0].decode()

    def _read_headers(self, row: int, window: Window) -> None:
        """Read the headers of a sample and store where its members are.

        Threads may do this for the same sample at once: they write the same numbers, and ``_known`` last.
        """
        members = self._members(row, window)[1]
        if self.allowed is not None and not self.allowed.issuperset(members):
            raise SourceError(
                "a sample has a member that the probed samples lack",
                expected="members " + ", ".join(sorted(self.allowed)),
                found=", ".join(sorted(members.keys() - self.allowed)),
                where=f"{self._tar}, offset {self.offsets[row]}",
                remedy='pass index="own", which reads all headers; columns= or missing= say what to do',
            )
        for extension, (start, size) in members.items():
            if extension not in self._sizes:
                self._starts.setdefault(extension, np.zeros(len(self._known), np.int64))
                self._sizes.setdefault(extension, np.zeros(len(self._known), np.int64))
            self._starts[extension][row], self._sizes[extension][row] = start, size + 1
        self._known[row] = True

    def _members(self, row: int, window: Window | None = None) -> tuple[bytes, dict[str, tuple[int, int]]]:
        """The key of a sample, and offset and size of its members, verified."""
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
                    raise _mismatch(f"a sample at offset {last} of {self._tar}", f"one at {member.start}", where)
                following = parts[0]
                break
            if not members and member.start != first:
                raise _mismatch(f"a sample at offset {first} of {self._tar}", f"one at {member.start}", where)
            if members and parts[0] != key:
                raise _mismatch(f"one sample from offset {first} to {last}", f"another at {member.start}", where)
            check_member(member, parts[1], self._tar)
            if parts[1] in members:
                raise duplicate_extension(parts[1], members[parts[1]][0], member, self._tar)
            key, members[parts[1]] = parts[0], (member.data, member.size)
        if not members:
            raise _mismatch(f"a sample at offset {first} of {self._tar}", "none", where)
        if following == key or (row > 0 and _first_key(int(self.offsets[row - 1]), window) == key):
            raise _mismatch(f"all of sample {key!r} from offset {first} to {last}", "a part of it", where)
        if max(data + size for data, size in members.values()) > last:
            raise _mismatch(f"the end of sample {key!r}", f"offset {last}", where)
        return readable_key(key), members


def _first_key(offset: int, window: Window) -> bytes | None:
    reader = TarReader(window, offset)
    while (member := reader.next()) is not None:
        parts = split_name(member.name)
        if parts is not None:
            return parts[0]
    return None


def _mismatch(expected: str, found: object, where: str) -> CorruptError:
    return CorruptError(
        "the index of a tar shard does not match it", expected=expected, found=found, where=where, remedy=_REMEDY
    )
