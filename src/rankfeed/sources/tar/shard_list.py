"""The shards of a dataset: from paths, from Energon's ``.nv-meta``, or from a wids descriptor.

A description is not trusted: its counts are compared with the shards, and its names may not leave its directory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.extras import need
from rankfeed.sources.paths import Paths, braces, common_root, expand, is_one
from rankfeed.sources.tar.detect import META, is_energon, is_wids, tars_in
from rankfeed.storage import check_data_name, resolve_data_name
from rankfeed.storage.decodable import decodable

_MOST_BYTES = 1 << 28
#: Names that the patterns of one split may stand for.
_MOST = 1 << 20


@dataclass(frozen=True)
class ShardList:
    """Shards, and what a description says of them.

    Args:
        shards: paths.
        names: names in the description, or relative paths.
        counts: samples in each, to be checked; None if unknown.
        excluded: names of samples to leave out, ``shard/key``.
        where: path of the description; "" for none.
        sizes: bytes of each shard, if the description has them.
        md5s: hexadecimal MD5 of each shard, if the description has them.
    """

    shards: list[str]
    names: list[str]
    counts: list[int | None]
    excluded: frozenset[str] = field(default_factory=frozenset)
    where: str = ""
    sizes: list[int | None] = field(default_factory=list)
    md5s: list[str | None] = field(default_factory=list)

    @property
    def folder(self) -> str:
        """Directory of the description; "" without one."""
        return os.path.dirname(os.path.abspath(self.where)) if self.where else ""


def list_shards(where: Paths, split: str | None = None) -> ShardList:
    """The shards of a path, pattern or list, or of a description; ``split`` is a part that Energon's names."""
    if is_one(where):
        path = os.fspath(where)  # type: ignore[arg-type]
        if os.path.isdir(path) and is_energon(path):
            return read_energon(path, split)
    if split is not None:
        raise ArgumentError(
            "only folders that Energon prepared have splits",
            expected=f"a folder with {META}/split.yaml",
            found=split,
        )
    if is_one(where) and is_wids(path):
        return read_wids(path)
    shards: list[str] = []
    for each in expand(where):
        shards += tars_in(each) if os.path.isdir(each) else [each]
    if not shards:
        raise SourceError("no .tar files", where=where)
    shards = [os.path.abspath(each) for each in shards]
    root = common_root(shards)
    return ShardList(shards, [os.path.relpath(each, root) for each in shards], [None] * len(shards))


@decodable
class _WidsShard(msgspec.Struct):
    url: str
    nsamples: int
    filesize: int | None = None
    md5sum: str | None = None


@decodable
class _WidsDataset(msgspec.Struct):
    shardlist: list[_WidsShard] | None = None
    source_url: str | None = None
    base: str | None = None


@decodable
class _Wids(msgspec.Struct):
    wids_version: int
    shardlist: list[_WidsShard] = []
    datasets: list[_WidsDataset] = []
    base: str | None = None


def read_wids(path: str, *, check: bool = True) -> ShardList:
    """The shards of a wids descriptor; ``check`` compares the sizes of the files."""
    try:
        found = msgspec.json.decode(_content(path), type=_Wids)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise CorruptError("a wids descriptor is damaged", found=error, where=path) from error
    if found.wids_version != 1:
        raise SourceError("an unknown version of wids", expected="1", found=found.wids_version, where=path)
    pairs = [(shard, found.base) for shard in found.shardlist]
    for component in found.datasets:
        if component.shardlist is None:
            raise SourceError(
                "a wids descriptor refers to another",
                found=component.source_url,
                where=path,
                remedy="open that one; rankfeed.concat joins several",
            )
        pairs += [(shard, component.base) for shard in component.shardlist]
    if not pairs:
        raise SourceError("a wids descriptor names no shards", where=path)
    for shard, _ in pairs:
        check_data_name(shard.url, path)  # also behind a base
    folder = os.path.dirname(os.path.abspath(path))
    names = [f"{base}/{shard.url}" if base else shard.url for shard, base in pairs]
    shards = [resolve_data_name(folder, name, path) for name in names]
    if check:
        for place, (shard, _) in zip(shards, pairs, strict=True):
            _check_size(place, shard, path)
    return ShardList(
        shards,
        [shard.url for shard, _ in pairs],
        [shard.nsamples for shard, _ in pairs],
        where=path,
        sizes=[shard.filesize for shard, _ in pairs],
        md5s=[shard.md5sum for shard, _ in pairs],
    )


