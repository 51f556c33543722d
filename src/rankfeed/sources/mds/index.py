"""The index of an MDS data set (MosaicML Streaming): which shards there are, and how their columns are stored."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.json_index import read_json
from rankfeed.storage import check_data_name, resolve_data_name
from rankfeed.storage.decodable import decodable

INDEX_NAME = "index.json"
REMEDY = "fetch the shard and the index anew, or write the data set again"

#: What MosaicML's writer calls its shards.
_SHARD = re.compile(r"shard\.[0-9]+\.mds(\.[a-z]+)?")

#: Places in a shard are 32 bits wide.
_MOST = (1 << 32) - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


@decodable
class _File(msgspec.Struct, frozen=True):
    basename: str
    bytes: Count
    hashes: dict[str, str] = {}


@decodable
class _Shard(msgspec.Struct, frozen=True):
    format: str
    samples: Count
    version: int
    column_names: list[str] = []
    column_encodings: list[str] = []
    column_sizes: list[Count | None] = []
    compression: str | None = None
    raw_data: _File | None = None
    zip_data: _File | None = None


@decodable
class _Index(msgspec.Struct, frozen=True):
    version: int
    shards: list[_Shard]


@dataclass(frozen=True)
class MdsShard:
    """One shard.

    Args:
        path: of the file to read, as it is or compressed.
        bytes: of that file.
        compression: how it is compressed; None where it is not.
        raw_bytes: when decompressed.
        samples: in it.
        hashes: of the decompressed shard, by the name of the algorithm.
        columns: encoding and size in bytes of each column (0: it varies), which the shard's header repeats.
    """

    path: str
    bytes: int
    compression: str | None
    raw_bytes: int
    samples: int
    hashes: Mapping[str, str]
    columns: Mapping[str, tuple[str, int]]


@dataclass(frozen=True)
class MdsIndex:
    """The shards of a folder, and what all of them hold.

    Args:
        shards: in the order of sample ids; those without samples are left out.
        columns: for each column, in the order in which they lie, its encoding and its size in bytes
            (0: it varies).
        digest: what the fingerprint is made of.
    """

    shards: list[MdsShard]
    columns: dict[str, tuple[str, int]]
    digest: bytes


def read_index(folder: str) -> MdsIndex:
    """Read ``index.json``, and look for the shards that it names.

    Raises:
        SourceError: there is none, it is of another version or format, or shards differ in their columns.
        CorruptError: it is damaged, lists a shard twice, or a shard is missing or of another size.
        UnsafeError: a name is absolute, contains ".." or is a URL.
    """
    where = os.path.join(folder, INDEX_NAME)
    index = _read(where)
    shards: list[MdsShard] = []
    columns: dict[str, tuple[str, int]] | None = None
    for each in index.shards:
        found = _columns(each, where)
        if columns is None:
            columns = found
        if found != columns:
            raise SourceError(
                "shards differ in their columns",
                expected=columns,
                found=found,
                where=f"{where}, {each.raw_data.basename if each.raw_data else 'a shard'}",
                remedy="write the shards with the same columns, or open them as data sets of their own",
            )
        if each.samples:
            shards.append(_found(folder, each, where))
    if not shards or not columns:
        raise SourceError("the data set is empty", where=where)
    for name in _forgotten(folder, index):
        raise _not_in_index(name, where)
    names = [(each.raw_data, each.zip_data, each.samples) for each in index.shards]
    return MdsIndex(shards, columns, msgspec.json.encode((names, columns)))


def examine(folder: str) -> tuple[list[MdsShard], dict[str, tuple[str, int]], list[SourceError]]:
    """The shards that are there, their columns, and all that is wrong with the others.

    Raises:
        SourceError, CorruptError, UnsafeError: the index cannot be read.
    """
    where = os.path.join(folder, INDEX_NAME)
    index = _read(where)
    shards: list[MdsShard] = []
    wrong: list[SourceError] = []
    columns: dict[str, tuple[str, int]] = {}
    for each in index.shards:
        try:
            found = _columns(each, where)
            columns = columns or found
            if found != columns:
                raise CorruptError("shards differ in their columns", expected=columns, found=found, where=where)
            if each.samples:
                shards.append(_found(folder, each, where))
        except SourceError as error:
            wrong.append(error)
    wrong += [_not_in_index(name, where) for name in _forgotten(folder, index)]
    return shards, columns, wrong


def _read(where: str) -> _Index:
    index = read_json(where, _Index)
    for shard in index.shards:
        for file in (shard.raw_data, shard.zip_data):
            if file is not None:
                check_data_name(file.basename, where)
    names = Counter(os.path.normpath(each.raw_data.basename) for each in index.shards if each.raw_data is not None)
    for name, count in names.items():
        if count > 1:
            raise CorruptError(
                "the index lists a shard more than once, so that its samples would be read more than once",
                expected=f"{name!r} once",
                found=f"{count} times",
                where=where,
                remedy="fetch the index again, or write the data set again",
            )
    return index


def _not_in_index(name: str, where: str) -> CorruptError:
    return CorruptError(
        "a shard is not in the index",
        found=name,
        where=where,
        remedy="write the index anew, or move the shard away if it does not belong to the data",
    )


def _forgotten(folder: str, index: _Index) -> Iterator[str]:
    """Shards that lie beside those of the index, and are not in it: their samples would be lost."""
    named = {
        each.basename for shard in index.shards for each in (shard.raw_data, shard.zip_data) if each is not None
    }
    for place in sorted({os.path.dirname(name) for name in named}):
        if not os.path.isdir(os.path.join(folder, place)):
            continue  # its shards have no samples
        for entry in sorted(os.listdir(os.path.join(folder, place))):
            if _SHARD.fullmatch(entry) and os.path.join(place, entry) not in named:
                yield os.path.join(place, entry)


def _columns(shard: _Shard, where: str) -> dict[str, tuple[str, int]]:
    if shard.version != 2 or shard.format != "mds":
        raise SourceError(
            "shards of another format",
            expected='format "mds", version 2',
            found=f"format {shard.format!r}, version {shard.version}",
            where=where,
            remedy="write the data with streaming's MDSWriter, or open its files by themselves",
        )
    names, encodings, sizes = shard.column_names, shard.column_encodings, shard.column_sizes
    if not len(names) == len(encodings) == len(sizes) == len(set(names)):
        found = f"{len(names)} names, {len(encodings)} encodings, {len(sizes)} sizes"
        raise CorruptError("the columns contradict each other", found=found, where=where, remedy=REMEDY)
    return {name: (encoding, size or 0) for name, encoding, size in zip(names, encodings, sizes, strict=True)}


def _found(folder: str, shard: _Shard, where: str) -> MdsShard:
    """The file of a shard: decompressed if that is there, else compressed."""
    raw, packed = shard.raw_data, shard.zip_data
    if raw is None:
        raise CorruptError("a shard has no file", found="raw_data is null", where=where, remedy=REMEDY)
    path, size, compression = resolve_data_name(folder, raw.basename, where), raw.bytes, None
    if packed is not None and not os.path.exists(path):
        path, size, compression = (
            resolve_data_name(folder, packed.basename, where),
            packed.bytes,
            shard.compression or "",
        )
    try:
        actual: Any = os.stat(path).st_size
    except OSError as error:
        actual = error.strerror
    if actual != size:
        raise CorruptError(
            "a shard is missing" if isinstance(actual, str) else "a shard has another size than the index says",
            expected=f"{size} bytes",
            found=actual if isinstance(actual, str) else f"{actual} bytes",
            where=path,
            remedy=REMEDY,
        )
    return MdsShard(path, size, compression, raw.bytes, shard.samples, raw.hashes, _columns(shard, where))
