"""Datasets that `rankfeed.write` wrote: Arrow IPC shards and a manifest, read as numpy views of mapped files."""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from rankfeed.columns.chunk_groups import by_chunk
from rankfeed.columns.columns import Column, ColumnBuffer, columns_from_buffers
from rankfeed.errors import CorruptError
from rankfeed.sources.source import Int64, Source, check_columns, even_blocks, starts_of
from rankfeed.storage.arrow_shard import REMEDY, read_shard
from rankfeed.storage.checksum import digest_of, file_digest
from rankfeed.storage.data_files import DataFiles
from rankfeed.storage.file_errors import file_errors
from rankfeed.storage.manifest import MANIFEST_NAME, Manifest, ShardInfo, load_manifest
from rankfeed.storage.mapped import Bytes, check_shard_size, map_file


class PackedSource(Source):
    """A dataset that `rankfeed.write` wrote."""

    reads_in_place = True
    files: DataFiles

    def __init__(self, path: str | Path, *, columns: Sequence[str] | None = None) -> None:
        self.path = os.path.abspath(path)  # independent of later changes of the working directory
        manifest_file = DataFiles([os.path.join(self.path, MANIFEST_NAME)])
        #: Counts, fields and checksums.
        self.manifest = load_manifest(self.path)
        self.logical_types = self.manifest.logical_types or {}
        fields = {name: self.manifest.fields[name] for name in check_columns(columns, self.manifest.fields)}
        shards = self.manifest.shards
        self._starts = starts_of([shard.rows for shard in shards])
        paths = [os.path.join(self.path, shard.path) for shard in shards]
        for shard, shard_path in zip(shards, paths, strict=True):
            check_shard_size(shard_path, shard.bytes, MANIFEST_NAME, REMEDY)
        self.files = DataFiles(paths, content=partial(_matches_checksum, self.path, self.manifest))
        # The manifest is removed before a shard is replaced: these are its shards.
        manifest_file.check(0)
        blocks = np.concatenate([even_blocks(shard.rows, shard.block_rows) for shard in shards])
        fingerprint = digest_of(self.manifest.fingerprint.encode(), self.files.fingerprint.encode())
        self._init_samples(self.path, fields, blocks, fingerprint)

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        """Pointers into the mapped shards."""
        groups = by_chunk(ids, self._starts)
        shards = [self.files.get(index, self._read_shard) for index in groups.numbers]
        return columns_from_buffers(self._fields, names, groups, shards)

    def _read_shard(self, data: Bytes, index: int) -> dict[str, ColumnBuffer]:
        return read_shard(data, self.manifest.fields, self.manifest.shards[index].rows, self.files.path(index))


def _matches_checksum(path: str, manifest: Manifest, index: int) -> bool:
    shard = manifest.shards[index]
    with suppress(OSError):
        return file_digest(Path(path, shard.path)) == shard.xxh3
    return False


def check_shard(folder: str | Path, manifest: Manifest, shard: ShardInfo) -> None:
    """Read a whole shard; a SourceError if it differs from size, checksum or columns in the manifest."""
    path = Path(folder, shard.path)
    check_shard_size(path, shard.bytes, MANIFEST_NAME, REMEDY)
    with file_errors(path):
        digest = file_digest(path)
    if digest != shard.xxh3:
        raise CorruptError(
            "a shard is damaged", expected=f"checksum {shard.xxh3}", found=f"checksum {digest}", where=path
        )
    read_shard(map_file(path), manifest.fields, shard.rows, str(path))
