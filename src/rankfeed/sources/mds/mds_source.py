"""MDS datasets (MosaicML Streaming), read in place: shards are mapped, or decompressed as a whole."""

import os
from collections.abc import Sequence
from functools import partial

import numpy as np

from rankfeed._util.validate import check_bool
from rankfeed.columns.chunk_groups import by_chunk
from rankfeed.columns.columns import Column, ColumnBuffer, Part, column_from_parts
from rankfeed.columns.pointers import file_of
from rankfeed.errors import UnsafeError
from rankfeed.sources.chunked import CACHE_BYTES, ChunkedSource
from rankfeed.sources.formats import MDS_INDEX_NAME, mds_folders
from rankfeed.sources.mds.encodings import PICKLE, encoding_of
from rankfeed.sources.mds.mds_index import MdsShard, read_indexes
from rankfeed.sources.mds.shard import locate, read_shard
from rankfeed.sources.paths import Paths, label
from rankfeed.sources.scattered import ByteSlices
from rankfeed.sources.source import BLOCK_BYTES, Int64, check_columns
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import DataFiles
from rankfeed.storage.mapped import check_not_truncated, map_file

#: Samples that are probed for the fields of arrays.
_PROBES = 16


class MdsSource(ChunkedSource):
    """Directories that MosaicML Streaming's MDSWriter wrote.

    Args:
        where: a directory with an ``index.json`` (also one merged from directories below it), or a list of them.
        columns: names of the columns to offer; only these are decoded; None for all.
        decode: whether images, JSON and pickles are decoded, or left as bytes.
        objects: columns of arrays that differ in dtype or shape, to be delivered as objects.
        allow_pickle: whether pickled columns may be read. Reading them runs code that they contain.
        check: whether uncompressed shards are compared with the checksums of the index, each when it is first
            opened. Compressed ones always are.
        cache_bytes: decompressed bytes to keep, shared by the threads of a process.

    Errors are those of `rankfeed.open`.
    """

    files: DataFiles

    def __init__(
        self,
        where: Paths,
        *,
        columns: Sequence[str] | None = None,
        decode: bool = True,
        objects: Sequence[str] = (),
        allow_pickle: bool = False,
        check: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        decode, self._check = check_bool("decode", decode), check_bool("check", check)
        folders = [os.path.abspath(folder) for folder in mds_folders(where)]
        index = read_indexes(folders)
        self._shards = index.shards
        self.files = DataFiles([shard.path for shard in self._shards])
        names = check_columns(columns, index.columns)
        check_columns(objects, index.columns)
        place = os.path.join(folders[0], MDS_INDEX_NAME)
        self._encodings = {
            name: encoding_of(index.columns[name][0], name, place, decode=decode, as_objects=name in objects)
            for name in names
        }
        for name, encoding in self._encodings.items():
            if encoding is PICKLE and not allow_pickle:
                raise UnsafeError(
                    "a column is pickled: reading it runs code that it contains",
                    where=f"{place}, column {name!r}",
                    remedy="leave it out with columns=, or pass allow_pickle=True if you trust its author",
                )
        self.decoded_bytes = sum(shard.raw_bytes for shard in self._shards if shard.compression is not None)
        self._init_chunks([shard.samples for shard in self._shards], cache_bytes)
        probes = np.unique(np.linspace(0, self._shards[0].samples - 1, _PROBES).astype(np.int64))
        fields = {
            name: encoding.field(partial(self._values, 0, probes, [name]))
            for name, encoding in self._encodings.items()
        }
        blocks = np.concatenate([_block_rows(shard) for shard in self._shards])
        fingerprint = digest_of(index.digest, self.files.fingerprint.encode())
        self._init_samples(label(folders), fields, blocks, fingerprint)

    def _values(self, index: int, rows: Int64, names: Sequence[str]) -> list[ByteSlices]:
        shard, content = self._shards[index], self._content(index, len(rows))
        places = locate(content, rows, shard)

        def where(row: int, name: str) -> str:
            return f"{shard.path}, sample {rows[row]}, column {name!r}"

        return [ByteSlices(content.memory, *places[name], None, partial(where, name=name)) for name in names]

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        parts: dict[str, list[Part]] = {name: [] for name in names}
        groups = by_chunk(ids, self._chunk_starts)
        for index, rows, _ in groups:
            located = self._values(index, rows, names)
            for name, values in zip(names, located, strict=True):
                parts[name].append(self._encodings[name].part(self._fields[name], values))
            for values in located[:1]:  # decoders do not check it
                check_not_truncated(file_of(values.data), self._shards[index].path)
        slots = [group_slots for _, _, group_slots in groups]
        return {name: column_from_parts(self._fields[name], parts[name], slots) for name in names}

    def _expect(self, ids: Int64, names: Sequence[str]) -> None:
        for index, _, _ in by_chunk(ids, self._chunk_starts):
            if self._shards[index].compression is not None:
                self._cache.prefetch((index, ()), self._load_chunk)

    def _load_chunk(self, index: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        shard = self._shards[index]
        content = read_shard(map_file(shard.path), shard)
        self.files.check(index)
        return {"": content}

    def _content(self, index: int, used: int) -> ColumnBuffer:
        shard = self._shards[index]
        if shard.compression is not None:
            (cached,) = self._cache.find([(index, ())], [used])
            return (cached or self._cache.get((index, ()), self._load_chunk))[""]
        return self.files.get(index, lambda data, _: read_shard(data, shard, check=self._check))


def _block_rows(shard: MdsShard) -> Int64:
    blocks = 1 if shard.compression is not None else max(1, -(-shard.raw_bytes // BLOCK_BYTES))
    edges = np.linspace(0, shard.samples, min(blocks, shard.samples) + 1).astype(np.int64)
    return edges[1:] - edges[:-1]
