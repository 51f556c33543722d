"""WebDataset tar shards, read in place with random access.

A shard is memory-mapped and indexed once, so that a sample is found without reading the ones before it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_bool, check_choice, check_name, check_optional
from rankfeed.columns import Bytes, Column, Columns, Dense, Field, RowSlices
from rankfeed.errors import SourceError
from rankfeed.sources.paths import Paths
from rankfeed.sources.source import (
    BLOCK_BYTES,
    Int64,
    Source,
    check_columns,
    check_ids,
    even_blocks,
    reopen,
)
from rankfeed.sources.tar.columns import Members, MemberText, column_of_values, read_values
from rankfeed.sources.tar.decompress import decompressed
from rankfeed.sources.tar.index_cache import IndexCache
from rankfeed.sources.tar.npy_columns import NpyColumns
from rankfeed.sources.tar.schema import ColumnSpec, Decode, Missing, extensions_of, schema_of
from rankfeed.sources.tar.shard_list import list_shards
from rankfeed.sources.tar.shards import SampleNumbers, ShardSet, refuse_repeated_keys
from rankfeed.storage import DataFiles, digest_of
from rankfeed.storage.mapped import ReadHandle

#: Smaller datasets stay in the page cache: announcing reads would only cost time.
_PREFETCH_BYTES = 768 << 20
#: Batches that are not announced after one that was found in the page cache.
_BATCHES_BETWEEN_LOOKS = 15


class WebDatasetSource(Source):
    """WebDataset tar shards.

    Samples are those of WebDataset: consecutive members with equal names up to the first dot. Columns are
    ``__key__`` and one for each extension, in lower case.

    Args:
        where: a ``.tar`` file, a folder of them, a glob or brace pattern, a list of these; a folder that Energon
            prepared (``.nv-meta``); a wids descriptor (``.json``).
        columns: names of the columns to offer; None for all.
        allow_pickle: whether members that can run code may be read (``.pyd``, ``.pkl``, ``.pth``...).
        cache_dir: directory for indexes that cannot be stored beside their shards; None for ``~/.cache/rankfeed``.
        decode: True: by extension (see ``decoders``); False: the bytes; a function of extension and bytes; or a
            dict from extensions to: a function of the bytes, False for the bytes, or "object", "dense" or "ragged"
            for the kind of column that the decoded values make.
        missing: for samples that lack a member that others have: "error", "skip" the sample, or "mask": an empty
            value, and False in the column ``<extension>_valid``.
        duplicate_keys: for samples of one shard that are not adjacent and have the same key: "error", since it is
            mostly an archive that was not sorted by name, with samples in pieces; or "keep" each as a sample, as
            WebDataset does.
        split: a part of a dataset that Energon prepared.
        decompress: whether to keep decompressed copies of compressed shards in the cache directory.
        files: what another process of the job saw first; None for the process that opens.

    Raises:
        SourceError, CorruptError, UnsafeError, ArgumentError: the data are invalid; names file and offset.
    """

    default_shuffle: ClassVar[Literal["global", "window"]] = "global"
    files: DataFiles
    _batches_to_skip = 0

    def __init__(
        self,
        where: Paths,
        *,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        decode: Decode = True,
        missing: Missing = "error",
        duplicate_keys: Literal["error", "keep"] = "error",
        split: str | None = None,
        decompress: bool = False,
        files: DataFiles | None = None,
    ) -> None:
        self.where = _absolute(where)
        self._options: dict[str, Any] = {
            "columns": None if columns is None or isinstance(columns, str) else tuple(columns),
            "allow_pickle": allow_pickle,
            "cache_dir": None if cache_dir is None else os.path.abspath(cache_dir),
            "decode": decode,
            "missing": check_choice("missing", missing, get_args(Missing)),
            "duplicate_keys": check_choice("duplicate_keys", duplicate_keys, ("error", "keep")),
            "split": check_optional(check_name, "split", split),
            "decompress": check_bool("decompress", decompress),
        }
        listed = list_shards(self.where, split)
        if decompress:
            listed = decompressed(listed, cache_dir)
        self._shards = ShardSet(listed, IndexCache(cache_dir, within=listed.folder), files=files)
        self.files = self._shards.files
        if hasattr(os, "posix_fadvise") and sum(self._shards.sizes) > _PREFETCH_BYTES:
            self.prefetch_distance = 1
        if duplicate_keys == "error":
            refuse_repeated_keys(self._shards)
        extensions = extensions_of(self._shards)
        self._samples = SampleNumbers(self._shards)
        if not len(self):
            raise SourceError("the shards hold no samples", where=self.where)
        self._specs = schema_of(
            self._shards,
            extensions,
            columns,
            decode=decode,
            missing=missing,
            allow_pickle=allow_pickle,
            probe=self._probe,
        )
        if missing != "mask":
            needed = [spec.extension for spec in self._specs.values() if spec.role in ("member", "rate")]
            self._samples.check_missing(needed, skip=missing == "skip")
        self._npy_columns = {
            spec.extension: NpyColumns(spec.extension, spec.field)
            for spec in self._specs.values()
            if spec.decoder.kind == "npy" and spec.field.kind in ("dense", "ragged") and spec.role == "member"
        }

    def _probe(self, extension: str, count: int) -> list[Members]:
        ids = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64))
        return self._locate(ids, [extension])[1][extension]

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, (WebDatasetSource, self.where, {**self._options, "files": self.files}, self.fingerprint)

    def _num_samples(self) -> int:
        return int(self._samples.starts[-1])

    def __repr__(self) -> str:
        return f"WebDatasetSource({self.where!r}, {len(self)} samples)"

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        return {name: spec.field for name, spec in self._specs.items()}

    @cached_property
    def blocks(self) -> Int64:
        """Consecutive samples of about 4 MiB in a shard: int64."""
        sizes = zip(self._samples.counts.tolist(), self._shards.sizes, strict=True)
        return np.concatenate([even_blocks(rows, BLOCK_BYTES * rows // max(1, size)) for rows, size in sizes])

    @cached_property
    def fingerprint(self) -> str:
        """Digest of names, sizes, sample offsets, content samples, and the samples that are left out."""
        return digest_of(self._shards.fingerprint().encode(), *self._samples.digest_pieces())

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        ids = check_ids(sample_ids, len(self))
        names = list(self._specs) if columns is None else check_columns(columns, self.fields)
        self.files.check_open(at_intervals=True)
        specs = {name: self._specs[name] for name in names}
        extensions = dict.fromkeys(spec.extension for spec in specs.values() if spec.extension)
        samples, members = self._locate(ids, list(extensions))
        audio: dict[str, list[Any]] = {}
        out = {
            name: self._column(spec, samples, members.get(spec.extension, []), audio)
            for name, spec in specs.items()
        }
        return Columns(out, len(ids))

    def _locate(self, ids: Int64, extensions: Sequence[str]) -> tuple[list[Members], dict[str, list[Members]]]:
        """Samples by shard, and their members by extension."""
        samples: list[Members] = []
        members: dict[str, list[Members]] = {extension: [] for extension in extensions}
        none = np.empty(0, np.int64)
        for number, rows, slots in self._samples.places(ids):
            shard = self._shards.open(number)
            samples.append(Members(shard, rows, slots, none, none))
            for extension, some in members.items():
                starts, sizes = shard.index.locate(extension, rows)
                some.append(Members(shard, rows, slots, starts, sizes))
        return samples, members

    def _column(
        self, spec: ColumnSpec, samples: list[Members], parts: list[Members], audio: dict[str, list[Any]]
    ) -> Column:
        extension, decoder = spec.extension, spec.decoder
        if spec.role == "key":
            return Bytes(
                [RowSlices(*part.shard.index.key_runs(part.rows), part.slots) for part in samples], text=True
            )
        if spec.role == "valid":
            return Dense.of(_sizes(parts) >= 0)
        if decoder.decode is None:
            if decoder.kind == "text":
                return MemberText(parts, extension)
            return Bytes([part.runs() for part in parts])
        if decoder.kind == "audio":
            if extension not in audio:
                audio[extension] = read_values(parts, extension, decoder.decode)
            which, missing = (0, None) if spec.role == "member" else (1, 0)
            values = [missing if value is None else value[which] for value in audio[extension]]
            return column_of_values(spec.field, values, parts, extension)
        if extension in self._npy_columns:
            column = self._npy_columns[extension].column(parts)
            if column is not None:
                return column
        return column_of_values(spec.field, read_values(parts, extension, decoder.decode), parts, extension)

    def shards_of(self, sample_ids: npt.ArrayLike) -> list[str]:
        """The path of the shard that contains each sample."""
        numbers = self._samples.starts.searchsorted(check_ids(sample_ids, len(self)), side="right") - 1
        return [self._shards.paths[number] for number in numbers.tolist()]

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """Announce reads to the kernel, unless the samples are in the page cache."""
        if not self.prefetch_distance:
            return
        if self._batches_to_skip:
            self._batches_to_skip -= 1
            return
        is_cached = True
        for number, rows, _ in self._samples.places(check_ids(sample_ids, len(self))):
            offsets = self._shards.open(number).index.offsets
            with suppress(SourceError):  # the shard was moved or removed: it is read from its mapping
                file = ReadHandle(self._shards.paths[number])
                # If the first sample is cached, the others probably are.
                if len(rows) and not file.is_cached(int(offsets[rows[0]])):
                    is_cached = False
                    for first, last in zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True):
                        os.posix_fadvise(file.handle, first, last - first, os.POSIX_FADV_WILLNEED)
        self._batches_to_skip = _BATCHES_BETWEEN_LOOKS if is_cached else 0


def _sizes(parts: list[Members]) -> Int64:
    """Sizes of members in the order of the batch."""
    out = np.empty(sum(len(part.rows) for part in parts), np.int64)
    for part in parts:
        out[slice(None) if part.slots is None else part.slots] = part.sizes
    return out


def _absolute(where: Paths) -> Paths:
    """Absolute paths, so that a later change of the working directory does not matter."""
    if isinstance(where, (str, os.PathLike)):
        return os.path.abspath(where)
    return [os.path.abspath(each) for each in where]
