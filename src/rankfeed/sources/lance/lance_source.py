"""Lance tables: fragments are blocks, read in ranges of some MiB."""

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from rankfeed._util.validate import check_int, check_name, check_optional, invalid
from rankfeed.columns.chunk_groups import by_chunk
from rankfeed.columns.columns import Column, ColumnBuffer, column_from_parts
from rankfeed.columns.field import Field
from rankfeed.errors import SourceError
from rankfeed.sources.arrow.arrow_columns import read_columns
from rankfeed.sources.arrow.types import Nulls, fields_of, logical_types_of, masks_of, parents_of
from rankfeed.sources.chunked import CACHE_BYTES, ChunkedSource
from rankfeed.sources.lance.lance_table import TableHandle, inspect_table
from rankfeed.sources.paths import check_utf8
from rankfeed.sources.source import Derived, Int64, check_columns, even_blocks, starts_of
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import DataFiles

#: Approximate decoded bytes of a range, and the number of ranges that fit in the cache: two for each of 64 lanes
#: whose window reaches into them, twice.
_CHUNK_BYTES = 8 << 20
_CACHED_CHUNKS = 256
#: Assumed bytes of a row of a column of varying length, if the files do not tell.
_VARYING_BYTES = 256
#: Rows of a fragment are read with those between them if they are at least one in this many.
_SPARSE = 4


