"""The index of a tar shard: its samples, and offset and size of their members.

An index is kept in a file ``X.tar.rankfeed``, since ``X.tar.idx`` has neither the members nor the identity of the
archive: 32 bytes of magic, lengths and checksums, a JSON header, and arrays, which are memory-mapped. Members are
sorted by extension, so that a column is one range of each array and a batch finds its rows by array indexing.
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
#: Magic, lengths of the JSON header (4 bytes) and of the arrays (8), checksums of the header and of everything.
_PREFIX = 32
_MOST_HEADER_BYTES = 1 << 26


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
    """What is known of a shard without its arrays.

    Args:
        tar_bytes: size of the archive that was indexed.
        tar_mtime_ns: modification time of that archive.
        samples: number of samples.
        key_bytes: length of all keys.
        end: offset behind the last member.
        offsets_digest: checksum of the sample offsets.
        repeated: two samples that are not adjacent and have the same key; None if there are none.
        extensions: in order of appearance.
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
    """Where the samples of a shard are.

    Args:
        summary: counts.
        offsets: int64 [samples + 1], the first header of each sample, and the end of the last.
        key_offsets: int64 [samples + 1] into ``keys``.
        starts: int64 [members], offsets of the members' bytes, by extension and then by sample.
        sizes: int64 [members].
        rows: int64, the samples of the members, for those extensions that not every sample has.
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
        """Offset and size of a member of some samples; size -1 if a sample has no such member."""
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

    def key_runs(self, rows: Int64) -> tuple[Bytes8, Int64, Int64]:
        """Keys of some samples: bytes, and start and length of each in them."""
        starts = self.key_offsets[rows]
        return self.keys, starts, self.key_offsets[rows + 1] - starts

    def key(self, row: int) -> str:
        """The key of a sample."""
        return str(self.keys[self.key_offsets[row] : self.key_offsets[row + 1]].data, "utf-8", "backslashreplace")


def is_extension(name: str) -> bool:
    """Whether a member's extension can name a column: WebDataset reserves some names.

    Examples:
        >>> is_extension("seg.png"), is_extension("__key__")
        (True, False)
    """
    return name not in ("", "__key__", "__url__", "__local_path__")


def to_bytes(index: TarIndex) -> bytes:
    """The content of an index file."""
    header = msgspec.json.encode(index.summary)
    header += b" " * (-(_PREFIX + len(header)) % 64)
    arrays = [index.offsets, index.key_offsets, index.starts, index.sizes, index.rows]
    body = b"".join([*(array.tobytes() for array in arrays), index.keys.tobytes()])
    lengths = len(header).to_bytes(4, "little") + len(body).to_bytes(8, "little")
    # Two checksums, so that the header can be verified without reading the arrays.
    return _MAGIC + lengths + xxhash.xxh32_digest(header) + xxhash.xxh3_64_digest(header + body) + header + body


def read_summary(path: str) -> Summary | None:
    """The header of an index file; None if there is no valid one."""
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            head = file.read(4096)
            size = _header_size(head)
            if size is not None and _PREFIX + size > len(head):
                head += file.read(_PREFIX + size - len(head))
            length = file.seek(0, 2)
    except OSError:
        return None
    return None if size is None else _check_summary(head, size, length)


def _header_size(head: bytes) -> int | None:
    size = int.from_bytes(head[8:12], "little")
    return size if head[:8] == _MAGIC and len(head) >= _PREFIX and size <= _MOST_HEADER_BYTES else None


def _check_summary(head: bytes, size: int, length: int) -> Summary | None:
    header = head[_PREFIX : _PREFIX + size]
    if xxhash.xxh32_digest(header) != head[20:24]:
        return None
    try:
        summary = msgspec.json.decode(header, type=Summary)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    # A checksum protects against damage, not against a hostile writer.
    numbers = [summary.tar_bytes, summary.samples, summary.key_bytes, summary.end]
    for each in summary.extensions:
        numbers += [each.count, each.smallest, each.largest, each.nbytes]
        if not 0 < each.count <= summary.samples or not is_extension(each.name):
            return None
    if any(not 0 <= row < summary.samples for row in summary.repeated or ()):
        return None
    nbytes = sum(_array_lengths(summary)) * 8 + summary.key_bytes
    if min(numbers) < 0 or nbytes != int.from_bytes(head[12:20], "little") or nbytes + _PREFIX + size != length:
        return None
    return summary


def _array_lengths(summary: Summary) -> list[int]:
    """Elements of offsets, key_offsets, starts, sizes, rows."""
    members = sum(each.count for each in summary.extensions)
    partial = sum(each.count for each in summary.extensions if each.count < summary.samples)
    return [summary.samples + 1, summary.samples + 1, members, members, partial]


def from_bytes(data: Bytes8) -> TarIndex | None:
    """The index in the content of a file, as views of it; None if it is not valid."""
    head = data[:_PREFIX].tobytes()
    size = _header_size(head)
    if size is None:
        return None
    summary = _check_summary(data[: _PREFIX + size].tobytes(), size, len(data))
    if summary is None or xxhash.xxh3_64_digest(data[_PREFIX:].data) != head[24:32]:
        return None
    counts = _array_lengths(summary)
    end = _PREFIX + size + sum(counts) * 8
    numbers = data[_PREFIX + size : end].view(np.int64)
    offsets, key_offsets, starts, sizes, rows = np.split(numbers, np.cumsum(counts)[:-1])
    index = TarIndex(summary, offsets, key_offsets, starts, sizes, rows, data[end:])
    return index if _is_within_archive(index) else None


def _is_within_archive(index: TarIndex) -> bool:
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
