"""Decoding rows of Parquet files: whole row groups, parts of large ones, or small ones together.

A row group can only be decoded from its start. A large one (Arrow writes 1,048,576 rows by default) is decoded
part by part with a cursor, which is kept where it stopped. So rows that are read in order, as by windows and
epochs without shuffling, are decoded once. The parts before the requested one are passed to the caller, who may
keep them.

A cursor holds a page of each column, and its dictionary twice. Arrow writes at least 1,024 values to a page, so
these have hundreds of megabytes if values have megabytes: such row groups are decoded by one thread at a time.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed._util.handle_cache import HandleCache
from rankfeed.errors import CorruptError, RankfeedError, with_where
from rankfeed.sources.arrow.types import is_list_view
from rankfeed.sources.parquet.footer import footer_bytes, parse_footer
from rankfeed.storage.data_files import DataFiles
from rankfeed.storage.file_errors import arrow_errors, file_errors

#: Files that are held open, and locks of row groups.
OPEN_FILES, _LOCKS = 256, 128
#: Cursors kept in any case (lanes and threads read at different places), and at most. Each holds its file open.
_CURSORS, _MOST_CURSORS = 64, 128
#: Bytes of a column that a cursor reads at once, less if the memory of all cursors does not allow it. A row group
#: that is decoded as a whole is read as a whole, so that no page can claim to be longer than its column.
_BUFFER, _LEAST_BUFFER = 1 << 20, 16 << 10
#: Bytes that a cursor holds of each column besides, about: a page of numbers, or of long lists. Values
#: in a page of text.
_PAGE, _LIST_PAGE, _PAGE_VALUES = 176 << 10, 1 << 20, 1024
#: A cursor is large if it takes more than this share of the cache.
_LARGE_SHARE = 16
#: Bytes that a part may take when it is decoded: repeated values take next to nothing in the file.
_MOST_DECODED = 64 << 20
#: A part that would take more is cut to this share of it.
_CUT = 8
#: Texts of parts with so few rows are not examined.
_FEW_ROWS = 64
#: Text is read as a dictionary if that is smaller by this factor: each part has a copy of the dictionary.
_EXPANSION = 4
#: Decoded bytes of a value of a Parquet type, except text and values of a fixed length.
_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 0}
#: Parts of one row group.
_MOST_PARTS = 1 << 20


@dataclass(frozen=True)
class RowGroupPart:
    """Some rows of a row group, or all rows of several."""

    file: int  # number of the file
    group: int  # number of the (first) row group
    first: int  # row, counted from the start of the row group
    rows: int
    step: int  # rows of each part of the row group, except the last
    totals: tuple[int, ...]  # rows of each row group
    before: int  # rows of the file before the row group

    def __str__(self) -> str:
        last = self.group + self.groups - 1
        return f"row group {self.group}" if self.groups == 1 else f"row groups {self.group} to {last}"

    @property
    def groups(self) -> int:
        return len(self.totals)

    def by_group(self) -> list[RowGroupPart]:
        if self.groups == 1:
            return [self]
        starts = accumulate(self.totals, initial=self.before)
        return [
            RowGroupPart(self.file, self.group + offset, 0, rows, max(1, rows), (rows,), before)
            for offset, (rows, before) in enumerate(zip(self.totals, starts, strict=False))
        ]


def cut_row_groups(
    files: Sequence[tuple[Sequence[int], Sequence[int]]], most_bytes: int, factor: int, path: Callable[[int], str]
) -> list[RowGroupPart]:
    """The parts of all files, given the rows and approximate decoded bytes of the row groups of each.

    Parts have at most about ``most_bytes``, and fewer rows by a ``factor``; with 0, small row groups are combined.
    """
    parts: list[RowGroupPart] = []
    for file, (group_rows, sizes) in enumerate(files):
        before = combined = 0
        for group, (rows, nbytes) in enumerate(zip(group_rows, sizes, strict=True)):
            step = max(1, rows // max(1, -(-nbytes // most_bytes)) // max(1, factor))
            if rows // step > _MOST_PARTS:
                raise CorruptError(
                    "a row group has too many rows",
                    found=f"{rows} rows, {nbytes} bytes",
                    where=f"{path(file)}, row group {group}",
                )
            if group and not factor and combined + nbytes <= most_bytes:
                last = parts[-1]
                together = last.rows + rows
                parts[-1] = replace(last, rows=together, step=together, totals=(*last.totals, rows))
                combined += nbytes
            else:
                parts += [
                    RowGroupPart(file, group, first, min(step, rows - first), step, (rows,), before)
                    for first in range(0, max(rows, 1), step)
                ]
                combined = nbytes
            before += rows
    return parts


class LargeRowsError(RankfeedError):
    """The rows of a part are so large that it must be cut into ``factor`` smaller ones."""

    def __init__(self, where: str, factor: int) -> None:
        super().__init__("the rows of a row group are larger than its size suggests", where=where)
        self.factor = factor


#: Called with the first row and the rows of each part that has to be decoded before the requested one.
_Skipped = Callable[[int, Any], object]
#: File, row group, and the columns that are read.
_GroupKey = tuple[int, int, tuple[str, ...]]


@dataclass(eq=False)
class _Cursor:
    """A row group that was read up to some row."""

    batches: Iterator[Any]  # the next rows
    leaves: dict[str, dict[int, Any]]  # the Parquet columns that are read, as of `_leaf_columns`
    buffers: int  # approximate bytes of its read buffers, and of pages of numbers
    values: dict[int, int]  # number of values read so far of columns in lists, by number
    nbytes: int = 0  # approximate bytes that it holds; known after its first rows


class ParquetReader:
    """Reads parts of row groups. Thread-safe; works after fork; pickles without its cursors.

    Cursors take ``cache_bytes`` at most, but at least 64 with pages of usual sizes are kept, or one of any size.
    """

    def __init__(self, files: DataFiles, cache_bytes: int) -> None:
        self._data_files, self._most_cursor_bytes = files, cache_bytes
        init_in_each_process(self._init_process)

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetReader, (self._data_files, self._most_cursor_bytes)

    def _init_process(self) -> None:
        """Create locks and caches; a forked child cannot continue the cursors of its parent."""
        self._lock = threading.Lock()
        self._files: HandleCache[tuple[Any, Any]] = HandleCache(OPEN_FILES)
        #: One thread at a time reads on in a row group (some share a lock), and in all those with large pages.
        self._group_locks = [threading.Lock() for _ in range(_LOCKS)]
        self._large_lock = threading.Lock()
        #: By row group and next row, least recently used first.
        self._cursors: OrderedDict[tuple[_GroupKey, int], _Cursor] = OrderedDict()
        #: Kept ones, and those that a thread reads on.
        self._open_cursors: set[_Cursor] = set()
        #: Bytes of a row group when it is decoded, and columns that stay dictionaries: see `_examine`.
        self._decoded: dict[_GroupKey, tuple[int, frozenset[str]]] = {}
        #: Bytes of a cursor in each row group that is read in parts.
        self._cursor_bytes: dict[_GroupKey, int] = {}

    @property
    def nbytes(self) -> int:
        """Approximate bytes that cursors hold."""
        with self._lock:
            return sum(cursor.nbytes for cursor in self._open_cursors)

    @contextmanager
    def lock(self, part: RowGroupPart, names: tuple[str, ...]) -> Iterator[None]:
        """Held while a part is read."""
        key = (part.file, part.group, names)
        with self._group_locks[hash(key) % _LOCKS]:
            nbytes = 0 if part.rows == sum(part.totals) else self._cursor_bytes.get(key)
            if nbytes is None:  # as if values varied in size, until a cursor was opened
                group = self._file(part.file)[1].row_group(part.group)
                nbytes = group.total_byte_size * min(_PAGE_VALUES, group.num_rows) // max(1, group.num_rows)
            with self._large_lock if nbytes > self._most_cursor_bytes // _LARGE_SHARE else nullcontext():
                yield

    def continues_at(self, part: RowGroupPart, names: tuple[str, ...]) -> bool:
        """Whether a part can be decoded without decoding others before it."""
        if part.first:
            return ((part.file, part.group, names), part.first) in self._cursors
        return self.nbytes <= self._most_cursor_bytes // _LARGE_SHARE

    def read(self, part: RowGroupPart, names: tuple[str, ...], skipped: _Skipped | None = None) -> Any:
        """The rows of a part, as a `pyarrow.RecordBatch` or `pyarrow.Table`. Errors name the column."""
        try:
            return self._read(part, names, skipped)
        except CorruptError as error:
            for name in names:  # to find the column that cannot be read by itself
                try:
                    self._read(part, (name,))
                except CorruptError as alone:
                    where = str(alone.where)
                    raise with_where(alone, where if "column" in where else f"{where}, column {name!r}") from error
            raise

    def _read(self, part: RowGroupPart, names: tuple[str, ...], skipped: _Skipped | None = None) -> Any:
        groups, decoded = part.by_group(), []
        for group in groups:
            key = (group.file, group.group, names)
            if key not in self._decoded:
                self._decoded[key] = self._examine(group, names)
            decoded.append(self._decoded[key])
        nbytes = sum(size for size, _ in decoded) * part.rows // max(1, sum(part.totals))
        if nbytes > _MOST_DECODED and part.rows > 1:
            raise LargeRowsError(self._where(part), -(-nbytes * _CUT // _MOST_DECODED))
        dictionaries = frozenset[str]().union(*(paths for _, paths in decoded))
        # One by one: a reader of several would replace damaged rows of one by rows of the next.
        batches = [self._read_in_group(group, names, dictionaries, skipped) for group in groups if group.rows]
        return _concat(batches)

    def _read_in_group(
        self, part: RowGroupPart, names: tuple[str, ...], dictionaries: frozenset[str], skipped: _Skipped | None
    ) -> Any:
        where, key = self._where(part), (part.file, part.group, names)
        is_kept = False
        with self._lock:  # the nearest cursor before the part; other readers may continue others
            at = max((at for group, at in self._cursors if group == key and at <= part.first), default=0)
            cursor = self._cursors.pop((key, at), None)
        if cursor is None:
            at, cursor = 0, self._open_cursor(part, names, dictionaries)
            with self._lock:
                self._drop_cursors(cursor, needed=self._cursor_bytes.get(key, 0))
                self._open_cursors.add(cursor)
        try:
            while at < part.first:
                rows = self._next(cursor, part, part.step, where)
                if skipped is not None:
                    skipped(at, rows)
                at += part.step
            rows = self._next(cursor, part, part.rows, where)
            is_kept = at + part.rows < sum(part.totals)
            if not is_kept:
                self._check_values(part, cursor)
        finally:
            with self._lock:
                if is_kept:
                    self._cursors[key, at + part.rows] = cursor
                    self._drop_cursors(cursor, at_least=1)
                else:
                    self._open_cursors.discard(cursor)
        return rows

    def _where(self, part: RowGroupPart) -> str:
        return f"{self._data_files.path(part.file)}, {part}"

    def _check_values(self, part: RowGroupPart, cursor: _Cursor) -> None:
        """Compare the number of values in lists with the footer: pyarrow ignores surplus values."""
        _, metadata = self._file(part.file)
        group = metadata.row_group(part.group)
        for index, values in cursor.values.items():
            column = group.column(index)
            if column.num_values != values:
                raise CorruptError(
                    "the lists of a column are damaged: they hold another number of values than the footer says",
                    expected=column.num_values,
                    found=values,
                    where=f"{self._where(part)}, column {column.path_in_schema!r}",
                )

    def _examine(self, part: RowGroupPart, names: tuple[str, ...]) -> tuple[int, frozenset[str]]:
        """What a row group becomes when it is decoded, as far as the footer does not tell.

        The bytes of numbers (also in lists) and of bytes of a fixed size, and the paths of Parquet columns of text
        or bytes that stay dictionaries.
        """
        _, metadata = self._file(part.file)
        group = metadata.row_group(part.group)
        where = self._where(part)
        with arrow_errors(where):
            by_name = _leaf_columns(metadata.schema, names)
        leaves = _by_number(by_name)
        texts = {
            index: column.path
            for index, column in leaves.items()
            if column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "DECIMAL"
        }
        # No value is longer than the row group.
        if part.step <= _FEW_ROWS or group.num_rows * group.total_byte_size <= _MOST_DECODED:
            texts = {}
        sized = {
            index: _VALUE_BYTES.get(column.physical_type, column.length)
            for index, column in leaves.items()
            if column.max_repetition_level or column.physical_type == "FIXED_LEN_BYTE_ARRAY"
        }
        if group.num_rows <= _FEW_ROWS or not (texts or sized):
            return 0, frozenset()
        schema = metadata.schema.to_arrow_schema()
        fixed = [count for name in names for count in _values_per_row(schema.field(name).type)]
        if not texts and all(fixed):
            values = dict(zip(leaves, fixed, strict=True))
            row_bytes = sum(values[index] * value_bytes for index, value_bytes in sized.items())
            return group.num_rows * row_bytes, frozenset()
        # The metadata of column chunks can only be used after a row was read: see `footer`.
        one_row = replace(part, first=0, rows=1, step=1)
        read = tuple(name for name, columns in by_name.items() if columns.keys() & (texts.keys() | sized.keys()))
        with arrow_errors(where):
            try:
                first = next(self._open_cursor(one_row, read, frozenset(texts.values())).batches)
            except OSError as error:  # encodings that Arrow does not decode into a dictionary
                if "Not yet implemented" not in str(error):
                    raise
                first = next(self._open_cursor(one_row, read).batches)
        nbytes = sum(group.column(index).num_values * value_bytes for index, value_bytes in sized.items())
        dictionaries = set()
        for name in read:
            arrays = [array for array, _ in _leaves_of(first.column(name))]
            for index, array in zip(by_name[name], arrays, strict=True):
                if index not in texts or not pa.types.is_dictionary(array.type) or not len(array.dictionary):
                    continue
                column, lengths = group.column(index), pc.binary_length(array.dictionary)
                longest, mean = pc.max(lengths).as_py() or 0, (pc.sum(lengths).as_py() or 0) // len(lengths)
                if longest * column.num_values <= _MOST_DECODED:
                    continue
                if mean * column.num_values > _EXPANSION * column.total_uncompressed_size:
                    dictionaries.add(texts[index])
                else:  # at the most, if all values were the longest one
                    nbytes += longest * column.num_values // _CUT
        return nbytes, frozenset(dictionaries)

    def _drop_cursors(self, cursor: _Cursor, *, needed: int = 0, at_least: int = 0) -> None:
        """Drop the cursors used least recently, until the others and ``needed`` bytes are within the limits."""
        most = max(self._most_cursor_bytes, _CURSORS * cursor.buffers)
        nbytes = needed + sum(cursor.nbytes for cursor in self._open_cursors)
        while len(self._cursors) > at_least and (nbytes > most or len(self._cursors) > _MOST_CURSORS):
            dropped = self._cursors.popitem(last=False)[1]
            self._open_cursors.discard(dropped)
            nbytes -= dropped.nbytes

    def _next(self, cursor: _Cursor, part: RowGroupPart, rows: int, where: str) -> Any:
        """The next rows, which are one batch, except of more than 2 GiB of text."""
        got: list[Any] = []
        with arrow_errors(where):
            while sum(len(batch) for batch in got) < rows and (batch := next(cursor.batches, None)) is not None:
                got.append(batch)
        count = sum(len(batch) for batch in got)
        if count != rows:
            raise CorruptError(
                "a row group has another number of rows than its footer says",
                expected=f"{rows} more rows",
                found=count,
                where=where,
            )
        if not cursor.nbytes:
            cursor.nbytes = self._bytes_of(cursor, part)
        for batch in got if cursor.values else ():
            for name, leaves in cursor.leaves.items():
                if leaves.keys() & cursor.values.keys():
                    # Parquet stores a value for each null or empty list.
                    for leaf, (array, empty) in zip(leaves, _leaves_of(batch.column(name)), strict=True):
                        if leaf in cursor.values:
                            cursor.values[leaf] += len(array) + empty
        return _concat(got)

    def _bytes_of(self, cursor: _Cursor, part: RowGroupPart) -> int:
        """Approximate bytes that a cursor holds, now that a row was read."""
        group = self._file(part.file)[1].row_group(part.group)
        nbytes = cursor.buffers
        for index, leaf in _by_number(cursor.leaves).items():
            column = group.column(index)
            size, stored, dictionary = column.total_uncompressed_size, column.total_compressed_size, 0
            if column.has_dictionary_page:
                dictionary = size * (column.data_page_offset - column.dictionary_page_offset) // max(1, stored)
                dictionary = min(max(0, dictionary), size)
            data, values = size - dictionary, max(1, column.num_values)
            if leaf.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"):
                nbytes += 2 * dictionary + data * min(_PAGE_VALUES, values) // values
            elif values >= _PAGE_VALUES * max(1, group.num_rows):
                nbytes += 2 * dictionary + min(_LIST_PAGE, data)
        self._cursor_bytes[part.file, part.group, tuple(cursor.leaves)] = nbytes
        return nbytes

    def _open_cursor(
        self, part: RowGroupPart, names: tuple[str, ...], dictionaries: frozenset[str] = frozenset()
    ) -> _Cursor:
        handle, metadata = self._file(part.file)
        with arrow_errors(self._where(part)):
            leaves = _leaf_columns(metadata.schema, names)
            by_number = _by_number(leaves)
            share = self._most_cursor_bytes // (_CURSORS * max(1, len(by_number))) - _PAGE
            buffer = 0 if part.rows == sum(part.totals) else min(_BUFFER, max(_LEAST_BUFFER, share))
            reader = pq.ParquetFile(
                handle,
                metadata=metadata,
                page_checksum_verification=True,
                pre_buffer=False,
                buffer_size=buffer,
                read_dictionary=sorted(dictionaries),
            )
            # One thread: the loader's other threads decode other row groups.
            batches = reader.iter_batches(part.step, row_groups=[part.group], columns=names, use_threads=False)
            values = {index: 0 for index, column in by_number.items() if column.max_repetition_level}
            return _Cursor(iter(batches), leaves, len(by_number) * (buffer + _PAGE), values)

    def _file(self, index: int) -> tuple[Any, Any]:
        """A file that threads share, as its reads have offsets, and its metadata."""
        return self._files.get(index, lambda: self._open(index))

    def _open(self, index: int) -> tuple[Any, Any]:
        path = self._data_files.path(index)
        with file_errors(path):
            handle = pa.OSFile(os.fsencode(path))
            content = footer_bytes(handle, path)
        self._data_files.opened(index)
        return handle, parse_footer(content, path).metadata


def _concat(batches: list[Any]) -> Any:
    return batches[0] if len(batches) == 1 else pa.Table.from_batches(batches)


def _leaf_columns(schema: Any, names: tuple[str, ...]) -> dict[str, dict[int, Any]]:
    """The Parquet columns (leaves) of each Arrow column, by number."""
    leaves: dict[str, dict[int, Any]] = {}
    start = 0
    for column in schema.to_arrow_schema():
        end = start + len(_values_per_row(column.type))
        if column.name in names:
            leaves[column.name] = {index: schema.column(index) for index in range(start, end)}
        start = end
    return {name: leaves[name] for name in names}


def _by_number(leaves: dict[str, dict[int, Any]]) -> dict[int, Any]:
    """The Parquet columns of all Arrow columns."""
    return {index: column for columns in leaves.values() for index, column in columns.items()}


def _leaves_of(array: Any) -> list[tuple[Any, int]]:
    """The leaves in the structs and lists of an array, and the number of null or empty lists around each."""
    types = pa.types
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves_of(array.storage)
    if types.is_struct(kind):
        return [leaf for index in range(kind.num_fields) for leaf in _leaves_of(array.field(index))]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = array.offsets.to_numpy()
        empty = int((offsets[1:] == offsets[:-1]).sum())
        child = array.values[int(offsets[0]) : int(offsets[-1])] if len(array) else array.values[:0]
    elif is_list_view(kind):
        empty = int((array.sizes.to_numpy() == 0).sum())
        child = array.flatten()
    elif types.is_fixed_size_list(kind):
        empty = array.null_count if kind.list_size else len(array)
        child = array.flatten()
    else:
        return [(array, 0)]
    return [(leaf, empty + nulls) for leaf, nulls in _leaves_of(child)]


def _values_per_row(kind: Any) -> list[int]:
    """Values of each leaf in a row of an Arrow type; 0 where rows differ."""
    if isinstance(kind, pa.BaseExtensionType):
        return _values_per_row(kind.storage_type)
    counts = [count for index in range(kind.num_fields) for count in _values_per_row(kind.field(index).type)]
    if pa.types.is_struct(kind):
        return counts
    if pa.types.is_fixed_size_list(kind):
        return [kind.list_size * count for count in counts]
    return [0] * len(counts) if counts else [1]
