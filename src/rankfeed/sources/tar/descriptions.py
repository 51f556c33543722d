"""Indexes and descriptions that others made: Energon's ``.nv-meta`` and ``.tar.idx``, and the JSON of wids.

What they say is taken as a hint and checked: counts against the shards, offsets when they are used (``tar_lazy``).
"""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rankfeed.errors import ArgumentError, CorruptError, RankfeedError, SourceError
from rankfeed.sources.extras import need
from rankfeed.sources.paths import braces, files_in, head
from rankfeed.sources.tar.third_party_index import check_offsets
from rankfeed.storage import check_data_name, resolve_data_name
from rankfeed.storage.decodable import decodable

Int64 = npt.NDArray[np.int64]

META = ".nv-meta"
#: Largest description that is read, and names that its patterns may stand for.
_LARGEST, _MOST = 1 << 28, 1 << 20


@dataclass(frozen=True)
class Described:
    """Shards as somebody described them.

    Args:
        shards: their paths.
        names: what they are called in the description.
        counts: samples in each, to be checked; None where nothing is said.
        excluded: names of samples to leave out, ``shard/key``.
        where: the description's path.
        sizes, md5s: of the files, where a description has them: bytes, and hexadecimal digits.
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
        """Directory that the description names files of; "" without a description."""
        return os.path.dirname(os.path.abspath(self.where)) if self.where else ""


def is_energon(where: str) -> bool:
    """Whether a folder was prepared by Energon."""
    return any(os.path.isfile(os.path.join(where, META, name)) for name in (".info.json", ".info.yaml"))


def is_wids(where: str) -> bool:
    """Whether a file is a wids descriptor."""
    return where.endswith(".json") and os.path.isfile(where) and b'"wids_version"' in head(where, 1 << 20)


@decodable
class _Shard(msgspec.Struct):
    url: str
    nsamples: int
    filesize: int | None = None
    md5sum: str | None = None


@decodable
class _Component(msgspec.Struct):
    shardlist: list[_Shard] | None = None
    source_url: str | None = None
    base: str | None = None


@decodable
class _Wids(msgspec.Struct):
    wids_version: int
    shardlist: list[_Shard] = []
    datasets: list[_Component] = []
    base: str | None = None


def read_wids(path: str, *, check: bool = True) -> Described:
    """The shards of a wids descriptor; their sizes are checked here, their counts by whoever reads them.

    Args:
        path: of it.
        check: whether to look for the shards; else whoever asks does.

    Raises:
        CorruptError: it is none, or a shard has another size.
        SourceError: a shard is missing.
        UnsafeError: a name is absolute, contains ".." or is a URL.
    """
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
    names = [f"{base}/{shard.url}" if base else shard.url for shard, base in pairs]
    for shard, _ in pairs:
        check_data_name(shard.url, path)  # also behind a base
    shards = [resolve_data_name(os.path.dirname(os.path.abspath(path)), name, path) for name in names]
    for place, (shard, _) in zip(shards, pairs, strict=True):
        if check:
            _check_size(place, shard, path)
    return Described(
        shards,
        [shard.url for shard, _ in pairs],
        [shard.nsamples for shard, _ in pairs],
        where=path,
        sizes=[shard.filesize for shard, _ in pairs],
        md5s=[shard.md5sum for shard, _ in pairs],
    )


def _check_size(place: str, shard: _Shard, path: str) -> None:
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
            remedy="fetch the shard anew; or, if it was changed, make the descriptor anew by `wids-index create`",
        )


def read_energon(folder: str, split: str | None) -> Described:
    """The shards of a folder that Energon prepared.

    Args:
        folder: it.
        split: a part named in its ``split.yaml``; None for the only one, or for all where there is no such file.

    Raises:
        ArgumentError: no such part, or several and none chosen.
        CorruptError, UnsafeError, SourceError: a description is damaged, or leads elsewhere.
    """
    meta = Path(folder, META)
    info = _load(meta / ".info.json", meta / ".info.yaml")
    counts = info.get("shard_counts") if isinstance(info, dict) else None
    if not isinstance(counts, dict) or not all(
        isinstance(name, str) and isinstance(count, int) and count >= 0 for name, count in counts.items()
    ):
        raise CorruptError("Energon's description has no counts of shards", where=meta / ".info.json")
    parts = _load(meta / "split.yaml", meta / "split.json", missing={})
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
    return Described(shards, names, [counts[name] for name in names], excluded, str(meta))


def _part(parts: Any, split: str | None, meta: Path) -> tuple[list[str], frozenset[str]]:
    """The names of the shards of a split, and what is left out of them."""
    table = parts.get("split_parts") if isinstance(parts, dict) else None
    exclude = (parts.get("exclude") or []) if isinstance(parts, dict) else None
    if not isinstance(table, dict) or not _texts(exclude) or not all(_texts(names) for names in table.values()):
        raise CorruptError("Energon's split has no lists of shards", where=meta / "split.yaml")
    chosen = [name for name, names in table.items() if names]
    if split is None and len(chosen) != 1:
        raise ArgumentError(
            "the data set is split, and it is not said which part is meant",
            expected="split=" + " or split=".join(map(repr, table)),
            where=meta / "split.yaml",
        )
    if split is not None and split not in table:
        raise ArgumentError("no such split", expected=" or ".join(map(repr, table)), found=repr(split), where=meta)
    leave_out = frozenset(_spelled(exclude or [], meta))
    names = _spelled(table[split or chosen[0]], meta)
    return [name for name in names if name not in leave_out], leave_out


def _spelled(patterns: list[str], meta: Path) -> list[str]:
    names = list(islice((name for pattern in patterns for name in braces(pattern)), _MOST + 1))
    if len(names) > _MOST:
        raise CorruptError(
            "Energon's split stands for an absurd number of names",
            expected=f"up to {_MOST}",
            found=", ".join(patterns)[:80],
            where=meta / "split.yaml",
        )
    return names


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _load(*places: Path, missing: Any = None) -> Any:
    """The content of the first of these files that is there, JSON or YAML; YAML's safe subset only."""
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
        if os.path.getsize(path) > _LARGEST:
            raise CorruptError(
                "a description is absurdly large", found=f"{os.path.getsize(path)} bytes", where=path
            )
        return Path(path).read_bytes()
    except OSError as error:
        raise SourceError("the file cannot be read", found=error, where=path) from error


