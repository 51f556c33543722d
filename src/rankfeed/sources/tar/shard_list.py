"""The shards of a dataset: from paths, from Energon's ``.nv-meta``, or from a wids descriptor.

A description is not trusted: its counts are compared with the shards, and its names may not leave its directory.
"""

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from rankfeed._util.imports import need
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.formats import ENERGON_FOLDER, is_energon, is_wids
from rankfeed.sources.paths import Paths, braces, common_root, expand, files_at
from rankfeed.storage.commit import decodable
from rankfeed.storage.file_errors import file_errors
from rankfeed.storage.mapped import check_shard_size
from rankfeed.storage.untrusted import check_data_name, read_json, resolve_data_name

_MAX_YAML_BYTES = 1 << 28
#: Names that the patterns of one split may expand to.
_MAX_NAMES = 1 << 20

_Description = TypeVar("_Description")


class ListedShard(NamedTuple):
    """A shard, and what a description says about it; None if it does not."""

    path: str
    name: str  #: in the description, or relative path
    samples: int | None = None  #: to be checked
    size: int | None = None  #: bytes
    md5: str | None = None  #: hexadecimal


@dataclass(frozen=True)
class ShardList:
    """The shards of a dataset."""

    shards: list[ListedShard]
    excluded: frozenset[str] = frozenset()  #: samples to leave out, ``shard/key``
    where: str = ""  #: path of the description; "" for none

    @property
    def paths(self) -> list[str]:
        return [shard.path for shard in self.shards]

    @property
    def folder(self) -> str:
        """Directory of the description; "" without one."""
        return os.path.dirname(os.path.abspath(self.where)) if self.where else ""


def list_shards(where: Paths, split: str | None = None) -> ShardList:
    """The shards of a path, pattern or list, or of a description; ``split`` is a part that Energon's names."""
    paths = expand(where)
    if len(paths) == 1 and is_energon(paths[0]):
        return _read_energon(paths[0], split)
    if split is not None:
        raise ArgumentError(
            "only folders that Energon prepared have splits",
            expected=f"a folder with {ENERGON_FOLDER}/split.yaml",
            found=split,
        )
    if len(paths) == 1 and is_wids(paths[0]):
        return read_wids(paths[0])
    shards = [os.path.abspath(path) for path in files_at(paths, (".tar",))]
    root = common_root(shards)
    return ShardList([ListedShard(path, os.path.relpath(path, root)) for path in shards])


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
    descriptor = read_json(path, _Wids)
    if descriptor.wids_version != 1:
        raise SourceError("an unknown version of wids", expected="1", found=descriptor.wids_version, where=path)
    listed = ShardList([], where=path)
    for component in [_WidsDataset(descriptor.shardlist, base=descriptor.base), *descriptor.datasets]:
        if component.shardlist is None:
            raise SourceError(
                "a wids descriptor refers to another",
                found=component.source_url,
                where=path,
                remedy="open that one; rankfeed.concat joins several",
            )
        for shard in component.shardlist:
            check_data_name(shard.url, path)  # also behind a base
            name = f"{component.base}/{shard.url}" if component.base else shard.url
            place = resolve_data_name(listed.folder, name, path)
            if check:
                check_shard_size(place, shard.filesize, path)
            listed.shards.append(ListedShard(place, shard.url, shard.nsamples, shard.filesize, shard.md5sum))
    if not listed.shards:
        raise SourceError("a wids descriptor names no shards", where=path)
    return listed


@decodable
class _EnergonInfo(msgspec.Struct):
    shard_counts: dict[str, Annotated[int, msgspec.Meta(ge=0)]]


@decodable
class _EnergonSplit(msgspec.Struct):
    split_parts: dict[str, list[str]]
    exclude: list[str] | None = None


def _read_energon(folder: str, split: str | None) -> ShardList:
    """The shards of a directory that Energon prepared; ``split`` is needed if it has several parts."""
    meta = Path(folder, ENERGON_FOLDER)
    info = _read_description(_EnergonInfo, meta / ".info.json", meta / ".info.yaml")
    parts = _read_description(_EnergonSplit, meta / "split.yaml", meta / "split.json")
    if info is None:
        raise CorruptError("Energon's description has no counts of shards", where=meta)
    counts = info.shard_counts
    names, excluded, where = list(counts), frozenset[str](), meta / "split.yaml"
    if parts is not None:
        table = parts.split_parts
        chosen = [part for part, patterns in table.items() if patterns] if split is None else [split]
        if len(chosen) != 1 or chosen[0] not in table:
            raise ArgumentError(
                "the dataset has several splits: choose one" if split is None else "no such split",
                expected="split=" + " or split=".join(map(repr, table)),
                found=split,
                where=where,
            )
        excluded = frozenset(_expanded(parts.exclude or [], where))
        names = [name for name in _expanded(table[chosen[0]], where) if name not in excluded]
    if missing := [name for name in names if name not in counts]:
        raise CorruptError(
            "a shard of the split is not among those that Energon counted",
            found=missing[0],
            where=where,
            remedy="run `energon prepare` again",
        )
    root = os.path.abspath(folder)
    shards = [ListedShard(resolve_data_name(root, name, meta), name, counts[name]) for name in names]
    for shard in shards:
        check_shard_size(shard.path, None, meta)
    return ShardList(shards, excluded, str(meta))


def _expanded(patterns: list[str], where: Path) -> list[str]:
    names = list(islice((name for pattern in patterns for name in braces(pattern)), _MAX_NAMES + 1))
    if len(names) > _MAX_NAMES:
        raise CorruptError(
            "the patterns of Energon's split expand to too many names",
            expected=f"up to {_MAX_NAMES}",
            found=", ".join(patterns)[:80],
            where=where,
        )
    return names


def _read_description(kind: type[_Description], *places: Path) -> _Description | None:
    """The first of these files that exists: JSON, or the safe subset of YAML; None if it is empty."""
    path = next((place for place in places if place.is_file()), None)
    if path is None or path.suffix == ".json":
        return None if path is None else read_json(path, kind)
    yaml = need("yaml", extra="webdataset")
    with file_errors(path, Exception):  # for invalid values PyYAML raises KeyError, AttributeError and others too
        if path.stat().st_size > _MAX_YAML_BYTES:
            raise ValueError(f"more than {_MAX_YAML_BYTES} bytes")
        # Not msgspec.yaml: the C loader that it uses ends the process if lists are nested too deeply.
        return msgspec.convert(yaml.safe_load(path.read_bytes()), kind | None)
