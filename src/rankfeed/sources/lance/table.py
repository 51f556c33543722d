"""A version of a Lance table as one process reads it: calls into the Lance library, and what may go wrong there.

Nothing here may run in a process that will be forked; :mod:`rankfeed.sources.lance.process` sees to that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import ArgumentError, CorruptError, UnsafeError
from rankfeed.sources.extras import need
from rankfeed.sources.lance.errors import DAMAGED, check_file, native, no_version, short
from rankfeed.storage import check_data_name, digest_of

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DataFile:
    """A file of a fragment.

    Args:
        path: relative to the table's directory of data.
        size: bytes that the manifest says it has; 0 where that is not recorded.
    """

    path: str
    size: int = 0


def _data_file(file: Any, where: str) -> DataFile:
    """A file as Lance describes it.

    Raises:
        UnsafeError: it is outside the table.
    """
    check_data_name(file.path, where)
    if getattr(file, "base_id", None) is not None:
        raise UnsafeError(
            "the table names files of another table (a shallow clone)",
            expected="files in the directory of the table",
            found=f"{file.path} of base {file.base_id}",
            where=where,
            remedy="open the other table; or copy it by LanceDataset.deep_clone()",
        )
    return DataFile(file.path, file.file_size_bytes or 0)


@dataclass(frozen=True)
class Facts:
    """What there is to know of a version before any row is read. Pickles, and is compared where it is read.

    Args:
        uri: of the table.
        version: the version's number.
        schema: a `pyarrow.Schema`.
        fragments: int64 [f], their numbers.
        rows: int64 [f], rows of each that are not deleted.
        data_bytes: int64 [f], size of each one's data files.
        digest: of all this but the place, and of the data files' names, which Lance draws at random.
        chosen: int64 [k], sorted: the rows that a filter lets through, counted over the table's live rows.
        files: for each fragment, the paths of its files that lie in the table's folder.
    """

    uri: str
    version: int
    schema: Any
    fragments: Int64
    rows: Int64
    data_bytes: Int64
    digest: str
    chosen: Int64 | None = None
    files: tuple[tuple[str, ...], ...] = ()


class LanceTable:
    """An open version of a table.

    Args:
        uri: of the table.
        version: its number or a tag; None for the latest.
        table: a `lance.LanceDataset` that is open already.

    Raises:
        SourceError: there is no such table or version.
        CorruptError: it is damaged.
    """

    def __init__(self, uri: str, version: int | str | None, table: Any = None) -> None:
        lance = need("lance", extra="lance")
        self.uri = uri
        with native(f"{uri}, version {version or 'latest'}"):
            try:
                self._table = lance.dataset(uri, version=version) if table is None else table
            except ValueError as error:
                if "not found" in str(error).lower():
                    raise no_version(uri, version, error) from error
                raise
            self.version = int(self._table.version)
            self._fragments = {fragment.fragment_id: fragment for fragment in self._table.get_fragments()}
        self._checked: set[int] = set()

    def facts(self, condition: str | None = None) -> Facts:
        """Schema, fragments and counts; and which rows a condition lets through.

        Raises:
            ArgumentError: the condition is none of SQL on this table's columns.
            CorruptError: the manifest cannot be believed.
        UnsafeError: it names files outside the table.
        """
        where = f"{self.uri}, version {self.version}"
        rows, sizes, names, paths = [], [], [], []
        with native(where):
            schema = self._table.schema
            for fragment in self._fragments.values():
                metadata = fragment.metadata
                files = [_data_file(file, where) for file in metadata.files]
                rows.append(int(fragment.count_rows()))
                sizes.append(sum(file.size for file in files))
                names.append(f"{fragment.fragment_id}:{metadata.physical_rows}:{rows[-1]}:{files}")
                paths.append(self._paths(fragment))
        if rows and min(rows) < 0:
            raise CorruptError("a fragment has a negative number of rows", where=where, remedy=DAMAGED)
        found = Facts(
            self.uri,
            self.version,
            schema,
            np.array(list(self._fragments), np.int64),
            np.array(rows, np.int64),
            np.array(sizes, np.int64),
            digest_of(str(self.version).encode(), str(schema).encode(), "\n".join(names).encode()),
            files=tuple(paths),
        )
        return found if condition is None else replace(found, chosen=self._chosen(condition, where))

    def _paths(self, fragment: Any) -> tuple[str, ...]:
        """Where the files of a fragment lie, those of other tables left out (a shallow clone has some)."""
        metadata = fragment.metadata
        files = [f"data/{each.path}" for each in metadata.files if getattr(each, "base_id", None) is None]
        deletions = metadata.deletion_file
        if deletions is not None and getattr(deletions, "base_id", None) is None:
            files += filter(None, [fragment.deletion_file()])
        return () if "://" in self.uri else tuple(os.path.join(self.uri, each) for each in files)

    def deleted_from(self) -> list[int]:
        """Fragments that have a list of deleted rows."""
        with native(f"{self.uri}, version {self.version}"):
            return [number for number, each in self._fragments.items() if each.metadata.deletion_file]

    def check(self) -> None:
        """Whether all files are there and whole, as far as their sizes and ends tell.

        Raises:
            SourceError, CorruptError: they are not.
        """

        def look(number: int) -> None:
            with native(self.where(number)):
                self._check_files(number)

        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(look, self._fragments):
                pass

    def try_deletions(self, fragments: Sequence[int]) -> None:
        """Read lists of deleted rows: damaged ones may end the process, so do it where that does no harm.

        Raises:
            CorruptError: one is damaged.
        """

        def read(number: int) -> None:
            with native(self.where(number)):
                self._fragments[number].scanner(columns=[], with_row_address=True, limit=1).to_table()

        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(read, fragments):
                pass

    def _chosen(self, condition: str, where: str) -> Int64:
        with native(where):
            try:
                scanner = self._table.scanner(columns=["_rowoffset"], filter=condition, scan_in_order=True)
                parts = [batch.column(0).to_numpy().astype(np.int64) for batch in scanner.to_batches()]
            except (ValueError, TypeError) as error:
                if "Invalid user input" not in str(error):
                    raise
                raise ArgumentError(
                    "the filter cannot be used",
                    expected="a condition in SQL on the table's columns, such as: label = 3 AND year > 1999",
                    found=f"{condition!r}: {short(error)}",
                    where=where,
                ) from error
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    def span(self, fragment: int, first: int, count: int, columns: Sequence[str]) -> Any:
        """A stretch of a fragment's live rows, as a `pyarrow.Table`.

        Raises:
            SourceError, CorruptError: it cannot be read.
        """
        where = self.where(fragment)
        with native(where):
            self._check_files(fragment)
            scanner = self._fragments[fragment].scanner(
                columns=list(columns), offset=first, limit=count, batch_size=max(1, count)
            )
            table = scanner.to_table()
        return _counted(table, count, where)

    def take(self, rows: Int64, fragments: Sequence[int], columns: Sequence[str]) -> Any:
        """Rows of the table (counted over its live rows, ascending), as a `pyarrow.Table`.

        Args:
            rows: int64 [m].
            fragments: those that the rows lie in.
            columns: names of the table's columns.

        Raises:
            SourceError, CorruptError: they cannot be read.
        """
        where = f"{self.uri}, version {self.version}"
        with native(where):
            for fragment in fragments:
                if fragment not in self._checked:
                    self._check_files(fragment)
                    self._checked.add(fragment)
            table = self._table.take(rows, columns=list(columns))
        return _counted(table, len(rows), where)

    def batch(self, rows: Int64, columns: Any, row_ids: bool) -> Any:
        """Rows of the table (counted over its live rows), in the order given, as a `pyarrow.RecordBatch`.

        Args:
            rows: int64 [m], at least one.
            columns: names of columns, or names and what they are in SQL.
            row_ids: whether to add the column `_rowid`.

        Raises:
            SourceError, CorruptError: they cannot be read.
        """
        where = f"{self.uri}, version {self.version}"
        if row_ids:
            columns = {**columns, "_rowid": "_rowid"} if isinstance(columns, dict) else [*columns, "_rowid"]
        with native(where):
            table = self._table.take(rows, columns=columns).combine_chunks()
        (batch,) = _counted(table, len(rows), where).to_batches()
        return batch

    def blobs(self, rows: Int64, column: str) -> list[bytes | None]:
        """The bytes of a blob column in some rows of the table, in the order given.

        Raises:
            SourceError, CorruptError: they cannot be read.
        """
        where = f"{self.uri}, version {self.version}, column {column!r}"
        with native(where):
            pairs = self._table.read_blobs(column, indices=rows.tolist(), preserve_order=True)
        if len(pairs) != len(rows):
            raise CorruptError("blobs are missing", expected=len(rows), found=len(pairs), where=where)
        return [content for _, content in pairs]

    def where(self, fragment: int) -> str:
        """A fragment, for errors."""
        return f"{self.uri}, version {self.version}, fragment {fragment}"

    def _check_files(self, fragment: int) -> None:
        """Lance reads what a cut file seems to say; the size in the manifest knows better."""
        metadata = self._fragments[fragment].metadata
        if "://" in self.uri:
            return
        deletions = metadata.deletion_file
        for file in metadata.files:
            path = _data_file(file, self.where(fragment)).path
            check_file(os.path.join(self.uri, "data", path), file.file_size_bytes, self.where(fragment))
        if deletions is not None and getattr(deletions, "base_id", None) is None:
            path = self._fragments[fragment].deletion_file()
            if path is not None:
                check_file(os.path.join(self.uri, path), None, self.where(fragment))


def _counted(table: Any, rows: int, where: str) -> Any:
    if table.num_rows != rows:
        raise CorruptError(
            "Lance returned another number of rows than were asked for",
            expected=rows,
            found=table.num_rows,
            where=where,
            remedy=DAMAGED,
        )
    return table
