"""Pieces of data with an index or manifest: packed and MDS folders, and tar shards with their indexes."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rankfeed.diagnostics.verify.pieces import Damage, DataPiece, Step, file_stamp
from rankfeed.errors import RankfeedError
from rankfeed.sources.mds.index import ColumnEncodings, MdsShard, examine_index
from rankfeed.sources.mds.shard import check_hashes, is_hashed, locate, read_shard
from rankfeed.sources.packed import check_shard
from rankfeed.sources.paths import files_in
from rankfeed.sources.tar.detect import is_wids
from rankfeed.sources.tar.index import TarIndex, decode, read_summary, scan
from rankfeed.sources.tar.index_cache import index_places
from rankfeed.sources.tar.shard_list import ShardList, list_shards, read_wids
from rankfeed.storage.manifest import Manifest, ShardInfo, load_manifest
from rankfeed.storage.mapped import map_file

_CHUNK = 1 << 20


def packed_pieces(folder: str) -> tuple[list[DataPiece], list[Damage]]:
    """The shards of a packed folder, and files that are in no manifest."""
    manifest = load_manifest(folder)
    named = {os.path.normpath(shard.path) for shard in manifest.shards}
    pieces = [
        DataPiece(
            ("packed", *file_stamp(Path(folder, shard.path)), shard.xxh3, shard.rows, shard.bytes),
            shard.bytes,
            lambda step, shard=shard: _packed(folder, manifest, shard, step),  # type: ignore[misc]
        )
        for shard in manifest.shards
    ]
    unnamed = [
        os.path.normpath(os.path.join(place, name))
        for place in sorted({os.path.dirname(each) for each in named})
        for name in sorted(os.listdir(os.path.join(folder, place)))
        if name.endswith(".arrow") and not name.startswith(".")
    ]
    return pieces, [
        Damage("a shard is not in the manifest", os.path.join(folder, name), "only shards that it names")
        for name in unnamed
        if name not in named
    ]


def _packed(folder: str, manifest: Manifest, shard: ShardInfo, step: Step) -> Iterator[Damage]:
    try:
        check_shard(folder, manifest, shard, step)
    except RankfeedError as error:
        yield Damage.of(error, shard.path)


def mds_pieces(folder: str) -> tuple[list[DataPiece], list[Damage], bool]:
    """The shards of an MDS folder, what is wrong with its index, and whether all have known checksums."""
    index = examine_index(folder)
    pieces = [
        DataPiece(
            ("mds", *file_stamp(shard.path), sorted(shard.hashes.items()), shard.samples, shard.bytes),
            shard.bytes,
            lambda step, shard=shard: _mds(shard, index.columns, step),  # type: ignore[misc]
        )
        for shard in index.shards
    ]
    return pieces, [Damage.of(error) for error in index.problems], all(map(is_hashed, index.shards))


def _mds(shard: MdsShard, columns: ColumnEncodings, step: Step) -> Iterator[Damage]:
    try:
        data = read_shard(map_file(shard.path), shard)
        check_hashes(data, shard)
        locate(data, np.arange(shard.samples), columns, shard)
    except RankfeedError as error:
        yield Damage.of(error, shard.path)
    step(shard.bytes)


def tar_shards(where: Any, split: str | None) -> ShardList:
    """The shards; those of a wids descriptor need not exist."""
    if isinstance(where, (str, os.PathLike)) and is_wids(os.fspath(where)) and split is None:
        return read_wids(os.fspath(where), check=False)
    return list_shards(where, split)


def tar_pieces(these: ShardList, cache_dir: str | None) -> tuple[list[DataPiece], list[Damage]]:
    """Tar shards: headers against indexes; counts, sizes and checksums against descriptions."""
    nothing: list[Any] = [None] * len(these.shards)
    sizes, md5s = these.sizes or nothing, these.md5s or nothing
    pieces = [
        DataPiece(
            (
                "tar",
                *file_stamp(path),
                *(file_stamp(each)[1:] for each in _indexes(path, cache_dir)),
                count,
                size,
                md5,
            ),
            max(0, file_stamp(path)[1]) if md5 else 1 << 16,
            lambda step, path=path, count=count, size=size, md5=md5: _tar(path, count, size, md5, cache_dir, step),  # type: ignore[misc]
        )
        for path, count, size, md5 in zip(these.shards, these.counts, sizes, md5s, strict=True)
    ]
    return pieces, list(_undescribed(these))


def _undescribed(these: ShardList) -> Iterator[Damage]:
    """Shards in the folders of a wids descriptor that it does not name."""
    if not these.where.endswith(".json"):
        return
    for folder in sorted({os.path.dirname(path) for path in these.shards}):
        with suppress(RankfeedError):
            for path in files_in(folder, (".tar",)):
                if os.path.abspath(path) not in {os.path.abspath(each) for each in these.shards}:
                    yield Damage(
                        "a shard is not in the description", path, f"only shards that {these.where} names"
                    )


def _indexes(path: str, cache_dir: str | None) -> list[str]:
    return [*map(os.fspath, index_places(path, cache_dir)), path + ".idx"]


def _tar(
    path: str, count: int | None, size: int | None, md5: str | None, cache_dir: str | None, step: Step
) -> Iterator[Damage]:
    found = file_stamp(path)[1]
    if found < 0:
        yield Damage("a shard is missing", path, "a tar file")
        return
    if size is not None and size != found:
        yield Damage("a shard has another size than its description says", path, f"{size} bytes", f"{found} bytes")
    if md5 is not None and (digest := _md5(path, step)) != md5:
        yield Damage("a shard is damaged", path, f"md5 {md5}", f"md5 {digest}")
    try:
        actual = scan(path)
    except RankfeedError as error:
        yield Damage.of(error, path)
        return
    if count is not None and count != actual.summary.samples:
        what = "a shard has another number of samples than its description says"
        yield Damage(what, path, f"{count} samples", f"{actual.summary.samples} samples")
    for place in map(os.fspath, index_places(path, cache_dir)):
        if os.path.exists(place):
            yield from _own_index(place, actual)
    if os.path.exists(path + ".idx"):
        yield from _foreign_index(path + ".idx", actual)
    if md5 is None:
        step(1 << 16)


def _md5(path: str, step: Step) -> str:
    state = hashlib.md5(usedforsecurity=False)
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_CHUNK):
            state.update(piece)
            step(len(piece))
    return state.hexdigest()


def _own_index(place: str, actual: TarIndex) -> Iterator[Damage]:
    """An index that rankfeed made; one of an earlier state of the archive is replaced when it is read."""
    summary = read_summary(place)
    index = None if summary is None else decode(map_file(place))
    if index is None:
        yield Damage("an index is damaged", place, "an index with the right checksums")
    elif (index.summary.tar_bytes, index.summary.tar_mtime_ns) == (
        actual.summary.tar_bytes,
        actual.summary.tar_mtime_ns,
    ):
        for name in ("offsets", "starts", "sizes", "rows", "key_offsets", "keys"):
            yield from _differ(place, name, getattr(actual, name), getattr(index, name))


def _foreign_index(place: str, actual: TarIndex) -> Iterator[Damage]:
    content = Path(place).read_bytes()
    if len(content) % 8:
        yield Damage("an index is damaged", place, "numbers of 8 bytes", f"{len(content)} bytes")
        return
    yield from _differ(place, "offsets", actual.offsets, np.frombuffer(content, "<u8").astype(np.int64))


def _differ(place: str, name: str, expected: Any, found: Any) -> Iterator[Damage]:
    """The first entry of an index that differs from the headers."""
    if len(expected) != len(found):
        yield Damage("an index is not of its archive", place, f"{len(expected)} {name}", f"{len(found)} {name}")
    elif (expected != found).any():
        row = int(np.argmax(expected != found))
        what = f"{name} of an index are not those of the archive's headers"
        yield Damage(what, f"{place}, entry {row}", str(expected[row]), str(found[row]))


def wholly_described(these: ShardList) -> bool:
    """Whether each shard has a checksum of its content."""
    return len(these.md5s) == len(these.shards) and None not in these.md5s
