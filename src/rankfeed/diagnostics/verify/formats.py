"""What a data set of each format consists of, and how its pieces are compared with indexes and checksums."""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rankfeed.errors import RankfeedError, SourceError, UnsafeError, describe_error
from rankfeed.sources import Source
from rankfeed.sources import open as open_source
from rankfeed.sources.formats import FORMATS, detect_format, is_wids, mds_folders
from rankfeed.sources.mds.mds_index import MdsShard, examine_index
from rankfeed.sources.mds.shard import is_hashed, locate, read_shard
from rankfeed.sources.packed import check_shard
from rankfeed.sources.paths import expand, files_in
from rankfeed.sources.tar.index_cache import index_places
from rankfeed.sources.tar.shard_list import ListedShard, list_shards, read_wids
from rankfeed.sources.tar.tar_index import TarIndex, encode, read_summary, scan
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.manifest import load_manifest
from rankfeed.storage.mapped import check_shard_size, map_file

#: Samples that are decoded together; samples of a piece, at least, and pieces of a data set, at most.
_TOGETHER, _PIECE_SAMPLES, _PIECES = 256, 4096, 1 << 16


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with data."""

    what: str
    where: str  # file, and offset, row or sample in it
    expected: str = ""
    found: str = ""

    @classmethod
    def of(cls, error: RankfeedError, where: object = "") -> "Damage":
        """As an error reports it."""
        texts = ["" if fact is None else str(fact)[:500] for fact in (error.expected, error.found)]
        return cls(error.summary, str(error.where or where), *texts)

    def __str__(self) -> str:
        facts = [f"expected {self.expected}"] * bool(self.expected) + [f"found {self.found}"] * bool(self.found)
        return ": ".join([self.where, ", ".join([self.what, *facts])])


#: Yields what is wrong; an error that it raises is damage as well.
Check = Callable[[], Iterable[Damage] | None]


@dataclass(frozen=True)
class DataPiece:
    """A part of the data that is verified as one."""

    key: tuple[object, ...]  # begins with the path
    nbytes: int
    check: Check = field(repr=False)


@dataclass
class DataContents:
    """The files of a data set, the pieces to check, and what is wrong without reading them."""

    files: list[str]
    pieces: list[DataPiece] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    checksums: str = ""  # that all content is compared with
    decode: bool = True  # whether the samples have to be decoded as well

    def add(self, path: str, check: Check, *facts: object, share: float = 1) -> None:
        """Add a file; ``facts`` are what it is compared with, ``share`` is how much of it is read."""
        stamp = file_stamp(path)
        self.pieces.append(DataPiece((*stamp, *facts), int(stamp[1] * share), check))


def file_stamp(path: str | os.PathLike[str]) -> tuple[str, int, int, int, int]:
    """Path, bytes, times and inode of a file; 0 bytes and -1 if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.abspath(path), 0, -1, -1, -1
    return os.path.abspath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def contents_of(name: str, place: Any, opening: dict[str, Any]) -> DataContents:
    """The contents of a data set in a format; ``opening`` are the options of `rankfeed.open`."""
    if name == "packed":
        manifest = load_manifest(os.fspath(place))
        paths = [os.path.join(place, shard.path) for shard in manifest.shards]
        contents = DataContents(paths, checksums="the manifest's checksums", decode=False)
        contents.damage += _unlisted(paths, ".arrow", "the manifest")
        for path, shard in zip(paths, manifest.shards, strict=True):
            check = partial(check_shard, os.fspath(place), manifest, shard)
            contents.add(path, check, shard.xxh3, shard.rows, shard.bytes)
        return contents
    if name == "mds":
        contents = _mds(mds_folders(place))
    elif name == "webdataset":
        contents = _tars(place, opening.get("split"), opening["cache_dir"])
    elif name == "parquet":
        from rankfeed.sources.parquet.partitions import parquet_files

        contents = DataContents([file.path for file in parquet_files(place)])
        if all(map(_has_page_checksums, contents.files)):
            contents.checksums = "the checksums of pages"  # which reading compares
    else:
        contents = DataContents(all_files(expand(place)))
        for path in contents.files:
            if path.endswith(".npz"):  # its members have a CRC; other files have no checksums
                contents.add(path, partial(_check_crc, path), "crc")
        if contents.pieces and len(contents.pieces) == len(contents.files):
            contents.checksums = "the CRCs of archive members"
    if contents.decode:
        _add_decoded(contents, place, opening)
    return contents


