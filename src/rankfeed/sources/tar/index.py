"""The index of a tar shard: which samples it holds and where the members of each lie.

Others' ``.tar.idx`` (where each sample begins) tells neither where members lie nor which archive it belongs to; so
an index of ours is a file of its own, ``X.tar.rankfeed``: 32 bytes of magic, lengths and the checksum of what
follows, a JSON header, and arrays one behind the other, which are memory-mapped. Members are sorted by extension,
so that the places of a column are one run of each array, and a batch finds its rows by numpy's indexing alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from rankfeed.storage.decodable import decodable

Int64 = npt.NDArray[np.int64]
Bytes8 = npt.NDArray[np.uint8]

_MAGIC = b"RFTARIX2"
#: Magic, lengths of the JSON header (4 bytes) and of the arrays (8), checksums of the header and of all behind.
_PREFIX = 32
#: Longest JSON header that is believed.
_LONGEST = 1 << 26


@decodable
class Extension(msgspec.Struct, frozen=True, array_like=True):
    """The members of one extension in a shard: how many, and the sizes of the smallest, the largest and all."""

    name: str
    count: int
    smallest: int
    largest: int
    nbytes: int


@decodable
class Summary(msgspec.Struct, frozen=True):
    """What is said of a shard without looking at its samples.

    Args:
        tar_bytes, tar_mtime_ns: of the archive that was indexed.
        samples: how many it has.
        key_bytes: length of all keys.
        end: offset behind the last member.
        offsets_digest: checksum of where each sample begins.
        repeated: two samples (numbers) with one key that do not lie side by side, if there are such.
        extensions: in the order they were met.
    """

    tar_bytes: int
    tar_mtime_ns: int
    samples: int
    key_bytes: int
    end: int
    offsets_digest: str
    repeated: tuple[int, int] | None
    extensions: list[Extension]


@dataclass(frozen=True)
class TarIndex:
    """Where everything lies in a shard.

    Args:
        summary: counts.
        offsets: int64 [samples + 1], the first header of each sample, and the end of the last.
        key_offsets: int64 [samples + 1] into ``keys``.
        starts: int64 [members], offsets of the members' bytes, by extension and then by sample.
        sizes: int64 [members].
        rows: int64, the samples that the members belong to, for those extensions that not every sample has.
        keys: uint8.
    """

    summary: Summary
    offsets: Int64
    key_offsets: Int64
    starts: Int64
    sizes: Int64
    rows: Int64
    keys: Bytes8

    def locate(self, extension: str, rows: Int64) -> tuple[Int64, Int64]:
        """Where the members of some samples lie.

        Returns:
            offsets of their bytes and how many they are; -1 bytes for a sample that has no such member.
        """
        first = first_row = 0
        for each in self.summary.extensions:
            if each.name == extension:
                break
            first += each.count
            first_row += each.count if each.count < self.summary.samples else 0
        else:
            return np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64)
        starts, sizes = self.starts[first : first + each.count], self.sizes[first : first + each.count]
        if each.count == self.summary.samples:
            return starts[rows], sizes[rows]
        having = self.rows[first_row : first_row + each.count]
        place = np.minimum(having.searchsorted(rows), each.count - 1)
        has = having[place] == rows
        return np.where(has, starts[place], 0), np.where(has, sizes[place], -1)

    def having(self, extension: str) -> Int64 | None:
        """The samples that have such a member, ascending; None for all."""
        found = self.locate(extension, np.arange(self.summary.samples))[1]
        return None if (found >= 0).all() else np.flatnonzero(found >= 0)

    def key_runs(self, rows: Int64) -> tuple[Bytes8, Int64, Int64]:
        """The keys of some samples: bytes, where each starts in them, how long each is."""
        starts = self.key_offsets[rows]
        return self.keys, starts, self.key_offsets[rows + 1] - starts

    def key(self, row: int) -> str:
        """The key of a sample."""
        return str(self.keys[self.key_offsets[row] : self.key_offsets[row + 1]].data, "utf-8", "backslashreplace")


def is_extension(name: str) -> bool:
    """Whether a member's extension can name a column: WebDataset keeps some names for itself.

    Examples:
        >>> is_extension("seg.png"), is_extension("__key__")
        (True, False)
    """
    return name not in ("", "__key__", "__url__", "__local_path__")


def to_bytes(index: TarIndex) -> bytes:
    """An index as the content of a file."""
    header = msgspec.json.encode(index.summary)
    header += b" " * (-(_PREFIX + len(header)) % 64)
    arrays = [index.offsets, index.key_offsets, index.starts, index.sizes, index.rows]
    body = b"".join([*(array.tobytes() for array in arrays), index.keys.tobytes()])
    lengths = len(header).to_bytes(4, "little") + len(body).to_bytes(8, "little")
    # Two checksums: the header is believed without reading the arrays, and these where they are used.
    return _MAGIC + lengths + xxhash.xxh32_digest(header) + xxhash.xxh3_64_digest(header + body) + header + body


def read_summary(path: str) -> Summary | None:
    """What the header of an index file says; None where there is none that can be believed."""
    try:
        # Not to wait for a writer, should it be a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            head = file.read(4096)
            size = _header_size(head)
            if size is not None and _PREFIX + size > len(head):
                head += file.read(_PREFIX + size - len(head))
            length = file.seek(0, 2)
    except OSError:
        return None
    return None if size is None else _summary(head, size, length)


def _header_size(head: bytes) -> int | None:
    size = int.from_bytes(head[8:12], "little")
    return size if head[:8] == _MAGIC and len(head) >= _PREFIX and size <= _LONGEST else None


def _summary(head: bytes, size: int, length: int) -> Summary | None:
    header = head[_PREFIX : _PREFIX + size]
    if xxhash.xxh32_digest(header) != head[20:24]:
        return None
    try:
        summary = msgspec.json.decode(header, type=Summary)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    # A checksum says that it is as it was written, not that whoever wrote it meant well.
    numbers = [summary.tar_bytes, summary.samples, summary.key_bytes, summary.end]
    for each in summary.extensions:
        numbers += [each.count, each.smallest, each.largest, each.nbytes]
        if not 0 < each.count <= summary.samples or not is_extension(each.name):
            return None
    if any(not 0 <= row < summary.samples for row in summary.repeated or ()):
        return None
    nbytes = sum(_counts(summary)) * 8 + summary.key_bytes
    if min(numbers) < 0 or nbytes != int.from_bytes(head[12:20], "little") or nbytes + _PREFIX + size != length:
        return None
    return summary


def _counts(summary: Summary) -> list[int]:
    """Elements of the arrays: offsets, key_offsets, starts, sizes, rows."""
    members = sum(each.count for each in summary.extensions)
    partial = sum(each.count for each in summary.extensions if each.count < summary.samples)
    return [summary.samples + 1, summary.samples + 1, members, members, partial]


def from_bytes(data: Bytes8) -> TarIndex | None:
    """The index in the bytes of a file, as views of them; None where they cannot be believed."""
    head = data[:_PREFIX].tobytes()
    size = _header_size(head)
    if size is None:
        return None
    summary = _summary(data[: _PREFIX + size].tobytes(), size, len(data))
    if summary is None or xxhash.xxh3_64_digest(data[_PREFIX:].data) != head[24:32]:
        return None
    counts = _counts(summary)
    place = _PREFIX + size + sum(counts) * 8
    numbers = data[_PREFIX + size : place].view(np.int64)
    offsets, key_offsets, starts, sizes, rows = np.split(numbers, np.cumsum(counts)[:-1])
    index = TarIndex(summary, offsets, key_offsets, starts, sizes, rows, data[place:])
    return index if _sound(index) else None


def _sound(index: TarIndex) -> bool:
    """Whether nothing in an index leads out of its archive."""
    summary = index.summary
    keys, offsets, rows = index.key_offsets, index.offsets, index.rows
    return (
        summary.end <= summary.tar_bytes
        and keys[0] == 0
        and keys[-1] == summary.key_bytes
        and bool((keys[1:] >= keys[:-1]).all())
        and offsets[-1] == summary.end
        and offsets[0] >= 0
        and bool((offsets[1:] >= offsets[:-1]).all())
        and bool((index.starts >= 0).all() and (index.sizes >= 0).all())
        and bool((index.sizes <= summary.end).all() and (index.starts <= summary.end - index.sizes).all())
        and bool((rows >= 0).all() and (rows < summary.samples).all())
    )
