"""Arrow IPC files and streams (and Feather files), and Arrow tables, as sources."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from rankfeed._util.validate import check_bool, invalid
from rankfeed.columns.chunk_groups import by_chunk
from rankfeed.columns.columns import Column, ColumnBuffer, Dense, column_from_parts
from rankfeed.columns.pointers import RowPointers, file_of
from rankfeed.errors import RankfeedError
from rankfeed.sources.arrow.arrow_columns import read_columns
from rankfeed.sources.arrow.file import ArrowFile
from rankfeed.sources.arrow.types import (
    VALID,
    ArrayShape,
    Nulls,
    check_same_schema,
    fields_of,
    leaves_of,
    logical_types_of,
    masks_of,
    roots_of,
)
from rankfeed.sources.chunked import CACHE_BYTES, ChunkedSource
from rankfeed.sources.formats import ARROW_SUFFIXES
from rankfeed.sources.paths import Paths, files_at, label
from rankfeed.sources.source import GLOBAL_SHUFFLE_BYTES, Int64, check_columns, starts_of
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import DataFiles
from rankfeed.storage.file_errors import arrow_errors
from rankfeed.storage.mapped import check_not_truncated

#: Maximum rows per chunk.
_CHUNK_ROWS = 1 << 16


class ArrowSource(ChunkedSource):
    """Arrow IPC files or streams: one, a list, a pattern, or a folder of them.

    Columns of numbers, fixed-size lists, lists of these, text and bytes are read in place from the mapped files,
    whatever the record batches. Other columns (booleans, dictionaries, lists of text, columns with nulls) are
    decoded in pieces of record batches, compressed ones in whole record batches, and kept in a bounded cache.

    Args:
        where: a path, a glob or brace pattern, a folder, or a list of these.
        columns: names of the columns to offer; None for all.
        nulls: "error": reading a null is an error that names file, row and column; "mask": nulls are read as zero
            or empty, and a boolean column ``<name>_valid`` is added.
        unended: whether a stream without its end marker is read as far as it goes.
        shapes: columns of nested lists that are arrays, and their shapes; None for a dimension that varies.
        cache_bytes: of decoded data that are kept, shared by the threads of a process.

    Raises:
        SourceError: there are no files or rows, or files differ in their columns.
        CorruptError: a file is damaged.
        ArgumentError: no such column.

    Examples:
        >>> import tempfile, pyarrow as pa, pyarrow.feather
        >>> path = tempfile.mkdtemp() + "/t.feather"
        >>> pa.feather.write_feather(pa.table({"x": [1, 2, 3], "tokens": [[1], [], [2, 3]]}), path)
        >>> ArrowSource(path)[2]["tokens"]
        array([2, 3])
    """

    files: DataFiles

    def __init__(
        self,
        where: Paths,
        *,
        columns: Sequence[str] | None = None,
        nulls: Nulls = "error",
        unended: bool = False,
        shapes: Mapping[str, ArrayShape] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        paths = [os.path.abspath(path) for path in files_at(where, ARROW_SUFFIXES)]
        self._unended = check_bool("unended", unended)
        try:
            self._shapes = msgspec.convert({} if shapes is None else shapes, dict[str, ArrayShape])
        except msgspec.ValidationError as error:
            raise invalid("shapes", 'a dict of shapes by column, such as {"x": (None, 3)}', shapes) from error
        self._read_columns = partial(read_columns, nulls=nulls, shapes=self._shapes)
        self.files = DataFiles(paths)
        digests: list[str] = []
        schema: Any = None
        plain: set[str] | None = None
        rows: list[int] = []
        blocks: list[Int64] = []
        chunks: list[tuple[int, int, int, int]] = []
        for file_index, path in enumerate(paths):
            file = self._file(file_index)
            schema = file.schema if schema is None else schema
            check_same_schema(schema, file.schema, paths[0], path, columns)
            rows.append(int(file.starts[-1]))
            if rows[-1]:  # else it has no record batch that tells how its columns are stored
                plain = set(file.plain) if plain is None else plain & set(file.plain)
            chunks += [(file_index, *chunk) for chunk in file.chunks()]
            blocks.append(file.blocks())
            digests.append(file.digest)
        plain = plain or set()
        with arrow_errors(paths[0]):
            all_fields = fields_of(schema, nulls=nulls, columns=columns, shapes=self._shapes)
        self.derived = masks_of(all_fields, nulls)
        self.logical_types = logical_types_of(schema)
        fields = {name: all_fields[name] for name in check_columns(columns, all_fields, self.derived)}
        fingerprint = digest_of(*map(str.encode, (*digests, self.files.fingerprint)))
        self._init_samples(label(paths), fields, np.concatenate(blocks), fingerprint)
        self._plain = frozenset(plain & set(self._fields))
        self._all_in_place = plain.issuperset(name for name, _, _ in leaves_of(schema))
        # Columns that are read in place have no nulls in any file: their masks need no data.
        masks = (name + VALID for name in plain if nulls == "mask")
        self._all_valid = frozenset(self._fields).intersection(masks)
        self._decoded = frozenset(self._fields) - self._plain - self._all_valid
        self._file_starts = starts_of(rows)
        #: int64 [chunks, 4]: file, record batch, first row, rows.
        self._chunks = np.array(chunks, np.int64)
        self._init_chunks(self._chunks[:, 3], cache_bytes)
        if not self._decoded:
            self.prefetch_distance, self.reads_in_place = 0, True

    @cached_property
    def decoded_bytes(self) -> int:  # type: ignore[override]
        """Approximate decoded size of all columns; 0 if all can be read in place."""
        rows, stored = np.diff(self._file_starts), int(self.files.sizes.sum())
        if self._all_in_place or not rows.any():
            return 0
        first = self._file(int(np.flatnonzero(rows)[0]))
        if first.is_compressed and stored <= GLOBAL_SHUFFLE_BYTES:
            with suppress(RankfeedError):  # the damage is reported where the rows are read
                return max(stored, first.decoded_row_bytes() * int(rows.sum()))
        return stored

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        """Pointers into the mapped files for the columns that are read in place."""
        plain = [name for name in names if name in self._plain]
        parts: dict[str, list[RowPointers]] = {name: [] for name in plain}
        groups = by_chunk(ids, self._file_starts) if plain else []
        for file_index, rows, _ in groups:
            file = self._file(file_index)
            batch = file.starts.searchsorted(rows, side="right") - 1
            within = rows - file.starts[batch]

            def where(row: int, file_index: int = file_index, batch: Int64 = batch, rows: Int64 = rows) -> str:
                return f"{self.files.path(file_index)}, record batch {batch[row]}, row {rows[row]}"

            for name in plain:
                parts[name].append(file.plain[name].pointers(batch, within, where))
        slots = [group_slots for _, _, group_slots in groups]
        columns = {name: column_from_parts(self._fields[name], parts[name], slots) for name in plain}
        columns |= {name: Dense.of(np.ones(len(ids), np.bool_)) for name in names if name in self._all_valid}
        if decoded := [name for name in names if name in self._decoded]:
            columns |= super()._fetch(ids, decoded)
        return {name: columns[name] for name in names}

    def _expect(self, ids: Int64, names: Sequence[str]) -> None:
        if decoded := [name for name in names if name in self._decoded]:
            super()._expect(ids, decoded)

    def _load_chunk(self, index: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        file_index, batch, first, rows = self._chunks[index].tolist()
        file = self._file(file_index)
        where = f"{file.path}, record batch {batch}"
        fields = {name: self._fields[name] for name in names}
        with arrow_errors(where):
            table = file.read(batch, names, first, rows)
            if any(field.kind == "object" for field in fields.values()):
                # Objects are decoded from it later: in memory of its own.
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_batch(table)
                table = pa.ipc.open_stream(sink.getvalue()).read_next_batch()
            first_row = int(file.starts[batch]) + first
            columns = self._read_columns(table, fields, where=where, first_row=first_row)
        # A view would keep its file open as long as the chunk is cached.
        columns = {
            name: replace(column, values=column.values.copy())
            if np.may_share_memory(column.values, file.data)
            else column
            for name, column in columns.items()
        }
        check_not_truncated(file_of(file.data), file.path)
        return columns

    def _file(self, index: int) -> ArrowFile:
        return self.files.get(
            index, lambda data, index: ArrowFile(data, self.files.path(index), self._shapes, unended=self._unended)
        )


class ArrowTableSource(ChunkedSource):
    """The rows of a `pyarrow.Table`; its record batches are blocks.

    It is pickled as a whole to worker processes; ``name`` is for errors. The options are those of `ArrowSource`;
    columns that are views of the table take no bytes of the cache.
    """

    identified = False  # the fingerprint is of columns and number of rows, not of the content

    def __init__(
        self,
        table: Any,
        *,
        columns: Sequence[str] | None = None,
        nulls: Nulls = "error",
        shapes: Mapping[str, ArrayShape] | None = None,
        name: str = "a table",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        all_fields = fields_of(table.schema, nulls=nulls, columns=columns, shapes=shapes)
        self.derived = masks_of(all_fields, nulls)
        self.logical_types = logical_types_of(table.schema)
        fields = {name: all_fields[name] for name in check_columns(columns, all_fields, self.derived)}
        self._read_columns = partial(read_columns, nulls=nulls, shapes=shapes)
        batches = table.select(roots_of(table.schema, fields)).to_batches(max_chunksize=_CHUNK_ROWS)
        self._batches = [batch for batch in batches if len(batch)]
        blocks = np.array([len(batch) for batch in self._batches], np.int64)
        self._init_samples(name, fields, blocks, digest_of(repr((fields, int(blocks.sum()))).encode()))
        self._init_chunks(blocks, cache_bytes)

    def _load_chunk(self, index: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        batch = self._batches[index]
        fields, first_row = {name: self._fields[name] for name in names}, int(self._chunk_starts[index])
        with arrow_errors(self._label):
            columns = self._read_columns(batch, fields, where=self._label, first_row=first_row)
        buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer]
        own = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        return {
            name: replace(
                column, borrowed=any(np.may_share_memory(column.values, buffer) for buffer in own), extra_bytes=0
            )
            for name, column in columns.items()
        }
