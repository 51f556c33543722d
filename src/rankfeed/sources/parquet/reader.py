"""Decoding a Parquet file's rows: a row group at once, several small ones, or part by part where it is large.

A row group can only be decoded from its start. One that is large when decoded (Arrow writes 1,048,576 rows to each
unless told otherwise) is walked through part by part: a walk stays where it ended, and the next part goes on from
there, so that rows read in their order, which is how windows and plain epochs read them, are decoded once.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from rankfeed._util.handle_cache import HandleCache
from rankfeed.errors import CorruptError, RankfeedError
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.sources.parquet.footer import REMEDY, footer_bytes, parsed, reading
from rankfeed.storage import DataFiles, digest_of

#: Files that are held open, and row groups that are under way.
OPEN_FILES, OPEN_GROUPS = 256, 128
#: Walks that are kept in any case, lanes and threads that read at different places; more, where there is room.
_WALKS = 64
#: Bytes of parts that were decoded on the way to another one, and are kept until they are asked for.
_PASSED_BYTES = 256 << 20
#: Bytes of a column that are read at once while a row group is walked through; one that is decoded whole is read
#: whole, so that no page can claim to be longer than its column. Less, where so many walks had no room; down to a
#: 64th it makes no difference to speed.
_BUFFER, _LEAST_BUFFER = 1 << 20, 16 << 10
#: What a walk holds of each column beside, about: a page.
_PAGE = 176 << 10
#: Bytes that a part may take when it is decoded, beyond what its size in the file lets expect: values that come
#: again and again take next to nothing there.
_MOST_DECODED = 64 << 20
#: A part that would take more is cut so that it takes such a share of that.
_CUT = 8
#: Row groups of which it is known what they become when they are decoded.
_LOOKED_AT = 4096
#: Rows of a row group up to which this is not looked at.
_FEW_ROWS = 64


class LargeRows(RankfeedError):
    """The rows of a part are so large that it must be cut into ``factor`` smaller ones."""

    def __init__(self, where: str, factor: int) -> None:
        super().__init__("the rows of a row group are larger than its size lets expect", where=where)
        self.factor = factor


@dataclass(frozen=True)
class _Expanded:
    """What a row group becomes when it is decoded.

    Args:
        nbytes: of numbers, in lists and besides, and of bytes of a fixed size.
        dictionaries: paths of Parquet columns of text or bytes that are to be left in their dictionaries.
    """

    nbytes: int
    dictionaries: frozenset[str]


@dataclass(frozen=True)
class Part:
    """Some rows of a row group, or all of several.

    Args:
        file: number of the file.
        group: of the (first) row group in it.
        first: first row, counted from the row group's start.
        rows: how many.
        step: rows of each part of the row group, but the last.
        totals: rows of each row group.
        before: rows of the file before the row group.
    """

    file: int
    group: int
    first: int
    rows: int
    step: int
    totals: tuple[int, ...]
    before: int

    def __str__(self) -> str:
        last = self.group + self.groups - 1
        return f"row group {self.group}" if self.groups == 1 else f"row groups {self.group} to {last}"

    @property
    def groups(self) -> int:
        """How many row groups."""
        return len(self.totals)

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the row groups."""
        return self.rows == sum(self.totals)

    def and_then(self, rows: int) -> Part:
        """With the next row group of so many rows, all of which are read."""
        return replace(self, rows=self.rows + rows, step=self.step + rows, totals=(*self.totals, rows))

    def apart(self) -> list[Part]:
        """A part for each row group."""
        if self.groups == 1:
            return [self]
        starts = accumulate(self.totals, initial=self.before)
        return [
            Part(self.file, self.group + number, 0, rows, max(1, rows), (rows,), before)
            for number, (rows, before) in enumerate(zip(self.totals, starts, strict=False))
        ]

    def finer(self, factor: int) -> list[Part]:
        """Parts of fewer rows, by this factor, of all row groups that begin in this one."""
        found = []
        for part in self.apart():
            total = sum(part.totals)
            step = max(1, part.step // factor)
            for first in range(0, total, step) if part.first == 0 else ():
                found.append(replace(part, first=first, rows=min(step, total - first), step=step))
        return found


#: A row group under way: file, row group, and the columns that are read.
_Key = tuple[int, int, tuple[str, ...]]


@dataclass(frozen=True)
class _Walk:
    """A row group that was read up to some place.

    Args:
        rows: of it, batch by batch.
        nbytes: that it holds, about.
        leaves: numbers of the Parquet columns (leaves of the schema) that are read.
        values: read so far of those that are in lists, by number.
    """

    rows: Iterator[Any]
    nbytes: int
    leaves: list[int]
    values: dict[int, int]


@dataclass(frozen=True)
class _File:
    """An open file; reading at a place needs no lock."""

    handle: Any
    metadata: Any


class Reader:
    """Reads parts of row groups of some files. Safe to use from several threads; made anew in every process.

    Args:
        paths: of the files.
        digests: of their footers, as they were when the source was made.
        cache_bytes: of decoded rows that are kept: as much again for walks, and a fourth of it for parts that were
            decoded on the way to another one.
    """

    def __init__(self, paths: list[str], digests: list[str], files: DataFiles, cache_bytes: int) -> None:
        self.pid = os.getpid()
        self._paths = paths
        self._digests = digests
        self._data_files = files
        self._lock = threading.Lock()
        self._files: HandleCache[_File] = HandleCache(OPEN_FILES)
        #: Whoever reads on in a row group waits for whoever does already.
        self._groups: OrderedDict[_Key, threading.Lock] = OrderedDict()
        #: By row group and the row where they stand, those used last at the end.
        self._walks: OrderedDict[tuple[_Key, int], _Walk] = OrderedDict()
        self._most_walked = cache_bytes
        self._passed: OrderedDict[Hashable, Any] = OrderedDict()
        self._passed_bytes = 0
        self._most_passed = min(_PASSED_BYTES, cache_bytes // 4)
        self._expanded: OrderedDict[_Key, _Expanded] = OrderedDict()

    def read(self, part: Part, names: tuple[str, ...]) -> Any:
        """The rows of a part as a `pyarrow.RecordBatch` or `pyarrow.Table`.

        Args:
            part: which.
            names: Arrow columns (or fields of structs, as "outer.inner") that are wanted.

        Raises:
            SourceError: the file cannot be read.
            CorruptError: it is damaged, or another one than it was.
        """
        try:
            return self._read(part, names)
        except CorruptError as error:
            raise self._named(error, part, names) from error

    def _named(self, error: CorruptError, part: Part, names: tuple[str, ...]) -> CorruptError:
        """An error that names the column too: the one that cannot be read by itself."""
        for name in names:
            try:
                self._read(part, (name,))
            except CorruptError as alone:
                where = f"{alone.where}, column {name!r}" if "column" not in str(alone.where) else alone.where
                return CorruptError(
                    alone.summary, expected=alone.expected, found=alone.found, where=where, remedy=alone.remedy
                )
        return error

    def _read(self, part: Part, names: tuple[str, ...]) -> Any:
        where = f"{self._paths[part.file]}, {part}"
        expanded = [self._expands(each, names) for each in part.apart()]
        nbytes = sum(each.nbytes for each in expanded) * part.rows // max(1, sum(part.totals))
        if nbytes > _MOST_DECODED and part.rows > 1:
            raise LargeRows(where, -(-nbytes * _CUT // _MOST_DECODED))
        dictionaries = frozenset[str]().union(*(each.dictionaries for each in expanded))
        if part.is_whole:
            # One after the other: a reader of several would fill up what damage left of one with rows of the next.
            return _joined([self._whole(each, names, dictionaries) for each in part.apart() if each.rows])
        key = (part.file, part.group, names)
        with self._group(key):
            passed = self._take_passed((key, part.first))
            if passed is not None:
                return passed
            at, walk = self._take_walk(key, part.first) or (0, self._walk(part, names, dictionaries))
            while at < part.first:
                # Whoever mixes rows of several parts comes back for those in between.
                self._keep_passed((key, at), self._next(walk, part.step, where))
                at += part.step
            rows = self._next(walk, part.rows, where)
            if at + part.rows < sum(part.totals):
                self._keep_walk(key, at + part.rows, walk)
            else:
                self._check_values(part, walk)
            return rows

    def _whole(self, part: Part, names: tuple[str, ...], dictionaries: frozenset[str]) -> Any:
        """All rows of one row group."""
        walk = self._walk(part, names, dictionaries)
        rows = self._next(walk, part.rows, f"{self._paths[part.file]}, {part}")
        self._check_values(part, walk)
        return rows

    def _check_values(self, part: Part, walk: _Walk) -> None:
        """Compare what a row group's lists hold with what the footer says: a reader leaves out rows too many."""
        group = self._file(part.file).metadata.row_group(part.group)
        for number, values in walk.values.items():
            column = group.column(number)
            if column.num_values != values:
                raise CorruptError(
                    "the lists of a column are damaged: they hold another number of values than the footer says",
                    expected=column.num_values,
                    found=values,
                    where=f"{self._paths[part.file]}, {part}, column {column.path_in_schema!r}",
                    remedy=REMEDY,
                )

    def _expands(self, part: Part, names: tuple[str, ...]) -> _Expanded:
        """What a row group becomes when it is decoded, as far as that is not plain from its footer."""
        key = (part.file, part.group, names)
        with self._lock:
            found = self._expanded.get(key)
        if found is None:
            found = self._look(part, names)
            with self._lock:
                self._expanded[key] = found
                while len(self._expanded) > _LOOKED_AT:
                    self._expanded.popitem(last=False)
        return found

    def _look(self, part: Part, names: tuple[str, ...]) -> _Expanded:
        metadata = self._file(part.file).metadata
        group = metadata.row_group(part.group)
        wanted = tuple(f"{name}." for name in names)
        columns = [metadata.schema.column(each) for each in range(len(metadata.schema))]
        leaves = [each for each, column in enumerate(columns) if f"{column.path}.".startswith(wanted)]
        texts = [
            each
            for each in leaves
            if columns[each].physical_type == "BYTE_ARRAY" and columns[each].logical_type.type != "DECIMAL"
        ]
        # No value is longer than the row group.
        if group.num_rows * group.total_byte_size <= _MOST_DECODED:
            texts = []
        sized = [
            each
            for each in leaves
            if columns[each].max_repetition_level or columns[each].physical_type == "FIXED_LEN_BYTE_ARRAY"
        ]
        if group.num_rows <= _FEW_ROWS or not (texts or sized):
            return _Expanded(0, frozenset())
        # After a row of a column was read, what its metadata say can be asked for: see `parquet_footer`.
        paths = {each: columns[each].path for each in texts}
        entries: dict[int, Any] = {}
        one = replace(part, first=0, rows=1, step=1)
        with arrow_errors(f"{self._paths[part.file]}, {part}"):
            try:
                first = next(self._walk(one, names, frozenset(paths.values())).rows)
            except OSError as error:  # of encodings that Arrow decodes into no dictionary
                if "Not yet implemented" not in str(error):
                    raise
                first = next(self._walk(one, names).rows)
        arrays = [leaf for column in first.columns for leaf in _leaves_in(column)]
        if len(arrays) == len(leaves):
            entries = dict(zip(leaves, arrays, strict=True))
        dictionaries = set()
        for each, path in paths.items():
            longest = _longest(entries[each].dictionary) if _is_dictionary(entries.get(each)) else 0
            if longest * group.column(each).num_values > _MOST_DECODED:
                dictionaries.add(path)
        nbytes = sum(group.column(each).num_values * _width(columns[each]) for each in sized)
        return _Expanded(nbytes, frozenset(dictionaries))

    def _take_walk(self, key: _Key, first: int) -> tuple[int, _Walk] | None:
        """The walk that is nearest before a row; the others may be where somebody else reads on."""
        with self._lock:
            at = max((at for group, at in self._walks if group == key and at <= first), default=None)
            return None if at is None else (at, self._walks.pop((key, at)))

    def _keep_walk(self, key: _Key, at: int, walk: _Walk) -> None:
        with self._lock:
            self._walks[key, at] = walk
            nbytes = sum(each.nbytes for each in self._walks.values())
            while len(self._walks) > _WALKS and nbytes > self._most_walked:
                nbytes -= self._walks.popitem(last=False)[1].nbytes

    def _keep_passed(self, key: Hashable, rows: Any) -> None:
        with self._lock:
            if key in self._passed:
                return
            self._passed[key] = rows
            self._passed_bytes += rows.nbytes
            while self._passed_bytes > self._most_passed:
                self._passed_bytes -= self._passed.popitem(last=False)[1].nbytes

    def _take_passed(self, key: Hashable) -> Any:
        with self._lock:
            rows = self._passed.pop(key, None)
            self._passed_bytes -= 0 if rows is None else rows.nbytes
            return rows

    def _next(self, walk: _Walk, rows: int, where: str) -> Any:
        """The next rows of a walk, which come in one batch but for texts of more than 2 GiB."""
        got: list[Any] = []
        with arrow_errors(where):
            while sum(len(batch) for batch in got) < rows and (batch := next(walk.rows, None)) is not None:
                got.append(batch)
        count = sum(len(batch) for batch in got)
        if count != rows:
            raise CorruptError(
                "a row group has another number of rows than its footer says",
                expected=f"{rows} more rows",
                found=count,
                where=where,
                remedy=REMEDY,
            )
        for batch in got if walk.values else ():
            counts = [each for column in batch.columns for each in _values_in(column)]
            if len(counts) == len(walk.leaves):
                for leaf, values in zip(walk.leaves, counts, strict=True):
                    if leaf in walk.values:
                        walk.values[leaf] += values
        return _joined(got)

    def _walk(self, part: Part, names: tuple[str, ...], dictionaries: frozenset[str] = frozenset()) -> _Walk:
        import pyarrow.parquet as pq

        path = self._paths[part.file]
        file = self._file(part.file)
        with arrow_errors(f"{path}, {part}"):
            schema, wanted = file.metadata.schema, tuple(f"{name}." for name in names)
            columns = {each: schema.column(each) for each in range(len(schema))}
            leaves = [each for each, column in columns.items() if f"{column.path}.".startswith(wanted)]
            values = {each: 0 for each in leaves if columns[each].max_repetition_level}
            room = self._most_walked // (_WALKS * max(1, len(leaves))) - _PAGE
            buffer = 0 if part.is_whole else min(_BUFFER, max(_LEAST_BUFFER, room))
            reader = pq.ParquetFile(
                file.handle,
                metadata=file.metadata,
                page_checksum_verification=True,
                pre_buffer=False,
                buffer_size=buffer,
                read_dictionary=sorted(dictionaries),
            )
            # In one thread: other threads of the loader decode other row groups meanwhile.
            rows = reader.iter_batches(part.step, row_groups=[part.group], columns=list(names), use_threads=False)
            return _Walk(iter(rows), len(leaves) * (buffer + _PAGE), leaves, values)

    def _group(self, key: _Key) -> threading.Lock:
        with self._lock:
            group = self._groups.setdefault(key, threading.Lock())
            self._groups.move_to_end(key)
            while len(self._groups) > OPEN_GROUPS:
                gone, _ = self._groups.popitem(last=False)
                for each in [each for each in self._walks if each[0] == gone]:  # they hold their file open
                    del self._walks[each]
            return group

    def _file(self, number: int) -> _File:
        return self._files.get(number, lambda: self._open(number))

    def _open(self, number: int) -> _File:
        import pyarrow as pa

        path = self._paths[number]
        with reading(path):
            handle = pa.OSFile(os.fsencode(path))  # its reads name their place, so that threads may share it
            content, _ = footer_bytes(handle, path)
        self._data_files.opened(number)
        digest = digest_of(content)
        if digest != self._digests[number]:
            raise CorruptError(
                "the file was replaced while it was in use",
                expected=f"the footer {self._digests[number]}",
                found=digest,
                where=path,
                remedy="start the job again",
            )
        return _File(handle, parsed(content, path).metadata)


def _joined(batches: list[Any]) -> Any:
    import pyarrow as pa

    return batches[0] if len(batches) == 1 else pa.Table.from_batches(batches)


def _values_in(array: Any) -> list[int]:
    """How many values Parquet stores of each leaf of a column: a null or empty list is one."""
    return [len(leaf) + empty for leaf, empty in _leaves_and_empty(array)]


def _leaves_in(array: Any) -> list[Any]:
    """What is in the structs and lists of a column."""
    return [leaf for leaf, _ in _leaves_and_empty(array)]


def _leaves_and_empty(array: Any) -> list[tuple[Any, int]]:
    """Each leaf of a column, and how many null or empty lists are around it."""
    import pyarrow as pa

    types = pa.types
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves_and_empty(array.storage)
    if types.is_struct(kind):
        return [each for index in range(kind.num_fields) for each in _leaves_and_empty(array.field(index))]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = array.offsets.to_numpy()
        empty = int((offsets[1:] == offsets[:-1]).sum())
        child = array.values[int(offsets[0]) : int(offsets[-1])] if len(array) else array.values[:0]
    elif types.is_fixed_size_list(kind):
        empty = array.null_count if kind.list_size else len(array)
        child = array.flatten()
    else:
        return [(array, 0)]
    return [(leaf, empty + more) for leaf, more in _leaves_and_empty(child)]


def _is_dictionary(array: Any) -> bool:
    import pyarrow as pa

    return array is not None and pa.types.is_dictionary(array.type)


def _longest(texts: Any) -> int:
    """Bytes of the longest of some texts."""
    import pyarrow.compute as pc

    return pc.max(pc.binary_length(texts)).as_py() or 0


def _width(column: Any) -> int:
    """Bytes of a value of a Parquet column that is not text, when it is decoded."""
    widths = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "FIXED_LEN_BYTE_ARRAY": column.length, "BYTE_ARRAY": 0}
    return int(widths.get(column.physical_type, 8))
