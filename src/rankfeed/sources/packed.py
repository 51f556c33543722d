"""Packed data sets: Arrow IPC shards, memory-mapped and read as numpy views."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Columns, Field, Stored, column_of_parts
from rankfeed.errors import CorruptError
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths
from rankfeed.sources.source import Source, by_chunk, check_columns, check_ids
from rankfeed.storage import (
    MANIFEST_NAME,
    DataFiles,
    Manifest,
    check_whole,
    digest_of,
    file_digest,
    load_manifest,
    map_file,
    mapped,
    touched,
)
from rankfeed.storage.arrow_shard import REMEDY, read_shard
from rankfeed.storage.kept import Kept
from rankfeed.storage.manifest import Shard
from rankfeed.storage.region import File, Region

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

#: Shards that are held open; what a batch points into stays, however many others are opened.
OPEN_SHARDS = 256
#: From this many bytes a row on (on average), a call to read it costs less than seeing its pages anew.
_LARGE_ROW = 1024


class PackedSource(Source):
    """A folder that `write` wrote.

    Args:
        path: of the folder.
        columns: names of those to offer; None for all.
        files: what another process of the job saw first; None for the process that opens.

    Raises:
        SourceError, CorruptError, UnsafeError: there is no manifest, or it is not right.

    Examples:
        >>> import tempfile, rankfeed as rf
        >>> source = rf.write([{"x": 1}, {"x": 2}], tempfile.mkdtemp() + "/packed", progress=False)
        >>> len(source), int(source[1]["x"])
        (2, 2)
    """

    files: DataFiles

    def __init__(
        self, path: str | Path, *, columns: Sequence[str] | None = None, files: DataFiles | None = None
    ) -> None:
        self.path = os.path.abspath(path)  # whoever changes the working directory later still reads the same
        self._wanted = None if columns is None else tuple(columns)
        manifest_file = DataFiles([os.path.join(self.path, MANIFEST_NAME)])
        self._open_manifest()
        for number in range(len(self._manifest.shards)):
            self._check_file(number)
        paths = [os.path.join(self.path, shard.path) for shard in self._manifest.shards]
        self.files = DataFiles(paths) if files is None else files.reopened(paths)
        self.files.content = partial(_has_its_checksum, self.path, self._manifest)
        manifest_file.check(0)  # it goes before the first shard is replaced: these are its shards

    def _open_manifest(self) -> None:
        self._manifest: Manifest = load_manifest(self.path)
        names = check_columns(self._wanted, self._manifest.fields)
        self._fields = {name: self._manifest.fields[name] for name in names}
        self._starts = np.zeros(len(self._manifest.shards) + 1, np.int64)
        np.cumsum([shard.rows for shard in self._manifest.shards], out=self._starts[1:])
        self._bytes = sum(shard.bytes for shard in self._manifest.shards)
        self._open: Kept[_Shard] = Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._wanted, self.fingerprint, self.files)

    def _num_samples(self) -> int:
        return self._manifest.num_rows

    def __repr__(self) -> str:
        return f"PackedSource({self.path!r}, {len(self)} samples)"

    @property
    def manifest(self) -> Manifest:
        """Counts, fields and checksums."""
        return self._manifest

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return self._fields

    @cached_property
    def blocks(self) -> Int64:
        """Samples in each block of about 4 MiB: int64."""
        return np.concatenate([_block_rows(shard) for shard in self._manifest.shards])

    @cached_property
    def fingerprint(self) -> str:
        """Of counts, schema, checksums, and what the files themselves hold."""
        return digest_of(self._manifest.fingerprint.encode(), self.files.fingerprint.encode())

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples: pointers into the shards; nothing is copied yet.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or a shard cannot be read.
            CorruptError: a shard is missing or damaged.
        """
        ids = check_ids(sample_ids, len(self))
        names = list(self._fields) if columns is None else check_columns(columns, self._fields)
        self.files.check_open(at_intervals=True)
        parts: dict[str, list[Any]] = {name: [] for name in names}
        wanted = by_chunk(ids, self._starts)
        for number, rows, slots in wanted:
            shard = self._shard(number)
            if len(wanted) <= mapped.LOOKS:
                check_whole(shard.data, shard.place)
            for name in names:
                parts[name].append(shard.stored[name].part(rows, slots, shard.regions.get(name)))
        fetched = {name: column_of_parts(self._fields[name], part) for name, part in parts.items()}
        touched(lambda: sum(column.nbytes for column in fetched.values()), len(ids) * len(names))
        return Columns(fetched, len(ids))

    def _place(self, number: int) -> Path:
        return Path(self.path, self._manifest.shards[number].path)

    def _shard(self, number: int) -> _Shard:
        """The columns of a shard; opened where it is not open."""
        return self._open.get(number, lambda: self._open_shard(number), most=OPEN_SHARDS)

    def _open_shard(self, number: int) -> _Shard:
        shard, place = self._manifest.shards[number], self._place(number)
        data = map_file(place)
        self.files.opened(number)
        _check_size(len(data), shard, place)  # of the very file that is mapped
        stored = read_shard(data, self._manifest.fields, shard.rows, str(place))
        # Where data are more than may stay mapped, large rows are read by calls.
        exceeds = self._bytes > mapped.RESIDENT_BYTES
        large = [name for name, each in stored.items() if exceeds and _row_bytes(each) >= _LARGE_ROW]
        if not large:
            return _Shard(place, data, stored, {})
        file = File(place)
        self.files.check(number)
        start = data.ctypes.data
        regions = {name: Region(file, stored[name].values.ctypes.data - start) for name in large}
        return _Shard(place, data, stored, regions)

    def _check_file(self, number: int) -> None:
        shard, place = self._manifest.shards[number], self._place(number)
        try:
            size = place.stat().st_size
        except OSError as error:
            raise CorruptError(
                "a shard is missing",
                expected=f"{shard.bytes} bytes",
                found=error.strerror,
                where=place,
                remedy=REMEDY,
            ) from error
        _check_size(size, shard, place)