def all_files(places: Iterable[str]) -> list[str]:
    """All files in these places without hidden ones."""
    found = []
    for place in places:
        if not os.path.isdir(place):
            found.append(place)
        for folder, folders, names in os.walk(place):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")]
    return found


def _unlisted(known: Iterable[str], suffix: str, listed_in: str) -> Iterator[Damage]:
    """Shards beside those of an index or manifest, whose samples would be missing without an error."""
    paths = set(map(os.path.abspath, known))
    for folder in sorted({os.path.dirname(path) for path in paths}):
        for path in files_in(folder, (suffix,)) if os.path.isdir(folder) else ():
            if path not in paths:
                yield Damage("a shard is not listed", path, f"only shards that {listed_in} names")


def _mds(folders: Sequence[str]) -> DataContents:
    contents = DataContents(all_files(folders))
    indexes = [examine_index(folder) for folder in folders]
    for index in indexes:
        contents.damage += map(Damage.of, index.problems)
        for shard in index.shards:
            check = partial(_check_mds, shard)
            contents.add(shard.path, check, sorted(shard.hashes.items()), shard.samples, shard.bytes)
    if all(is_hashed(shard) for index in indexes for shard in index.shards):
        contents.checksums, contents.decode = "the hashes of index.json", False
    return contents


def _check_mds(shard: MdsShard) -> None:
    content = read_shard(map_file(shard.path), shard, check=True)
    locate(content, np.arange(shard.samples), shard)


def _tars(place: Any, split: str | None, cache_dir: str | None) -> DataContents:
    """Headers are compared with indexes; counts, sizes and checksums with descriptions."""
    is_descriptor = isinstance(place, str) and is_wids(place) and split is None
    listed = read_wids(place, check=False) if is_descriptor else list_shards(place, split)
    contents = DataContents(listed.paths)
    if listed.where.endswith(".json"):
        contents.damage += _unlisted(listed.paths, ".tar", listed.where)
    for shard in listed.shards:
        indexes = [*map(os.fspath, index_places(shard.path, cache_dir)), shard.path + ".idx"]
        check = partial(_check_tar, shard, indexes, listed.where)
        facts = shard.samples, shard.size, shard.md5
        stamps = [file_stamp(index)[1:] for index in indexes]
        contents.add(shard.path, check, facts, stamps, share=1 if shard.md5 else 0.01)
    if listed.shards and all(shard.md5 is not None for shard in listed.shards):
        contents.checksums, contents.decode = f"the md5 sums of {listed.where}", False
    return contents


def _check_tar(shard: ListedShard, indexes: Sequence[str], described_in: str) -> Iterator[Damage]:
    path = shard.path
    check_shard_size(path, shard.size, described_in)
    if shard.md5 is not None:
        with open(path, "rb", buffering=0) as file:
            digest = hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
        if digest != shard.md5:
            yield Damage("a shard is damaged", path, f"md5 {shard.md5}", f"md5 {digest}")
    actual = scan(path)
    if shard.samples not in (None, actual.summary.samples):
        what = "a shard has another number of samples than its description says"
        yield Damage(what, path, f"{shard.samples} samples", f"{actual.summary.samples} samples")
    state = actual.summary.tar_bytes, actual.summary.tar_mtime_ns
    for place in filter(os.path.exists, indexes):
        if place.endswith(".idx"):
            yield from _check_offsets(place, actual)
        elif (stored := read_summary(place)) is None:
            yield Damage("an index is damaged", place, "an index with the right checksums")
        # An index of an earlier state of the archive is replaced when it is read.
        elif (stored.tar_bytes, stored.tar_mtime_ns) == state and Path(place).read_bytes() != encode(actual):
            yield Damage("an index differs from the headers of its archive", place)


