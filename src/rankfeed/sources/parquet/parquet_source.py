"""Parquet files and directories of them, read in place: row groups are blocks."""

import copy
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

import numpy as np

from rankfeed._util.threads import in_parallel
from rankfeed._util.validate import check_int
from rankfeed.columns.columns import Column, ColumnBuffer
from rankfeed.columns.field import Field
from rankfeed.errors import SourceError
from rankfeed.sources.arrow.arrow_columns import read_columns
from rankfeed.sources.arrow.types import (
    Nulls,
    check_same_schema,
    field_of,
    fields_of,
    leaves_of,
    logical_types_of,
    masks_of,
    parents_of,
)
from rankfeed.sources.chunked import CACHE_BYTES, Chunk, ChunkCache, ChunkedSource
from rankfeed.sources.parquet.footer import read_footer
from rankfeed.sources.parquet.partitions import Partitions, parquet_files
from rankfeed.sources.parquet.reader import LargeRowsError, ParquetReader, RowGroupPart, cut_row_groups
from rankfeed.sources.paths import Paths, label
from rankfeed.sources.source import Int64, check_columns
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import DataFiles
from rankfeed.storage.file_errors import arrow_errors

#: Approximate bytes that are decoded at once: larger row groups are read in parts, small adjacent ones together.
#: If not all data fit into the cache, a part is at most this share of it, so that the lanes of a window shuffle
#: fit.
_PART_BYTES, _PARTS_IN_CACHE = 8 << 20, 256
_LEAST_PART_BYTES = 64 << 10
#: Decoded bytes per row and column that is not dense, at least: repeated text takes a few bits in the file.
_LEAST_ROW_BYTES = 32
#: A progress bar is shown for this many files.
_MANY_FILES = 2_000
#: Bytes of a row above which the next rows are announced as far ahead as the cache holds them.
_LARGE_ROW = 16 << 10


