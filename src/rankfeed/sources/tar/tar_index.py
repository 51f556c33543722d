"""The index of a tar shard: its samples, as WebDataset groups them, and offset and size of their members.

An index is kept in a file ``X.tar.rankfeed``, since ``X.tar.idx`` has neither the members nor the identity of the
archive: a JSON header with checksums, and arrays, which are memory-mapped. Members are sorted by extension, so a
column is one range of each array and a batch finds its rows by array indexing.
"""

import os
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import xxhash

from rankfeed.errors import CorruptError, SourceError, printable
from rankfeed.sources.source import Int64
from rankfeed.sources.tar.headers import BLOCK, TarMember, TarReader
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.commit import decodable
from rankfeed.storage.mapped import Bytes, map_file
from rankfeed.storage.untrusted import check_data_name

_MAGIC = b"RFTARIX3"
#: Magic, length of the JSON header, and its checksum.
_PREFIX = struct.Struct("<8sQQ")
#: As in WebDataset: the key is everything up to the first dot of the last component, the extension the rest; names
#: that begin with a component ``__*__`` are not data.
_KEY = re.compile(rb"^(?!__[^/]*__(?:$|/))((?:.*/|)[^.]+)[.]([^/]*)$")
#: Names that WebDataset gives to columns of its own.
_RESERVED = ("", "__key__", "__url__", "__local_path__")
#: Headers by which an archive is compared with its index.
_COMPARED_HEADERS = 8

Count = Annotated[int, msgspec.Meta(ge=0)]


@decodable
class Extension(msgspec.Struct, frozen=True, array_like=True):
    """The members of one extension in a shard: how many, and the sizes of the smallest, the largest and all."""

    name: str
    count: Annotated[int, msgspec.Meta(ge=1)]
    smallest: Count
    largest: Count
    nbytes: Count


@decodable
class Summary(msgspec.Struct, frozen=True):
    """What is known of a shard without the arrays of its index."""

    tar_bytes: Count  #: size of the archive that was indexed
    tar_mtime_ns: int  #: modification time of that archive
    samples: Count
    key_bytes: Count  #: length of all keys
    end: Count  #: offset behind the last member
    digest: str  #: checksum of the arrays
    headers: str  #: checksum of some headers of the archive
    repeated: tuple[Count, Count] | None  #: two samples that are not adjacent and have the same key
    extensions: list[Extension]  #: in order of appearance


@dataclass(frozen=True)
class TarIndex:
    """Where the samples of a shard are."""

    summary: Summary
    offsets: Int64  #: [samples + 1], the first header of each sample, and the end of the last
    key_offsets: Int64  #: [samples + 1] into `keys`
    rows: Int64  #: [members], their samples; by extension and then by sample
    starts: Int64  #: [members], offsets of their bytes
    sizes: Int64  #: [members]
    keys: Bytes

    def locate(self, extension: str, rows: Int64) -> tuple[Int64, Int64]:
        """Offset and size of a member of some samples; size -1 if a sample has no such member."""
        first = 0
        for entry in self.summary.extensions:
            members = slice(first, first + entry.count)
            if entry.name == extension and entry.count == self.summary.samples:
                return self.starts[members][rows], self.sizes[members][rows]
            if entry.name == extension:
                having = self.rows[members]
                place = np.minimum(having.searchsorted(rows), entry.count - 1)
                has = having[place] == rows
                return np.where(has, self.starts[members][place], 0), np.where(has, self.sizes[members][place], -1)
            first += entry.count
        return np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64)

    def key_runs(self, rows: Int64) -> tuple[Bytes, Int64, Int64]:
        """Keys of some samples: bytes, and start and length of each in them."""
        starts = self.key_offsets[rows]
        return self.keys, starts, self.key_offsets[rows + 1] - starts

    def key(self, row: int) -> str:
        return str(self.keys[self.key_offsets[row] : self.key_offsets[row + 1]].data, "utf-8", "backslashreplace")


def split_name(name: bytes) -> tuple[bytes, str] | None:
    """Key and extension of a member as WebDataset defines them; None for a member that is not data."""
    match = _KEY.match(name)
    return None if match is None else (match[1], match[2].decode("utf-8", "backslashreplace").lower())


def first_dot_remedy(extensions: Iterable[str], remedy: str) -> str:
    """A remedy; if an extension has a dot, which may belong to the key, also how to write such keys."""
    if (extension := next((name for name in extensions if "." in name), None)) is None:
        return remedy
    return (
        f"a key ends at the first dot of a name, as in WebDataset: 'KEY.{extension}' is member .{extension} of "
        "sample 'KEY'. If the dot belongs to the key, write the archive again with keys that have no dots; "
        f"otherwise {remedy}"
    )