def _check_offsets(place: str, actual: TarIndex) -> Iterator[Damage]:
    right, content = actual.offsets.astype("<u8").tobytes(), Path(place).read_bytes()
    if content != right:
        at = next((at for at in range(0, len(right), 8) if content[at : at + 8] != right[at : at + 8]), len(right))
        expected, found = (str(int.from_bytes(index[at : at + 8], "little")) for index in (right, content))
        what = "offsets of an index are not those of the archive's headers"
        yield Damage(what, f"{place}, entry {at // 8}", expected, found)


def _check_crc(path: str) -> Iterator[Damage]:
    try:
        with zipfile.ZipFile(path) as archive:
            if (member := archive.testzip()) is not None:
                yield Damage("a member is damaged", f"{path}, {member}", "the CRC that the archive lists")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        yield Damage("an archive cannot be read", path, "a .npz file", str(error))


def _has_page_checksums(path: str) -> bool:
    """Whether pyarrow notices a changed byte in each row group: writers give all pages a checksum, or none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = np.memmap(path, np.uint8, mode="c")  # changes stay in memory
        file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            if not group.num_rows:
                continue
            columns = (group.column(column) for column in range(group.num_columns))
            chunk = min(columns, key=lambda column: column.total_compressed_size)
            end = (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size
            content[end - 1] ^= 1
            try:
                file.read_row_group(number, [chunk.path_in_schema])
                return False
            except OSError as error:
                if "CRC checksum" not in str(error):
                    return False
            content[end - 1] ^= 1
    except (pa.ArrowException, OSError, IndexError, ValueError):
        return False
    return True


def _add_decoded(contents: DataContents, place: Any, opening: dict[str, Any]) -> None:
    """Add pieces that decode all samples; if the data set cannot be opened, those of each file that can."""
    try:
        source = open_source(place, **opening)
        stamps = [file_stamp(path) for path in contents.files]
        # Sizes and times of the files represent the content.
        nbytes, state = sum(stamp[1] for stamp in stamps), digest_of(repr(stamps).encode())
        size = max(_PIECE_SAMPLES, -(-len(source) // _PIECES))
        for low in range(0, len(source), size):
            samples = range(len(source))[low : low + size]
            check = partial(_decode, source, low, samples.stop)
            key = (source.fingerprint, state, samples)
            contents.pieces.append(DataPiece(key, nbytes * len(samples) // len(source), check))
    except UnsafeError:
        raise
    except SourceError as error:
        contents.damage.append(Damage.of(error, place))
        name = opening["format"]
        is_single = FORMATS[name].is_single or len(contents.files) == 1
        for path in () if is_single else filter(os.path.isfile, contents.files):
            if detect_format(path, name):
                single = DataContents([path])
                _add_decoded(single, path, opening)
                contents.pieces += single.pieces
                contents.damage += single.damage


def _decode(source: Source, low: int, high: int) -> Iterator[Damage]:
    """Divide a range that is large or fails, unless its first and last samples fail for the same reason."""
    if high - low > _TOGETHER:
        for start in range(low, high, _TOGETHER):
            yield from _decode(source, start, min(start + _TOGETHER, high))
        return
    damage = _failure(source, low, high)
    if damage is None:
        return
    if high - low == 1 or damage == _failure(source, low, low + 1) == _failure(source, high - 1, high):
        yield damage
    else:
        yield from _decode(source, low, (low + high) // 2)
        yield from _decode(source, (low + high) // 2, high)


def _failure(source: Source, low: int, high: int) -> Damage | None:
    try:
        for sample in source.fetch(np.arange(low, high)).samples():
            for value in sample.values() if isinstance(sample, dict) else [sample]:
                if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.size:
                    value.max()  # reads it: it may be a view of a mapped file
    except RankfeedError as error:
        return Damage.of(error, f"sample {low}")
    except Exception as error:  # third-party decoders raise anything
        return Damage("a sample cannot be decoded", f"sample {low}", "", describe_error(error)[:500])
    return None