def foreign_offsets(tar: str, meta: str | None = None, name: str | None = None) -> tuple[Int64, str] | None:
    """Where the samples of a shard begin, as others say; None where nobody does, or what is said cannot be.

    Args:
        tar: path of the shard.
        meta: Energon's folder of descriptions, whose data base is asked where there is no ``.tar.idx``.
        name: of the shard in there.

    Returns:
        int64 [samples + 1], and where it comes from.
    """
    beside = tar + ".idx"
    try:
        if os.path.isfile(beside):
            content = _content(beside)
            if not len(content) % 8 and content:
                offsets = np.frombuffer(content, "<u8").astype(np.int64)
                check_offsets(offsets, tar, beside)
                return offsets, beside
        elif meta is not None and name is not None:
            found = _from_database(Path(meta, "index.sqlite"), meta, name)
            if found is not None:
                check_offsets(found, tar, f"{meta}/index.sqlite")
                return found, f"{meta}/index.sqlite"
    except RankfeedError:
        return None
    return None


def _from_database(database: Path, meta: str, name: str) -> Int64 | None:
    """The offsets of a shard in Energon's data base, where the samples in it lie end to end."""
    if not database.is_file():
        return None
    names = list(_load(Path(meta, ".info.json"), Path(meta, ".info.yaml"))["shard_counts"])
    try:
        connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            # Reading a view runs whatever query it stands for, also one without an end.
            kind = connection.execute("SELECT type FROM sqlite_master WHERE name = 'samples'").fetchone()
            if kind != ("table",):
                return None
            rows = connection.execute(
                "SELECT byte_offset, byte_size FROM samples WHERE tar_file_id = ? ORDER BY sample_index",
                (names.index(name),),
            ).fetchall()
        finally:
            connection.close()
        table = np.array(rows, np.int64).reshape(-1, 2)
    except (sqlite3.Error, ValueError, TypeError, OverflowError):
        return None
    if not len(table):
        return None
    return np.append(table[:, 0], table[-1].sum())


def tars_in(folder: str) -> list[str]:
    """The shards of a folder."""
    return files_in(folder, (".tar",))