def scan(path: str) -> TarIndex:
    """The index of an archive, from all of its headers."""
    offsets, keys = list[int](), list[bytes]()
    members: dict[str, list[tuple[int, int, int]]] = {}
    key, seen = b"", dict[str, int]()  # the current sample: its key, and the offset of each of its extensions
    with TarReader(path) as reader:
        for member in reader:
            if (parts := split_name(member.name)) is None:
                continue
            where = f"{path}, offset {member.start}"
            check_data_name(member.name, where)
            if parts[1] in _RESERVED:
                raise SourceError(
                    "the extension of a tar member cannot name a column",
                    found=_shown(member),
                    where=where,
                    remedy="rename the member",
                )
            if parts[0] != key:
                key, seen = parts[0], {}
                offsets.append(member.start)
                # Bytes that are not UTF-8 are escaped, so that different keys stay different.
                keys.append(key if key.isascii() else key.decode("utf-8", "backslashreplace").encode())
            if parts[1] in seen:
                raise CorruptError(
                    "a sample has two members of one extension",
                    expected=f"one member .{parts[1]}",
                    found=f"one at offset {seen[parts[1]]}, and {_shown(member)} at offset {member.start}",
                    where=where,
                    remedy=first_dot_remedy(
                        parts[1:],
                        "write the archive again without the second; extensions are compared in lower case",
                    ),
                )
            seen[parts[1]] = member.start
            members.setdefault(parts[1], []).append((len(keys) - 1, member.data, member.size))
        begins = np.array([*offsets, reader.offset], np.int64)
        headers = headers_digest(lambda offset: reader.read(offset, BLOCK), begins)
    columns = {name: np.array(places, np.int64) for name, places in members.items()}
    rows, starts, sizes = np.concatenate([np.empty((0, 3), np.int64), *columns.values()]).T.copy()
    key_offsets = np.cumsum([0, *map(len, keys)], dtype=np.int64)
    arrays = begins, key_offsets, rows, starts, sizes, np.frombuffer(b"".join(keys), np.uint8)
    first: dict[bytes, int] = {}
    summary = Summary(
        tar_bytes=reader.size,
        tar_mtime_ns=reader.mtime_ns,
        samples=len(keys),
        key_bytes=len(arrays[-1]),
        end=reader.offset,
        digest=digest_of(b"".join(array.tobytes() for array in arrays)),
        headers=headers,
        repeated=next(
            ((first[key], row) for row, key in enumerate(keys) if first.setdefault(key, row) != row), None
        ),
        extensions=[
            Extension(name, len(places), *(int(f(places[:, 2])) for f in (np.min, np.max, np.sum)))
            for name, places in columns.items()
        ],
    )
    return TarIndex(summary, *arrays)


def _shown(member: TarMember) -> str:
    return repr(printable(member.name)[:200])


def headers_digest(read: Callable[[int], bytes], offsets: Int64) -> str:
    """Checksum of the first headers of some samples: their names, sizes and times. ``read`` returns a header."""
    samples = len(offsets) - 1
    rows = np.linspace(0, samples - 1, min(_COMPARED_HEADERS, samples)).astype(np.int64)
    return digest_of(*map(read, offsets[rows].tolist()))


def encode(index: TarIndex) -> bytes:
    """The content of an index file."""
    header = msgspec.json.encode(index.summary)
    header += b" " * (-(_PREFIX.size + len(header)) % 8)
    prefix = _PREFIX.pack(_MAGIC, len(header), xxhash.xxh3_64_intdigest(header))
    arrays = index.offsets, index.key_offsets, index.rows, index.starts, index.sizes, index.keys
    return b"".join((prefix, header, *(array.tobytes() for array in arrays)))


def decode(data: Bytes) -> TarIndex | None:
    """The index in the content of a file, as views of it; None if it is not valid."""
    if (summary := _decode_summary(data)) is None:
        return None
    counts = _array_lengths(summary)
    body = data[len(data) - 8 * sum(counts) - summary.key_bytes :]
    if digest_of(body.data) != summary.digest:
        return None
    numbers, keys = body[: 8 * sum(counts)].view(np.int64), body[8 * sum(counts) :]
    offsets, key_offsets, rows, starts, sizes = np.split(numbers, np.cumsum(counts)[:-1])
    # A checksum protects against damage, not against a hostile writer.
    is_valid = (
        offsets[0] >= 0
        and offsets[-1] == summary.end <= summary.tar_bytes
        and (key_offsets[0], key_offsets[-1]) == (0, summary.key_bytes)
        and all((array[1:] >= array[:-1]).all() for array in (offsets, key_offsets))  # a difference may overflow
        and all((array >= 0).all() for array in (rows, starts, sizes))
        and (rows < summary.samples).all()
        and (sizes <= summary.end).all()
        and (starts <= summary.end - sizes).all()
    )
    return TarIndex(summary, offsets, key_offsets, rows, starts, sizes, keys) if is_valid else None


def read_summary(path: str | os.PathLike[str]) -> Summary | None:
    """The header of an index file; None if there is no valid one."""
    try:
        return _decode_summary(map_file(path)) if os.path.isfile(path) else None
    except SourceError:
        return None


def _decode_summary(data: Bytes) -> Summary | None:
    """The header of an index; None if it is not valid."""
    if len(data) < _PREFIX.size:
        return None
    magic, length, checksum = _PREFIX.unpack_from(data.data)
    header = data[_PREFIX.size : _PREFIX.size + length].tobytes() if magic == _MAGIC else b""
    if xxhash.xxh3_64_intdigest(header) != checksum:
        return None
    try:
        summary = msgspec.json.decode(header, type=Summary)
    except (msgspec.DecodeError, RecursionError):
        return None
    is_valid = (
        all(entry.count <= summary.samples and entry.name not in _RESERVED for entry in summary.extensions)
        and all(row < summary.samples for row in summary.repeated or ())
        and len(data) == _PREFIX.size + len(header) + 8 * sum(_array_lengths(summary)) + summary.key_bytes
    )
    return summary if is_valid else None


def _array_lengths(summary: Summary) -> list[int]:
    """Elements of offsets, key_offsets, rows, starts, sizes."""
    members = sum(extension.count for extension in summary.extensions)
    return [summary.samples + 1, summary.samples + 1, members, members, members]
