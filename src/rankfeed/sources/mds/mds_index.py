"""The index of an MDS dataset (MosaicML Streaming): its shards, and how their columns are encoded."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.formats import MDS_INDEX_NAME
from rankfeed.storage.commit import decodable
from rankfeed.storage.mapped import check_shard_size
from rankfeed.storage.untrusted import check_data_name, read_json, resolve_data_name

#: Encoding and size in bytes (0: it varies) of each column, in storage order.
ColumnEncodings = Mapping[str, tuple[str, int]]

#: Names of shards that MosaicML's writer uses.
_SHARD = re.compile(r"shard\.[0-9]+\.mds(\.[a-z]+)?")
#: Offsets in a shard have 32 bits.
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


@decodable
class _ShardFile(msgspec.Struct, frozen=True):
    basename: str
    bytes: Count
    hashes: dict[str, str] = {}


@decodable
class _ShardEntry(msgspec.Struct, frozen=True):
    format: str
    samples: Count
    version: int
    column_names: list[str] = []
    column_encodings: list[str] = []
    column_sizes: list[Count | None] = []
    compression: str | None = None
    raw_data: _ShardFile | None = None
    zip_data: _ShardFile | None = None


@decodable
class _IndexFile(msgspec.Struct, frozen=True):
    version: int
    shards: list[_ShardEntry]


@dataclass(frozen=True)
class MdsShard:
    """A shard: the file to read, which is compressed or not, and what the index says about it."""

    path: str
    bytes: int
    compression: str | None
    raw_bytes: int  # after decompression
    samples: int
    hashes: Mapping[str, str]  # of the decompressed shard, by name of the algorithm
    columns: ColumnEncodings


@dataclass(frozen=True)
class MdsIndex:
    """The shards of a directory."""

    shards: list[MdsShard]  # in the order of sample ids, without empty ones
    columns: ColumnEncodings
    digest: bytes  # for the fingerprint
    problems: list[SourceError]  # about shards that are missing, invalid, or not in the index


def read_indexes(folders: Sequence[str]) -> MdsIndex:
    """The indexes of some directories as one; raises the first problem."""
    indexes = [examine_index(folder) for folder in folders]
    for folder, index in zip(folders, indexes, strict=True):
        for error in index.problems:
            raise error
        if not index.shards or not index.columns:
            raise SourceError("the dataset is empty", where=os.path.join(folder, MDS_INDEX_NAME))
        if index.columns != indexes[0].columns:
            raise SourceError(
                "folders differ in their columns",
                expected=indexes[0].columns,
                found=index.columns,
                where=folder,
                remedy="open them one by one",
            )
    shards = [shard for index in indexes for shard in index.shards]
    return MdsIndex(shards, indexes[0].columns, b"\n".join(index.digest for index in indexes), [])


def examine_index(folder: str) -> MdsIndex:
    """Read ``index.json``, and check that its shards exist."""
    where = os.path.join(folder, MDS_INDEX_NAME)
    index = read_json(where, _IndexFile)
    files = [file for shard in index.shards for file in (shard.raw_data, shard.zip_data) if file is not None]
    for file in files:
        check_data_name(file.basename, where)
    repeats = Counter(os.path.normpath(shard.raw_data.basename) for shard in index.shards if shard.raw_data)
    for name, count in repeats.most_common(1):
        if count > 1:
            raise CorruptError(
                "the index lists a shard more than once, so that its samples would be read more than once",
                expected=f"{name!r} once",
                found=f"{count} times",
                where=where,
            )
    shards: list[MdsShard] = []
    problems: list[SourceError] = []
    columns: ColumnEncodings | None = None
    for entry in index.shards:
        try:
            entry_columns = _columns(entry, where)
            columns = entry_columns if columns is None else columns
            if entry_columns != columns:
                raise SourceError(
                    "shards differ in their columns",
                    expected=columns,
                    found=entry_columns,
                    where=f"{where}, {entry.raw_data.basename if entry.raw_data else 'a shard'}",
                    remedy="write the shards with the same columns, or open them as datasets of their own",
                )
            if entry.samples:
                shards.append(_find_shard(folder, entry, columns, where))
        except SourceError as error:
            problems.append(error)
    problems += _unlisted_shards(folder, {file.basename for file in files}, where)
    columns = columns or {}
    names = [(entry.raw_data, entry.zip_data, entry.samples) for entry in index.shards]
    return MdsIndex(shards, columns, msgspec.json.encode((names, columns)), problems)


def _unlisted_shards(folder: str, listed: set[str], where: str) -> Iterator[CorruptError]:
    """Shards beside those of the index: their samples would be missing without an error."""
    for place in sorted({os.path.dirname(name) for name in listed}):
        with suppress(FileNotFoundError, NotADirectoryError):  # its shards have no samples
            for basename in sorted(os.listdir(os.path.join(folder, place))):
                name = os.path.join(place, basename)
                if _SHARD.fullmatch(basename) and name not in listed:
                    yield CorruptError(
                        "a shard is not in the index",
                        found=name,
                        where=where,
                        remedy="write the index again, or move the shard away if it does not belong to the data",
                    )


def _columns(shard: _ShardEntry, where: str) -> ColumnEncodings:
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
        raise CorruptError("the columns contradict each other", found=found, where=where)
    return {name: (encoding, size or 0) for name, encoding, size in zip(names, encodings, sizes, strict=True)}


def _find_shard(folder: str, shard: _ShardEntry, columns: ColumnEncodings, where: str) -> MdsShard:
    """The file of a shard: decompressed if it exists, otherwise compressed."""
    raw, packed = shard.raw_data, shard.zip_data
    if raw is None:
        raise CorruptError("a shard has no file", found="raw_data is null", where=where)
    path, size, compression = resolve_data_name(folder, raw.basename, where), raw.bytes, None
    if packed is not None and not os.path.exists(path):
        path, size = resolve_data_name(folder, packed.basename, where), packed.bytes
        compression = shard.compression or ""
    check_shard_size(path, size, where)
    return MdsShard(path, size, compression, raw.bytes, shard.samples, raw.hashes, columns)