def _check_size(size: int, shard: Shard, place: Path) -> None:
    if size != shard.bytes:
        raise CorruptError(
            "a shard has another size than its data set says",
            expected=f"{shard.bytes} bytes",
            found=f"{size} bytes",
            where=place,
            remedy=REMEDY,
        )


def _has_its_checksum(path: str, manifest: Manifest, number: int) -> bool:
    """Whether a shard is the one that was packed: all of it is read."""
    shard = manifest.shards[number]
    try:
        return file_digest(Path(path, shard.path)) == shard.xxh3
    except OSError:
        return False


def _reopen(path: str, columns: tuple[str, ...] | None, fingerprint: str, files: DataFiles) -> PackedSource:
    source = PackedSource(path, columns=columns, files=files)
    if source.fingerprint != fingerprint:
        raise CorruptError(
            "the data set was replaced while it was in use",
            expected=fingerprint,
            found=source.fingerprint,
            where=path,
            remedy="start the job again",
        )
    return source


def _block_rows(shard: Shard) -> Int64:
    full, rest = divmod(shard.rows, shard.block_rows)
    return np.append(np.full(full, shard.block_rows, np.int64), [rest] if rest else []).astype(np.int64)


@dataclass(frozen=True)
class _Shard:
    """An open shard: its columns, and where to read those that are not read through the mapping."""

    place: Path
    data: Bytes
    stored: dict[str, Stored]
    regions: dict[str, Region]


def _row_bytes(stored: Stored) -> int:
    """Bytes of a row, on average."""
    return stored.nbytes // max(1, stored.rows)


def check_shard(folder: str | Path, manifest: Manifest, shard: Shard, step: Callable[[int], None]) -> None:
    """Read all bytes of a shard; compare size, checksum and what is in it with the manifest.

    Args:
        folder: of the data set.
        manifest: of it.
        shard: which.
        step: called with the number of bytes of each piece that is read.

    Raises:
        SourceError, CorruptError: it cannot be read, or is not as it was packed.
    """
    place = Path(folder, shard.path)
    try:
        _check_size(place.stat().st_size, shard, place)
        digest = file_digest(place, step)
    except OSError as error:
        summary = "a shard cannot be read" if place.exists() else "a shard is missing"
        raise CorruptError(summary, expected=f"{shard.bytes} bytes", found=error.strerror, where=place) from error
    if digest != shard.xxh3:
        raise CorruptError(
            "a shard is damaged", expected=f"checksum {shard.xxh3}", found=f"checksum {digest}", where=place
        )
    read_shard(map_file(place), manifest.fields, shard.rows, str(place))


def is_packed(where: Paths) -> bool:
    """Whether this is a folder that `write` finished."""
    return isinstance(where, (str, os.PathLike)) and Path(where, MANIFEST_NAME).is_file()


def open_packed(where: Any, *, columns: Sequence[str] | None = None) -> PackedSource:
    """Open a folder that `pack` wrote.

    Raises:
        SourceError, CorruptError, UnsafeError: see `PackedSource`.
    """
    return PackedSource(os.fspath(where), columns=columns)


FORMAT = Format("packed", "a folder that rankfeed packed", is_packed, open_packed)
