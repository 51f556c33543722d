"""Packed data sets: Arrow IPC shards, memory-mapped and read as numpy views."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes, Column, Columns, Dense, Field, Ragged, Rows, Runs
from rankfeed.errors import CorruptError
from rankfeed.sources.source import Source, by_chunk, check_columns, check_ids
from rankfeed.storage import Manifest, file_digest, load_manifest, map_file, touched
from rankfeed.storage.arrow_shard import REMEDY, Stored, read_shard
from rankfeed.storage.manifest import Shard

Int64 = npt.NDArray[np.int64]

#: Shards that are held open; what a batch points into stays, however many others are opened.
OPEN_SHARDS = 256


class PackedSource(Source):
    """A folder that `pack` wrote.

    Args:
        path: of the folder.
        columns: names of those to offer; None for all.

    Raises:
        SourceError, CorruptError, UnsafeError: there is no manifest, or it is not right.

    Example:
        >>> import tempfile, rankfeed as rf
        >>> source = rf.pack([{"x": 1}, {"x": 2}], tempfile.mkdtemp() + "/packed", progress=False)
        >>> len(source), source[1]["x"]
        (2, 2)
    """

    def __init__(self, path: str | Path, *, columns: Sequence[str] | None = None) -> None:
        self.path = str(path)
        self._wanted = None if columns is None else tuple(columns)
        self._open_manifest()

    def _open_manifest(self) -> None:
        self._manifest: Manifest = load_manifest(self.path)
        names = check_columns(self._wanted, self._manifest.fields)
        self._fields = {name: self._manifest.fields[name] for name in names}
        self._starts = np.zeros(len(self._manifest.shards) + 1, np.int64)
        np.cumsum([shard.rows for shard in self._manifest.shards], out=self._starts[1:])
        self._open: OrderedDict[int, dict[str, Stored]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._wanted, self.fingerprint)

    def __len__(self) -> int:
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
        """Of counts, schema and checksums."""
        return self._manifest.fingerprint

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples: pointers into the mapped shards; nothing is copied.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or a shard cannot be read.
            CorruptError: a shard is missing or damaged.
        """
        ids = check_ids(sample_ids, len(self))
        names = list(self._fields) if columns is None else check_columns(columns, self._fields)
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for number, rows, slots in by_chunk(ids, self._starts):
            stored = self._shard(number)
            for name in names:
                parts[name].append(self._part(stored[name], rows, slots, number, name))
        return Columns({name: _column(self._fields[name], part) for name, part in parts.items()}, len(ids))

    def _part(self, stored: Stored, rows: Int64, slots: Int64 | None, number: int, name: str) -> Rows | Runs:
        values, offsets = stored.values, stored.offsets
        if offsets is None:
            touched(len(rows) * values[:1].nbytes, len(rows))
            return Rows(values, rows, slots)
        starts, ends = offsets[rows], offsets[rows + 1]
        lengths = ends - starts
        if len(rows) and (int(starts.min()) < 0 or int(lengths.min()) < 0 or int(ends.max()) > len(values)):
            bad = int(rows[np.flatnonzero((starts < 0) | (lengths < 0) | (ends > len(values)))[0]])
            raise CorruptError(
                "a shard is damaged: a row lies outside its column",
                expected=f"within 0 and {len(values)}",
                found=f"{offsets[bad]} to {offsets[bad + 1]} for row {bad}",
                where=f"{self._place(number)}, column {name!r}",
                remedy=REMEDY,
            )
        touched(int(lengths.sum()) * values[:1].nbytes + 8 * len(rows), 2 * len(rows))
        return Runs(values, starts, lengths, slots)

    def _place(self, number: int) -> Path:
        return Path(self.path, self._manifest.shards[number].path)

    def _shard(self, number: int) -> dict[str, Stored]:
        """The columns of a shard; opened where it is not open."""
        with self._lock:
            found = self._open.get(number)
            if found is not None:
                self._open.move_to_end(number)
                return found
        opened = self._open_shard(number)  # outside the lock: others go on reading; two openings do no harm
        with self._lock:
            self._open[number] = opened
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        return opened

    def _open_shard(self, number: int) -> dict[str, Stored]:
        shard, place = self._manifest.shards[number], self._place(number)
        if not place.is_file():
            raise CorruptError(
                "a shard is missing", expected=f"{shard.bytes} bytes", found="no file", where=place, remedy=REMEDY
            )
        data = map_file(place)
        if len(data) != shard.bytes:
            raise CorruptError(
                "a shard has another size than its data set says",
                expected=f"{shard.bytes} bytes",
                found=f"{len(data)} bytes",
                where=place,
                remedy=REMEDY,
            )
        return read_shard(data, self._manifest.fields, shard.rows, str(place))


def _reopen(path: str, columns: tuple[str, ...] | None, fingerprint: str) -> PackedSource:
    source = PackedSource(path, columns=columns)
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
    return np.array([shard.block_rows] * full + [rest] * (rest > 0), np.int64)


def _column(field: Field, parts: list[Any]) -> Column:
    if field.kind == "dense":
        return Dense(parts)
    if field.kind == "ragged":
        return Ragged(parts)
    return Bytes(parts, text=field.kind == "str")


@dataclass(frozen=True)
class VerifyReport:
    """What `verify_packed` found.

    Args:
        shards: how many were read.
        bytes: in all of them.
        damaged: for each shard that is not as it was packed, its path and what is wrong.
    """

    shards: int
    bytes: int
    damaged: list[str]


def verify_packed(path: str | Path, progress: Callable[[float], None] | None = None) -> VerifyReport:
    """Read all bytes of a packed data set and compare sizes and checksums.

    Args:
        path: of the folder.
        progress: called with the share that is done, up to 1.

    Raises:
        SourceError, CorruptError, UnsafeError: the manifest is missing or not right.
    """
    manifest = load_manifest(path)
    total, done, lock = sum(shard.bytes for shard in manifest.shards), 0, threading.Lock()

    def step(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            if progress is not None:
                progress(done / total)

    def check(shard: Shard) -> str | None:
        place = Path(path, shard.path)
        try:
            size = place.stat().st_size
            if size != shard.bytes:
                return f"{shard.path}: {size} bytes instead of {shard.bytes}"
            digest = file_digest(place, step)
        except OSError as error:
            return f"{shard.path}: {error.strerror or error}"
        return None if digest == shard.xxh3 else f"{shard.path}: checksum {digest} instead of {shard.xxh3}"

    # Reading and hashing release the GIL.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        damaged = [problem for problem in pool.map(check, manifest.shards) if problem is not None]
    return VerifyReport(len(manifest.shards), total, damaged)
