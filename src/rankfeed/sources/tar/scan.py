"""Indexing a tar shard by reading all of its headers: which members form a sample, as WebDataset groups them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import xxhash

from rankfeed.errors import CorruptError, SourceError, printable
from rankfeed.sources.tar.headers import TarMember, TarReader, Window
from rankfeed.sources.tar.index import Extension, Summary, TarIndex, is_extension
from rankfeed.storage import check_data_name, digest_of

#: As in WebDataset: the key is everything up to the first dot of the last component, the extension the rest.
_KEY = re.compile(rb"^((?:.*/|)[^.]+)[.]([^/]*)$")
#: As in WebDataset: members that are no data.
_META = re.compile(rb"__[^/]*__($|/)")


def split_name(name: bytes) -> tuple[bytes, str] | None:
    """Key and extension of a member as WebDataset defines them; None for a member that is no data.

    Examples:
        >>> split_name(b"train/0001.Seg.PNG")
        (b'train/0001', 'seg.png')
        >>> split_name(b"README"), split_name(b"__meta__/a.txt")
        (None, None)
    """
    if name.startswith(b"__") and _META.match(name):
        return None
    found = _KEY.match(name)
    return None if found is None else (found[1], found[2].decode("utf-8", "backslashreplace").lower())


def samples_of(reader: TarReader, path: str) -> Iterator[tuple[bytes, int, dict[str, TarMember]]]:
    """The samples of an archive: key, offset of the first header, members by extension."""
    key, first, members = b"", 0, dict[str, TarMember]()
    while (member := reader.next()) is not None:
        parts = split_name(member.name)
        if parts is None:
            continue
        check_member(member, parts[1], path)
        if parts[0] != key or not members:
            if members:
                yield key, first, members
            key, first, members = parts[0], member.start, {}
        if parts[1] in members:
            raise duplicate_extension(parts[1], members[parts[1]].start, member, path)
        members[parts[1]] = member
    if members:
        yield key, first, members


def check_member(member: TarMember, extension: str, path: str) -> None:
    """Refuse names that leave the directory, and extensions that cannot name a column."""
    where = f"{path}, offset {member.start}"
    check_data_name(member.name, where)
    if not is_extension(extension):
        raise SourceError(
            "the extension of a tar member cannot name a column",
            found=_shown(member.name),
            where=where,
            remedy="rename the member",
        )


def duplicate_extension(extension: str, first: int, second: TarMember, path: str) -> CorruptError:
    """The error for a sample with two members of one extension."""
    return CorruptError(
        "a sample has two members of one extension",
        expected=f"one member .{extension}",
        found=f"one at offset {first}, and {_shown(second.name)} at offset {second.start}",
        where=f"{path}, offset {second.start}",
        remedy="write the archive again without the second; extensions are compared in lower case",
    )


def readable_key(key: bytes) -> bytes:
    """A key in UTF-8; other bytes are escaped, so that different keys stay different."""
    return key if key.isascii() else key.decode("utf-8", "backslashreplace").encode()


def scan(path: str) -> TarIndex:
    """The index of an archive, from all of its headers."""
    offsets, keys = list[int](), list[bytes]()
    found: dict[str, tuple[list[int], list[int], list[int]]] = {}
    with Window(path) as window:
        reader = TarReader(window)
        for row, (key, first, members) in enumerate(samples_of(reader, path)):
            offsets.append(first)
            keys.append(readable_key(key))
            for extension, member in members.items():
                rows, starts, sizes = found.setdefault(extension, ([], [], []))
                rows.append(row)
                starts.append(member.data)
                sizes.append(member.size)
        reader.check_end()
        size, mtime_ns, end = window.size, window.mtime_ns, reader.offset
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    columns = {name: [np.array(each, np.int64) for each in lists] for name, lists in found.items()}
    begins = np.array([*offsets, end], np.int64)
    summary = Summary(
        tar_bytes=size,
        tar_mtime_ns=mtime_ns,
        samples=len(keys),
        key_bytes=int(lengths.sum()),
        end=end,
        offsets_digest=digest_of(begins.tobytes()),
        repeated=_repeated(keys),
        extensions=[
            Extension(name, len(rows), int(sizes.min()), int(sizes.max()), int(sizes.sum()))
            for name, (rows, _, sizes) in columns.items()
        ],
    )
    none = [np.empty(0, np.int64)]
    return TarIndex(
        summary,
        begins,
        np.append(0, np.cumsum(lengths)),
        np.concatenate([starts for _, starts, _ in columns.values()] or none),
        np.concatenate([sizes for _, _, sizes in columns.values()] or none),
        np.concatenate([rows for rows, _, _ in columns.values() if len(rows) < len(keys)] or none),
        np.frombuffer(b"".join(keys), np.uint8),
    )


def _repeated(keys: list[bytes]) -> tuple[int, int] | None:
    """Two samples with the same key."""
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))
    order = hashes.argsort(kind="stable")
    for place in np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]).tolist():
        first, second = int(order[place]), int(order[place + 1])
        if keys[first] == keys[second]:
            return first, second
    return None


def _shown(name: bytes) -> str:
    return repr(printable(name)[:200])
