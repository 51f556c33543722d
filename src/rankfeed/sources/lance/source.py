"""Lance tables: fragments are blocks, read in long ranges of their live rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_int, check_name, check_optional, invalid
from rankfeed.columns import ColumnBuffer, Columns, Field, column_from_parts
from rankfeed.errors import SourceError
from rankfeed.sources.arrow.columns import read_columns
from rankfeed.sources.chunked import ChunkedSource
from rankfeed.sources.format import Format
from rankfeed.sources.lance.columns import is_blob, offered
from rankfeed.sources.lance.process import Handle, facts
from rankfeed.sources.paths import Paths, check_utf8
from rankfeed.sources.source import Int64, check_columns, check_ids
from rankfeed.storage import DataFiles, digest_of

#: About what is read in one go, decoded; and how many such ranges the cache has to hold: two for each of 64 lanes
#: whose window reaches into them, twice over.
_CHUNK_BYTES = 8 << 20
_CACHED_CHUNKS = 256
#: What a row of a column of varying length is taken for where the size of the files does not tell.
_VARYING_BYTES = 256
#: Rows that a filter let through are read with those between them where they are at least one in so many.
_SPARSE = 4


class LanceSource(ChunkedSource):
    """A version of a Lance table.

    Blocks are the table's fragments, counted in rows that are not deleted (and that the filter lets through).
    They are read in ranges of some MiB, which a cache keeps (it has room for many); a few rows from far apart are
    taken by themselves.
    The version is that of the moment of opening, here and in every process that the source is sent to.

    Args:
        path: of the table: a folder that has a folder `_versions`.
        columns: names of those to offer; None for all. A blob column's bytes are read only where it is asked for.
        version: number of the version; None for the latest.
        filter: a condition in SQL; only rows that it holds for are samples. Worked out when the table is opened:
            eight bytes a row that it lets through.
        nulls: "error", or "mask": zeros in their place and a column `<name>_valid`.
        cache_bytes: how much of what was read is kept.

    Raises:
        SourceError: no such table or version, a column that cannot be a tensor, no rows.
        CorruptError: it is damaged, or files of it are missing.
        ArgumentError: no such column; a filter that is no condition.

    Examples:
        >>> import tempfile, lance, pyarrow as pa
        >>> path = tempfile.mkdtemp() + "/numbers.lance"
        >>> _ = lance.write_dataset(pa.table({"x": range(10)}), path)
        >>> source = LanceSource(path, filter="x % 2 = 1")
        >>> len(source), int(source[1]["x"])
        (5, 3)
    """

    default_shuffle = "window"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        filter: str | None = None,
        nulls: Literal["error", "mask"] = "error",
        cache_bytes: int = 1 << 30,
    ) -> None:
        uri = os.fspath(path)
        self.path = uri if "://" in uri else os.path.abspath(uri)
        check_utf8(self.path, self.path, "the path of a Lance table")
        self._filter = _condition(filter)
        self._nulls = nulls
        self._facts = facts(self.path, _version(version), self._filter)
        self._handle = Handle(self._facts)
        self._tops, self._blobs, self._fields = offered(self._facts.schema, columns, nulls, self._where())
        self._has_blobs = any(map(is_blob, self._facts.schema))
        paths = self._facts.files
        if any(paths):
            self.files = DataFiles([os.path.abspath(path) for some in paths for path in some])
        #: Numbers of the first file of each fragment, and at the end their number.
        self._file_starts = _starts(np.array([len(some) for some in paths], np.int64))
        self._facts = replace(self._facts, schema=None, files=())  # have served; they need not travel
        self._per_fragment = self._counts()
        if not self._per_fragment.sum():
            raise SourceError(
                "the table has no rows" if filter is None else "no row fits the filter",
                found=filter,
                where=self._where(),
            )
        self._init_chunks(self._cut(cache_bytes), cache_bytes, data_bytes=int(self._facts.data_bytes.sum()))

    @property
    def version(self) -> int:
        """Number of the version that is read."""
        return self._facts.version

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return self._fields

    @cached_property
    def blocks(self) -> Int64:
        """Samples in each fragment: int64."""
        return self._per_fragment

    @cached_property
    def fingerprint(self) -> str:
        """Of version, schema, counts, the data files, and the rows that a filter lets through."""
        chosen = self._facts.chosen
        kept = b"" if chosen is None else chosen.astype("<i8").tobytes()
        files = "" if self.files is None else self.files.fingerprint
        return digest_of(self._facts.digest.encode(), kept, files.encode())

    def __repr__(self) -> str:
        return f"LanceSource({self.path!r}, version={self.version}, {len(self)} samples)"

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples; the bytes of a blob column are read for these rows alone.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or the table cannot be read.
            CorruptError: it is damaged, or was cleaned up while it was in use.
        """
        names = check_columns(columns, self._fields)
        if self.files is not None:
            self.files.check_open(at_intervals=True)
        plain = [name for name in names if self._tops[name] not in self._blobs]
        if len(plain) == len(names):
            return super().fetch(sample_ids, names)
        ids = check_ids(sample_ids, len(self))
        found = dict(super().fetch(ids, plain)) if plain else {}
        unique, places = np.unique(ids, return_inverse=True)
        for top in {self._tops[name] for name in names} & self._blobs:
            for name, stored in self._blob_column(top, unique).items():
                found[name] = column_from_parts(self._all_fields(name), [stored.part(places.reshape(-1))])
        return Columns({name: found[name] for name in names}, len(ids))

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """Read the ranges that will be needed next, in the background."""
        names = check_columns(columns, self._fields)
        plain = [name for name in names if self._tops[name] not in self._blobs]
        if plain:
            super().expect(sample_ids, plain)

    def _all_fields(self, name: str) -> Field:
        return self._fields.get(name) or Field("dense", "bool")

    def _blob_column(self, top: str, ids: Int64) -> dict[str, ColumnBuffer]:
        rows = self._rows(ids)
        contents = self._read(self._fragments_of(rows), "blobs", rows, top)
        valid = np.array([content is not None for content in contents], bool)
        if self._nulls == "error" and not valid.all():
            raise SourceError(
                "a blob is null",
                where=f"{self._where()}, column {top!r}, row {rows[int(np.argmin(valid))]}",
                remedy='leave the column out with columns=..., or open the table with nulls="mask"',
            )
        offsets = np.zeros(len(contents) + 1, np.int64)
        np.cumsum([len(content or b"") for content in contents], out=offsets[1:])
        values = np.frombuffer(b"".join(content or b"" for content in contents), np.uint8)
        return {top: ColumnBuffer(values, offsets), f"{top}_valid": ColumnBuffer(valid)}

    def _load_chunk(self, number: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        fragment, first, count = (int(each[number]) for each in self._chunks)
        tops = self._top_columns(names)
        if self._facts.chosen is None:
            start = first - int(self._fragment_starts[fragment])
            table = self._read([fragment], "span", int(self._facts.fragments[fragment]), start, count, tops)
            return self._stored(table, names, first, f"fragment {self._facts.fragments[fragment]}")
        rows = self._facts.chosen[first : first + count]
        table = self._chosen_span(fragment, rows, tops)
        return self._stored(table, names, rows, f"fragment {self._facts.fragments[fragment]}")

    def _chosen_span(self, fragment: int, rows: Int64, tops: list[str]) -> Any:
        """Rows that a filter let through, all of one fragment: with those between them, if these are few."""
        first, span = int(rows[0]), int(rows[-1] - rows[0]) + 1
        if span > _SPARSE * len(rows):
            return self._take_rows(rows, tops)
        start = first - int(self._row_starts[fragment])
        table = self._read([fragment], "span", int(self._facts.fragments[fragment]), start, span, tops)
        return table if span == len(rows) else table.take(rows - first)

    def _take(self, ids: Int64, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        rows = self._rows(ids)
        table = self._take_rows(rows, self._top_columns(names))
        return self._stored(table, names, rows, "rows from several fragments")

    def _stored(
        self, table: Any, names: tuple[str, ...], first: int | Int64, place: str
    ) -> dict[str, ColumnBuffer]:
        fields = {name: self._fields[name] for name in names}
        return read_columns(table, fields, where=f"{self._where()}, {place}", first_row=first, nulls=self._nulls)

    def _top_columns(self, names: Sequence[str]) -> list[str]:
        """The table's own columns that hold these (a struct's fields are columns by themselves here)."""
        return list(dict.fromkeys(self._tops[name] for name in names))

    def _rows(self, ids: Int64) -> Int64:
        """Samples as rows of the table, counted over its live rows."""
        return ids if self._facts.chosen is None else self._facts.chosen[ids]

    def _fragments_of(self, rows: Int64) -> list[int]:
        """The fragments that rows of the table lie in, counted from 0."""
        fragments: list[int] = np.unique(self._row_starts.searchsorted(rows, side="right") - 1).tolist()
        return fragments

    def _take_rows(self, rows: Int64, tops: list[str]) -> Any:
        fragments = self._fragments_of(rows)
        return self._read(fragments, "take", rows, self._facts.fragments[fragments].tolist(), tops)

    def _read(self, fragments: Sequence[int], method: str, *arguments: Any) -> Any:
        """What a method of the table reads in some fragments, whose files are what they were."""
        found = self._handle.call(method, *arguments)
        if self.files is not None:
            for fragment in fragments:
                for number in range(*self._file_starts[fragment : fragment + 2].tolist()):
                    self.files.opened(number)
        return found

    def _counts(self) -> Int64:
        """Samples of each fragment; sets where each starts, in samples and in rows of the table."""
        self._row_starts = _starts(self._facts.rows)
        chosen = self._facts.chosen
        counts = self._facts.rows if chosen is None else np.diff(chosen.searchsorted(self._row_starts))
        self._fragment_starts = _starts(counts)
        return counts

    def _cut(self, cache_bytes: int) -> Int64:
        """Samples of each range that is read in one go; sets where these lie: fragment, first sample, count."""
        most = np.maximum(1, min(_CHUNK_BYTES, cache_bytes / _CACHED_CHUNKS) / self._row_bytes()).astype(np.int64)
        ranges = -(-self._per_fragment // most)
        fragment = np.repeat(np.arange(len(ranges)), ranges)
        index = np.arange(len(fragment)) - np.repeat(_starts(ranges)[:-1], ranges)
        first = index * most[fragment]
        count = np.minimum(most[fragment], self._per_fragment[fragment] - first)
        self._chunks = fragment, self._fragment_starts[fragment] + first, count
        return count

    def _row_bytes(self) -> npt.NDArray[np.float64]:
        """Of the columns offered, about, in each fragment (blobs apart, which are read by themselves)."""
        fields = [field for name, field in self._fields.items() if self._tops[name] not in self._blobs]
        fixed = sum(field.row_bytes() for field in fields if field.kind == "dense")
        varying = sum(field.kind != "dense" for field in fields)
        guess = np.full(len(self._facts.rows), max(1.0, fixed + _VARYING_BYTES * varying))
        if not varying or self._has_blobs:
            return guess
        stored = self._facts.data_bytes / np.maximum(1, self._facts.rows)
        return np.where(stored > 0, np.maximum(stored, fixed), guess)

    def _where(self) -> str:
        return f"{self.path}, version {self.version}"


def _starts(counts: Int64) -> Int64:
    """Where each stretch starts, and at the end their sum."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _version(version: object) -> Any:
    if isinstance(version, str):
        return check_name("version", version)
    return check_optional(check_int, "version", version, at_least=0, at_most=2**63 - 1)


def _condition(condition: object) -> str | None:
    if condition is None or (isinstance(condition, str) and condition.strip()):
        return condition
    raise invalid("filter", "a condition in SQL", condition)


def _fits(where: Paths) -> bool:
    if not isinstance(where, (str, os.PathLike)):
        return False
    try:
        with os.scandir(os.path.join(where, "_versions")) as entries:
            return any(entry.name.endswith(".manifest") for entry in entries)
    except (OSError, ValueError):
        return False


FORMAT = Format("lance", "a Lance table (a folder with _versions)", _fits, LanceSource)
