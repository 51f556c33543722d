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
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from rankfeed.errors import CorruptError
from rankfeed.sources.arrow_columns import arrow_errors
from rankfeed.sources.parquet_footer import REMEDY, footer_bytes, parsed, reading
from rankfeed.storage import digest_of

#: Files that are held open, and row groups that are under way.
OPEN_FILES, OPEN_GROUPS = 256, 128
#: Walks that are kept in one row group: lanes and threads that read in it at different places.
_WALKS = 64
#: Bytes of parts that were decoded on the way to another one, and are kept until they are asked for.
_PASSED_BYTES = 256 << 20
#: Bytes of a column that are read at once while a row group is walked through; one that is decoded whole is read
#: whole, so that no page can claim to be longer than its column.
_BUFFER = 1 << 20


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


@dataclass
class _Group:
    """A row group under way: whoever reads on in it waits for whoever does already."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    walks: list[tuple[int, Iterator[Any]]] = field(default_factory=list)


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
        most_passed: bytes of parts to keep that were decoded on the way to another one.
    """

    def __init__(self, paths: list[str], digests: list[str], most_passed: int) -> None:
        self.pid = os.getpid()
        self._paths = paths
        self._digests = digests
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int, tuple[str, ...]], _Group] = OrderedDict()
        self._passed: OrderedDict[Hashable, Any] = OrderedDict()
        self._passed_bytes = 0
        self._most_passed = min(_PASSED_BYTES, most_passed)

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
        if part.is_whole:
            return self._next(self._walk(part, names), part.rows, where)
        group = self._group(part, names)
        with group.lock:
            passed = self._take_passed((part.file, part.group, names, part.first))
            if passed is not None:
                return passed
            # The walk that is nearest before the part; the others may be where somebody else reads on.
            before = [walk for walk in group.walks if walk[0] <= part.first]
            if before:
                nearest = max(before, key=lambda walk: walk[0])
                group.walks.remove(nearest)
                at, walk = nearest
            else:
                at, walk = 0, self._walk(part, names)
            while at < part.first:
                # Whoever mixes rows of several parts comes back for those in between.
                self._keep_passed((part.file, part.group, names, at), self._next(walk, part.step, where))
                at += part.step
            rows = self._next(walk, part.rows, where)
            if at + part.rows < sum(part.totals):
                group.walks.append((at + part.rows, walk))
                del group.walks[:-_WALKS]
            return rows

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

    def _next(self, walk: Iterator[Any], rows: int, where: str) -> Any:
        """The next rows of a walk, which come in one batch but for texts of more than 2 GiB."""
        import pyarrow as pa

        got: list[Any] = []
        with arrow_errors(where):
            while sum(len(batch) for batch in got) < rows and (batch := next(walk, None)) is not None:
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
        return got[0] if len(got) == 1 else pa.Table.from_batches(got)

    def _walk(self, part: Part, names: tuple[str, ...]) -> Iterator[Any]:
        import pyarrow.parquet as pq

        path = self._paths[part.file]
        file = self._file(part.file)
        with arrow_errors(f"{path}, {part}"):
            reader = pq.ParquetFile(
                file.handle,
                metadata=file.metadata,
                page_checksum_verification=True,
                pre_buffer=False,
                buffer_size=0 if part.is_whole else _BUFFER,
            )
            # In one thread: other threads of the loader decode other row groups meanwhile.
            groups = list(range(part.group, part.group + part.groups))
            return iter(reader.iter_batches(part.step, row_groups=groups, columns=list(names), use_threads=False))

    def _group(self, part: Part, names: tuple[str, ...]) -> _Group:
        key = (part.file, part.group, names)
        with self._lock:
            group = self._groups.setdefault(key, _Group())
            self._groups.move_to_end(key)
            while len(self._groups) > OPEN_GROUPS:
                self._groups.popitem(last=False)
            return group

    def _file(self, number: int) -> _File:
        with self._lock:
            found = self._files.get(number)
            if found is not None:
                self._files.move_to_end(number)
                return found
        opened = self._open(number)  # outside the lock: others go on reading; two openings do no harm
        with self._lock:
            self._files[number] = opened
            while len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return opened

    def _open(self, number: int) -> _File:
        import pyarrow as pa

        path = self._paths[number]
        with reading(path):
            handle = pa.OSFile(path)  # its reads name their place, so that threads may share it
            content, _ = footer_bytes(handle, path)
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