class ParquetSource(ChunkedSource):
    """Parquet files: one, a list, a pattern, or a folder with everything below it.

    Directories named ``key=value`` become columns: int64 if all values are integers, otherwise text. Columns are
    as `rankfeed.sources.arrow.types.fields_of` says: lists of numbers are ragged, lists of a fixed size dense,
    structs become columns "outer.inner".

    Args:
        where: a path, a glob or brace pattern, a folder, or a list of these.
        columns: names of the columns to offer; only these are decoded; None for all.
        nulls: "error": reading a null is an error that names file, row and column; "mask": it is zero or empty,
            and a boolean column ``<name>_valid`` is added.
        cache_bytes: decoded bytes to keep, shared by the threads of a process.

    Raises:
        SourceError: there are no files, files differ in their columns, or one is encrypted.
        CorruptError: a file is damaged.
        ArgumentError: no such column.

    Examples:
        >>> import tempfile, pyarrow as pa, pyarrow.parquet as pq
        >>> path = tempfile.mkdtemp() + "/t.parquet"
        >>> pq.write_table(pa.table({"x": [1, 2, 3], "tokens": [[1], [], [2, 3]]}), path, row_group_size=2)
        >>> source = ParquetSource(path)
        >>> source.blocks, source[2]["tokens"]
        (array([2, 1]), array([2, 3]))
    """

    files: DataFiles

    def __init__(
        self,
        where: Paths,
        *,
        columns: Sequence[str] | None = None,
        nulls: Nulls = "error",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        cache_bytes = check_int("cache_bytes", cache_bytes, at_least=0)
        listed = parquet_files(where)
        paths = [file.path for file in listed]
        self.files = DataFiles(paths)
        footers = in_parallel(read_footer, paths, "reading footers", progress=len(paths) >= _MANY_FILES)
        self._nulls: Nulls = nulls
        schema = footers[0].schema
        for path, footer in zip(paths, footers, strict=True):
            with arrow_errors(path):  # a name may not be UTF-8
                check_same_schema(schema, footer.schema, paths[0], path, columns)
        with arrow_errors(paths[0]):
            own = fields_of(schema, nulls=nulls, columns=columns)
        self._partitions = Partitions(listed, own, nulls)
        all_fields = {**own, **self._partitions.fields}
        self.derived = masks_of(all_fields, nulls)
        self.logical_types = logical_types_of(schema)
        fields = {name: all_fields[name] for name in check_columns(columns, all_fields, self.derived)}
        self._parents = parents_of(schema, own)
        blocks = np.array([rows for footer in footers for rows in footer.rows], np.int64)
        facts = [f"{name}:{field}" for name, field in all_fields.items()]
        facts += [f"{name}={texts}" for name, texts in self._partitions.texts.items()]
        facts += [*(footer.digest for footer in footers), self.files.fingerprint]
        self._init_samples(label(paths), fields, blocks, digest_of(b"parquet", *map(os.fsencode, facts)))
        share = len([name for name in fields if name in own]) / len(own)
        row_bytes = _row_bytes(fields.values())
        #: Rows and approximate decoded bytes of each row group of each file.
        self._groups: list[tuple[tuple[int, ...], list[int]]] = []
        for footer in footers:
            groups = zip(footer.rows, footer.nbytes, strict=True)
            sizes = [int(max(rows * row_bytes, size * share)) for rows, size in groups]
            self._groups.append((footer.rows, sizes))
        self._most_part_bytes = _PART_BYTES
        if sum(sum(sizes) for _, sizes in self._groups) > cache_bytes:
            self._most_part_bytes = min(_PART_BYTES, max(_LEAST_PART_BYTES, cache_bytes // _PARTS_IN_CACHE))
        #: The same data in smaller parts, once a part could not be decoded.
        self._finer: ParquetSource | None = None
        encoded = sum(nbytes for footer in footers for nbytes in footer.nbytes)
        stored_row_bytes = _row_bytes(field_of(kind) for _, _, kind in leaves_of(schema))
        self.decoded_bytes = max(encoded, int(blocks.sum()) * stored_row_bytes)
        self._init_parts(0, cache_bytes)

    def _init_parts(self, factor: int, cache_bytes: int) -> None:
        """Divide the row groups into parts, with fewer rows by a factor; 0 also combines small row groups."""
        self._factor = factor
        self._parts = cut_row_groups(self._groups, self._most_part_bytes, factor, self.files.path)
        #: Row groups with large rows that are read in parts.
        self._sequential_chunks = any(map(self._is_sequential, self._parts))
        self._reader = ParquetReader(self.files, cache_bytes)  # whose cursors return rows in steps of these parts
        self._init_chunks([part.rows for part in self._parts], cache_bytes)

    def __getstate__(self) -> dict[str, Any]:
        # Once there are smaller parts, the cache of the others is empty; the other process starts with the others.
        return {**self.__dict__, "_finer": None, "_cache": ChunkCache(self.cache_bytes)}

    def _independent(self) -> Self:
        source = super()._independent()
        source._reader = ParquetReader(self.files, self.cache_bytes)  # the locks of this one may be held
        return source

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        if self._finer is None:
            try:
                return super()._fetch(ids, names)
            except LargeRowsError as error:
                factor = error.factor
            except SourceError:
                if all(part.groups == 1 for part in self._parts):
                    raise
                factor = 1  # the damage may be in another row group of the part
            finer = copy.copy(self)
            finer._init_parts(max(1, self._factor) * factor, self.cache_bytes)
            if self._finer is None:  # unless another thread was faster
                self._finer, self._cache = finer, ChunkCache(0)
        return self._finer._fetch(ids, names)

    def _expect(self, ids: Int64, names: Sequence[str]) -> None:
        if self._finer is not None:
            self._finer._expect(ids, names)
        else:
            super()._expect(ids, names)

    def _is_sequential(self, part: RowGroupPart) -> bool:
        rows, sizes = self._groups[part.file]
        nbytes = sizes[part.group]
        return part.groups == 1 and part.rows < rows[part.group] and nbytes > _LARGE_ROW * rows[part.group]

    def _parents_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """The columns of the file in which some fields are."""
        return tuple(dict.fromkeys(self._parents[name] for name in names if name in self._parents))

    def _can_prefetch(self, index: int, names: tuple[str, ...]) -> bool:
        part = self._parts[index]
        if not self._is_sequential(part) or (part.first and self._cache.is_pending((index - 1, names))):
            return True
        return self._reader.continues_at(part, self._parents_of(names))

    def _load_chunk(self, index: int, names: tuple[str, ...]) -> Chunk:
        part, parents, rows = self._parts[index], self._parents_of(names), None
        if parents:
            with self._reader.lock(part, parents):
                # Perhaps it was decoded on the way to another one.
                if (chunk := self._cache.peek((index, names))) is not None:
                    return chunk

                def keep(first: int, rows: Any) -> None:
                    before = index - (part.first - first) // part.step
                    if self._cache.accepts((before, names), rows.nbytes):
                        with suppress(SourceError):  # which is raised when the part is requested
                            self._cache.insert((before, names), self._columns(before, names, rows), requests=0)

                rows = self._reader.read(part, parents, keep)
                self._cache.reserved = self._reader.nbytes
        return self._columns(index, names, rows)

    def _columns(self, index: int, names: tuple[str, ...], rows: Any) -> dict[str, ColumnBuffer]:
        """The columns of a part, of which the ``rows`` were read."""
        part = self._parts[index]
        fields = {name: self._fields[name] for name in names if name in self._parents}
        loaded: dict[str, ColumnBuffer] = {}
        if fields:
            where = f"{self.files.path(part.file)}, {part}"
            first = part.before + part.first
            with arrow_errors(where):
                loaded = read_columns(rows, fields, where=where, first_row=first, nulls=self._nulls)
                if self._is_sequential(part):
                    # If numbers of megabytes stayed in the memory that the decoder uses for the next ones, it
                    # would need new memory for each part, and lose a third to fragmentation. Texts and bytes cost
                    # it no more than a copy.
                    for name, buffer in loaded.items():
                        is_text = buffer.values.dtype == np.uint8 and buffer.offsets is not None
                        if not is_text and buffer.decode is None:
                            loaded[name] = replace(buffer, values=buffer.values.copy())
                for name in rows.schema.names:
                    if name in fields and name in self._partitions.texts:
                        self._partitions.check(name, part.file, rows.column(name), fields[name])
        for name in names:
            if name not in fields:
                loaded[name] = self._partitions.column(name, part.file, part.rows)
        return {name: loaded[name] for name in names}


def _row_bytes(fields: Iterable[Field]) -> int:
    """Decoded bytes of a row, approximately."""
    return sum(field.row_bytes() if field.kind == "dense" else _LEAST_ROW_BYTES for field in fields)
