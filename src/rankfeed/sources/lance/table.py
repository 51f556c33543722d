"""A version of a Lance table, read with the Lance library.

Nothing here may run in a process that is forked later: see `rankfeed.sources.lance.process`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import ArgumentError, CorruptError, UnsafeError
from rankfeed.sources.extras import need
from rankfeed.sources.lance.errors import DAMAGED, check_file, lance_errors, no_such_version, short_message
from rankfeed.sources.parallel import in_parallel
from rankfeed.storage import check_data_name, digest_of

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TableInfo:
    """What is known of a version before rows are read.

    Args:
        uri: of the table.
        version: number of the version.
        schema: a `pyarrow.Schema`.
        fragments: int64 [f], their ids.
        rows: int64 [f], rows of each that are not deleted.
        data_bytes: int64 [f], size of the data files of each.
        digest: of all this except the URI, and of the names of the data files, which Lance draws at random.
        chosen: int64 [k], sorted: the rows that a filter accepts, counted over the rows that are not deleted.
        files: for each fragment, the paths of its files that are in the table's directory.
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
        table: an open `lance.LanceDataset`; None to open one.
    """

    def __init__(self, uri: str, version: int | str | None, table: Any = None) -> None:
        lance = need("lance", extra="lance")
        self.uri = uri
        with lance_errors(f"{uri}, version {version or 'latest'}"):
            try:
                self._table = lance.dataset(uri, version=version) if table is None else table
            except ValueError as error:
                if "not found" in str(error).lower():
                    raise no_such_version(uri, version, error) from error
                raise
            self.version = int(self._table.version)
            self._fragments = {fragment.fragment_id: fragment for fragment in self._table.get_fragments()}
        self._where = f"{uri}, version {self.version}"
        self._checked: set[int] = set()

    def resolved_version(self) -> int:
        """Number of the version."""
        return self.version

    def info(self, condition: str | None = None) -> TableInfo:
        """Schema, fragments and counts, and the rows that a condition in SQL accepts."""
        rows, sizes, names, paths = [], [], [], []
        with lance_errors(self._where):
            schema = self._table.schema
            for fragment in self._fragments.values():
                files = [_checked_file(file, self._where) for file in fragment.metadata.files]
                rows.append(int(fragment.count_rows()))
                sizes.append(sum(size for _, size in files))
                names.append(f"{fragment.fragment_id}:{fragment.metadata.physical_rows}:{rows[-1]}:{files}")
                paths.append(self._paths(fragment))
        if rows and min(rows) < 0:
            raise CorruptError("a fragment has a negative number of rows", where=self._where, remedy=DAMAGED)
        return TableInfo(
            self.uri,
            self.version,
            schema,
            np.array(list(self._fragments), np.int64),
            np.array(rows, np.int64),
            np.array(sizes, np.int64),
            digest_of(str(self.version).encode(), str(schema).encode(), "\n".join(names).encode()),
            None if condition is None else self._matching_rows(condition),
            tuple(paths),
        )

    def _paths(self, fragment: Any) -> tuple[str, ...]:
        """Paths of the files of a fragment, without those of other tables (in a shallow clone)."""
        metadata = fragment.metadata
        files = [f"data/{each.path}" for each in metadata.files if getattr(each, "base_id", None) is None]
        deletions = metadata.deletion_file
        if deletions is not None and getattr(deletions, "base_id", None) is None:
            files += filter(None, [fragment.deletion_file()])
        return () if "://" in self.uri else tuple(os.path.join(self.uri, each) for each in files)

    def _matching_rows(self, condition: str) -> Int64:
        with lance_errors(self._where):
            try:
                scanner = self._table.scanner(columns=["_rowoffset"], filter=condition, scan_in_order=True)
                parts = [batch.column(0).to_numpy().astype(np.int64) for batch in scanner.to_batches()]
            except (ValueError, TypeError) as error:
                if "Invalid user input" not in str(error):
                    raise
                raise ArgumentError(
                    "the filter cannot be used",
                    expected="a condition in SQL on the table's columns, such as: label = 3 AND year > 1999",
                    found=f"{condition!r}: {short_message(error)}",
                    where=self._where,
                ) from error
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    def fragments_with_deletions(self) -> list[int]:
        """Fragments that have a list of deleted rows."""
        with lance_errors(self._where):
            return [number for number, each in self._fragments.items() if each.metadata.deletion_file]

    def check(self) -> None:
        """Check that all files exist and are complete, by their sizes and ends."""
        self._each_fragment(self._check_files, self._fragments)

    def read_deletions(self, fragments: Sequence[int]) -> None:
        """Read lists of deleted rows; damaged ones may crash the process."""

        def read(number: int) -> None:
            self._fragments[number].scanner(columns=[], with_row_address=True, limit=1).to_table()

        self._each_fragment(read, fragments)

    def _each_fragment(self, work: Callable[[int], None], fragments: Iterable[int]) -> None:
        def one(number: int) -> None:
            with lance_errors(self._fragment_name(number)):
                work(number)

        in_parallel(one, list(fragments))

    def span(self, fragment: int, first: int, count: int, columns: Sequence[str]) -> Any:
        """A range of the rows of a fragment that are not deleted, as a `pyarrow.Table`."""
        where = self._fragment_name(fragment)
        with lance_errors(where):
            self._check_files(fragment)
            scanner = self._fragments[fragment].scanner(
                columns=list(columns), offset=first, limit=count, batch_size=max(1, count)
            )
            return _counted(scanner.to_table(), count, where)

    def take(self, rows: Int64, fragments: Sequence[int], columns: Sequence[str]) -> Any:
        """Rows as a `pyarrow.Table`.

        Args:
            rows: int64 [m], ascending, counted over the rows of the table that are not deleted.
            fragments: those that contain the rows.
            columns: names of columns of the table.
        """
        with lance_errors(self._where):
            for fragment in fragments:
                if fragment not in self._checked:
                    self._check_files(fragment)
                    self._checked.add(fragment)
            return _counted(self._table.take(rows, columns=list(columns)), len(rows), self._where)

    def batch(self, rows: Int64, columns: Any, row_ids: bool) -> Any:
        """Rows (at least one) in the given order, as a `pyarrow.RecordBatch`.

        ``columns`` are names, or a dict of names and SQL expressions; ``row_ids`` adds the column `_rowid`.
        """
        if row_ids:
            columns = {**columns, "_rowid": "_rowid"} if isinstance(columns, dict) else [*columns, "_rowid"]
        with lance_errors(self._where):
            table = self._table.take(rows, columns=columns).combine_chunks()
        (batch,) = _counted(table, len(rows), self._where).to_batches()
        return batch

    def blobs(self, rows: Int64, column: str) -> list[bytes | None]:
        """The bytes of a blob column in some rows, in the given order."""
        where = f"{self._where}, column {column!r}"
        with lance_errors(where):
            pairs = self._table.read_blobs(column, indices=rows.tolist(), preserve_order=True)
        if len(pairs) != len(rows):
            raise CorruptError("blobs are missing", expected=len(rows), found=len(pairs), where=where)
        return [content for _, content in pairs]

    def _fragment_name(self, fragment: int) -> str:
        return f"{self._where}, fragment {fragment}"

    def _check_files(self, fragment: int) -> None:
        """Compare the files with the manifest: Lance reads truncated files without an error."""
        metadata = self._fragments[fragment].metadata
        if "://" in self.uri:
            return
        where = self._fragment_name(fragment)
        for file in metadata.files:
            path, _ = _checked_file(file, where)
            check_file(os.path.join(self.uri, "data", path), file.file_size_bytes, where)
        deletions = metadata.deletion_file
        if deletions is not None and getattr(deletions, "base_id", None) is None:
            path = self._fragments[fragment].deletion_file()
            if path is not None:
                check_file(os.path.join(self.uri, path), None, where)


def _checked_file(file: Any, where: str) -> tuple[str, int]:
    """Path and size of a data file, which must be in the table's directory; 0 if the size is not recorded."""
    check_data_name(file.path, where)
    if getattr(file, "base_id", None) is not None:
        raise UnsafeError(
            "the table names files of another table (a shallow clone)",
            expected="files in the directory of the table",
            found=f"{file.path} of base {file.base_id}",
            where=where,
            remedy="open the other table; or copy it by LanceDataset.deep_clone()",
        )
    return file.path, file.file_size_bytes or 0


def _counted(table: Any, rows: int, where: str) -> Any:
    if table.num_rows != rows:
        raise CorruptError(
            "Lance returned another number of rows than requested",
            expected=rows,
            found=table.num_rows,
            where=where,
            remedy=DAMAGED,
        )
    return table