def _check_size(place: str, shard: _WidsShard, path: str) -> None:
    try:
        size = os.stat(place).st_size
    except OSError as error:
        raise SourceError("a shard is missing", found=error.strerror, where=f"{place}, named in {path}") from error
    if shard.filesize is not None and shard.filesize != size:
        raise CorruptError(
            "a shard has another size than its descriptor says",
            expected=f"{shard.filesize} bytes",
            found=f"{size} bytes",
            where=place,
            remedy="fetch the shard again; if it was changed, write a new descriptor with `wids-index create`",
        )


def read_energon(folder: str, split: str | None) -> ShardList:
    """The shards of a directory that Energon prepared; ``split`` is needed if it has several parts."""
    meta = Path(folder, META)
    info = _load_description(meta / ".info.json", meta / ".info.yaml")
    counts = info.get("shard_counts") if isinstance(info, dict) else None
    if not isinstance(counts, dict) or not all(
        isinstance(name, str) and isinstance(count, int) and count >= 0 for name, count in counts.items()
    ):
        raise CorruptError("Energon's description has no counts of shards", where=meta / ".info.json")
    parts = _load_description(meta / "split.yaml", meta / "split.json", missing={})
    names, excluded = _part(parts, split, meta) if parts else (list(counts), frozenset[str]())
    unknown = [name for name in names if name not in counts]
    if unknown:
        raise CorruptError(
            "a shard of the split is not among those that Energon counted",
            found=unknown[0],
            where=meta / "split.yaml",
            remedy="run `energon prepare` again",
        )
    shards = [resolve_data_name(os.path.abspath(folder), name, meta) for name in names]
    for shard in shards:
        if not os.path.isfile(shard):
            raise SourceError("a shard is missing", where=f"{shard}, named in {meta}")
    return ShardList(shards, names, [counts[name] for name in names], excluded, str(meta))


def _part(parts: Any, split: str | None, meta: Path) -> tuple[list[str], frozenset[str]]:
    """The names of the shards of a split, and the names that it excludes."""
    table = parts.get("split_parts") if isinstance(parts, dict) else None
    exclude = (parts.get("exclude") or []) if isinstance(parts, dict) else None
    if not isinstance(table, dict) or not _is_texts(exclude) or not all(map(_is_texts, table.values())):
        raise CorruptError("Energon's split has no lists of shards", where=meta / "split.yaml")
    chosen = [name for name, names in table.items() if names]
    if split is None and len(chosen) != 1:
        raise ArgumentError(
            "the dataset has several splits: choose one",
            expected="split=" + " or split=".join(map(repr, table)),
            where=meta / "split.yaml",
        )
    if split is not None and split not in table:
        raise ArgumentError("no such split", expected=" or ".join(map(repr, table)), found=repr(split), where=meta)
    excluded = frozenset(_expanded(exclude or [], meta))
    names = _expanded(table[split or chosen[0]], meta)
    return [name for name in names if name not in excluded], excluded


def _expanded(patterns: list[str], meta: Path) -> list[str]:
    names = list(islice((name for pattern in patterns for name in braces(pattern)), _MOST + 1))
    if len(names) > _MOST:
        raise CorruptError(
            "the patterns of Energon's split stand for too many names",
            expected=f"up to {_MOST}",
            found=", ".join(patterns)[:80],
            where=meta / "split.yaml",
        )
    return names


def _is_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _load_description(*places: Path, missing: Any = None) -> Any:
    """The content of the first of these files that exists: JSON, or the safe subset of YAML."""
    for place in places:
        if not place.is_file():
            continue
        content = _content(str(place))
        try:
            if place.suffix == ".json":
                return json.loads(content)
            yaml = need("yaml", extra="webdataset")
            try:
                return yaml.safe_load(content)
            except yaml.YAMLError as error:
                raise ValueError(str(error)) from error
        except (ValueError, RecursionError) as error:
            raise CorruptError("a description is damaged", found=str(error)[:200], where=place) from error
    return missing


def _content(path: str) -> bytes:
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            raise CorruptError("a description is too large", found=f"{os.path.getsize(path)} bytes", where=path)
        return Path(path).read_bytes()
    except OSError as error:
        raise SourceError("the file cannot be read", found=error, where=path) from error