class LanceSource(ChunkedSource):
    """A version of a Lance table.

    Blocks are the table's fragments, counted in rows that are not deleted and that the filter accepts. They are
    read in ranges of some MiB, which are cached; a few rows from distant places are read by themselves. The
    version is that of the moment of opening, here and in every process that unpickles the source.

    Args:
        path: of the table: a folder that has a folder `_versions`.
        columns: names of the columns to offer; None for all. Bytes of a blob column are read only if it is
            requested.
        version: number of the version; None for the latest.
        filter: a condition in SQL; only rows that satisfy it are samples. Evaluated when the table is opened;
            takes eight bytes per accepted row.
        nulls: "error", or "mask": zeros in their place and a column `<name>_valid`.
        cache_bytes: decoded bytes to keep.

    Raises:
        SourceError: no such table or version, a column that cannot be a tensor, no rows.
        CorruptError: it is damaged, or files of it are missing.
        ArgumentError: no such column; an invalid filter.

    Examples:
        >>> import tempfile, lance, pyarrow as pa
        >>> path = tempfile.mkdtemp() + "/numbers.lance"
        >>> _ = lance.write_dataset(pa.table({"x": range(10)}), path)
        >>> source = LanceSource(path, filter="x % 2 = 1")
        >>> len(source), int(source[1]["x"])
        (5, 3)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        filter: str | None = None,
        nulls: Nulls = "error",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        uri = os.fspath(path)
        self.path = uri if "://" in uri else os.path.abspath(uri)
        check_utf8(self.path, self.path, "the path of a Lance table")
        condition: object = filter
        if condition is not None and not (isinstance(condition, str) and condition.strip()):
            raise invalid("filter", "a condition in SQL", filter)
        self._nulls: Nulls = nulls
        self._info = inspect_table(self.path, _check_version(version), filter)
        self.version = self._info.version  #: number of the version that is read
        self._where = f"{self.path}, version {self.version}"
        label = self._where if filter is None else f"{self._where}, filter {filter!r}"
        self._handle = TableHandle(self._info)
        self._parents, self._blobs, self.derived, fields = _columns_of(
            self._info.schema, columns, nulls, self._where
        )
        self.logical_types = logical_types_of(self._info.schema)
        paths = self._info.files
        if any(paths):
            self.files = DataFiles([os.path.abspath(path) for fragment in paths for path in fragment])
        #: Number of the first file of each fragment.
        self._file_starts = starts_of([len(fragment) for fragment in paths])
        self._info = replace(self._info, schema=None, files=())  # not needed by other processes
        self._row_starts = starts_of(self._info.rows)
        chosen = self._info.chosen
        blocks = self._info.rows if chosen is None else np.diff(chosen.searchsorted(self._row_starts))
        accepted = b"" if chosen is None else chosen.astype("<i8").tobytes()
        files = "" if self.files is None else self.files.fingerprint
        fingerprint = digest_of(self._info.digest.encode(), accepted, files.encode())
        self._init_samples(label, fields, blocks, fingerprint)
        self._init_chunks(self._ranges(cache_bytes), cache_bytes)
        self.decoded_bytes = int(self._info.data_bytes.sum())

    def _independent(self) -> Self:
        source = super()._independent()
        source._handle = copy.copy(self._handle)  # with locks and a table of its own
        return source

    def _fetch_chunks(self, ids: Int64, names: tuple[str, ...]) -> dict[str, Column]:
        plain = self._without_blobs(names)
        if len(plain) == len(names):
            return super()._fetch_chunks(ids, names)
        columns = super()._fetch_chunks(ids, plain) if plain else {}
        unique, places = np.unique(ids, return_inverse=True)
        for parent in {self._parents[name] for name in names} & self._blobs:
            fields = {name: self._fields[name] for name in names if self._parents[name] == parent}
            rows = self._rows(unique)
            contents = self._read(by_chunk(rows, self._row_starts).numbers, "blobs", rows, parent)
            table = pa.table({parent: pa.array(contents, pa.large_binary())})
            blobs = read_columns(table, fields, where=self._where, first_row=rows, nulls=self._nulls)
            for name, stored in blobs.items():
                columns[name] = column_from_parts(fields[name], [stored.part(places.reshape(-1))])
        return {name: columns[name] for name in names}

    def _expect(self, ids: Int64, names: Sequence[str]) -> None:
        if plain := self._without_blobs(names):
            super()._expect(ids, plain)

    def _without_blobs(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if self._parents[name] not in self._blobs)

    def _load_chunk(self, index: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        return self._take(np.arange(self._chunk_starts[index], self._chunk_starts[index + 1]), names)

    def _take(self, ids: Int64, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        rows = self._rows(ids)
        fragments = by_chunk(rows, self._row_starts).numbers
        numbers = self._info.fragments[fragments].tolist()
        # Fields of a struct are columns here, but not in the table.
        parents = list(dict.fromkeys(self._parents[name] for name in names))
        start, span, where = int(rows[0]), int(rows[-1] - rows[0]) + 1, self._where
        if len(fragments) == 1 and span <= _SPARSE * len(rows):
            where = f"{where}, fragment {numbers[0]}"
            offset = start - int(self._row_starts[fragments[0]])
            table = self._read(fragments, "span", numbers[0], offset, span, parents)
            table = table.take(rows - start) if span > len(rows) else table
        else:
            table = self._read(fragments, "take", rows, numbers, parents)
        fields = {name: self._fields[name] for name in names}
        return read_columns(table, fields, where=where, first_row=rows, nulls=self._nulls)

    def _rows(self, ids: Int64) -> Int64:
        """The rows of samples, counted over those that are not deleted."""
        return ids if self._info.chosen is None else self._info.chosen[ids]

    def _read(self, fragments: Sequence[int], method: str, *arguments: Any) -> Any:
        """Call a method that reads some fragments, then check that their files were not changed."""
        result = self._handle.call(method, *arguments)
        if self.files is not None:
            for fragment in fragments:
                for file in range(*self._file_starts[fragment : fragment + 2].tolist()):
                    self.files.opened(file)
        return result

    def _ranges(self, cache_bytes: int) -> Int64:
        """Samples of each range, from the approximate bytes of a row in each fragment (without blobs)."""
        fields = [self._fields[name] for name in self._without_blobs(self._fields)]
        fixed = sum(field.row_bytes() for field in fields if field.kind == "dense")
        varying = sum(field.kind != "dense" for field in fields)
        row_bytes = np.full(len(self._info.rows), max(1.0, fixed + _VARYING_BYTES * varying))
        if varying and not self._blobs:
            stored = self._info.data_bytes / np.maximum(1, self._info.rows)
            row_bytes = np.where(stored > 0, np.maximum(stored, fixed), row_bytes)
        most = np.maximum(1, min(_CHUNK_BYTES, cache_bytes / _CACHED_CHUNKS) / row_bytes).astype(np.int64)
        sizes = zip(self._blocks.tolist(), most.tolist(), strict=True)
        return np.concatenate([even_blocks(rows, most_rows) for rows, most_rows in sizes])


def _columns_of(
    schema: Any, columns: Sequence[str] | None, nulls: Nulls, where: str
) -> tuple[dict[str, str], set[str], Derived, dict[str, Field]]:
    """The parent column of each column in the table, the names of blob columns, the masks, and the fields."""
    blobs = {  # columns whose bytes are stored apart, in either of the two encodings
        field.name
        for field in schema
        if getattr(field.type, "extension_name", "") == "lance.blob.v2"
        or (field.metadata or {}).get(b"lance-encoding:blob") == b"true"
    }
    schema = pa.schema([pa.field(field.name, pa.binary()) if field.name in blobs else field for field in schema])
    all_fields = fields_of(schema, nulls=nulls, columns=columns)
    parents = parents_of(schema, all_fields)
    derived = masks_of(all_fields, nulls)
    names = check_columns(columns, all_fields, derived)
    if any(parents[name] == "" for name in names):
        raise SourceError(
            "Lance cannot read a column without a name",
            where=where,
            remedy="leave the column out with columns=, or write the table again with a name for it",
        )
    if not names:
        raise SourceError("the table has no columns", where=where)
    return parents, blobs, derived, {name: all_fields[name] for name in names}


def _check_version(version: object) -> Any:
    if isinstance(version, str):  # a tag
        return check_name("version", version)
    return check_optional(check_int, "version", version, at_least=0, at_most=2**63 - 1)
