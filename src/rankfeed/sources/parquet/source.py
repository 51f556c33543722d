"""Parquet files and folders of them, read in place: row groups are blocks."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_int
from rankfeed.columns import ColumnBuffer, Columns, Field
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow.columns import read_columns
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.sources.arrow.types import VALID, Nulls, fields_of, leaves_of
from rankfeed.sources.chunked import ChunkedSource
from rankfeed.sources.format import Format
from rankfeed.sources.parquet.detect import fits, places
from rankfeed.sources.parquet.footer import REMEDY, Footer, read_footers
from rankfeed.sources.parquet.partitions import Partitions
from rankfeed.sources.parquet.reader import LargeRows, Part, Reader
from rankfeed.sources.paths import Paths, common_root
from rankfeed.sources.source import Int64, check_columns, check_ids
from rankfeed.storage import DataFiles, digest_of

#: What is decoded in one go is about as large as this: larger row groups are read in parts, small ones that lie
#: one behind the other together. Where not all data fit into the cache, it is not larger than this share of it, so
#: that what the lanes of a window shuffle need at the same time does.
_PART_BYTES, _PARTS_IN_CACHE = 8 << 20, 256
#: Smaller parts are not made, however small the cache.
_LEAST_BYTES = 64 << 10
#: What a row takes at least of each column that is not dense, when it is decoded: its offsets, and a short text. A
#: text that comes again and again takes a few bits in the file, which says nowhere how long it is.
_LEAST_ROW = 32
#: Row groups that are read by themselves, as one beside them is damaged, have this share of the cache besides.
_APART = 16
#: Parts that one row group may be cut into.
_MOST_PARTS = 1 << 20


class ParquetSource(ChunkedSource):
    """Parquet files: one, a list, a pattern, or a folder with all that is below it.

    Folders called ``key=value`` become columns: int64 where all values are whole numbers, else text. Columns are
    laid out as `rankfeed.sources.arrow.types.fields_of` says: lists of numbers are ragged, lists of one fixed
    size dense, structs become columns "outer.inner".

    Args:
        where: a path, a glob or brace pattern, a folder, or a list of these.
        columns: names of those to offer, which are alone decoded; None for all.
        nulls: "error": a null that is met is an error which names file, row and column; "mask": it is read as zero
            or empty, and a boolean column ``<name>_valid`` tells.
        cache_bytes: of decoded rows that are kept, shared by the threads of a process.

    Raises:
        SourceError: nothing is there, files differ in their columns, or one is encrypted.
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

    _transient: ClassVar[tuple[str, ...]] = ("_reader", "_apart", "_finer")
    files: DataFiles

    def __init__(
        self,
        where: Paths,
        *,
        columns: Sequence[str] | None = None,
        nulls: Nulls = "error",
        cache_bytes: int = 1 << 30,
    ) -> None:
        cache_bytes = check_int("cache_bytes", cache_bytes, at_least=0)
        found = places(where)
        self._paths = [place.path for place in found]
        self.files = DataFiles(self._paths)
        footers = read_footers(self._paths)
        self._digests = [footer.digest for footer in footers]
        self._nulls: Nulls = nulls
        schema = _one_schema(self._paths, footers)
        with arrow_errors(self._paths[0]):
            own = fields_of(schema, nulls=nulls, columns=columns)
        self._partitions = Partitions(found, own, nulls)
        known = {**own, **self._partitions.fields}
        self._fields = {name: known[name] for name in check_columns(columns, known)}
        roots = {name: path[0] for name, path in leaves_of(schema)}
        self._roots = {name: roots.get(name) or roots[name.removesuffix(VALID)] for name in own}
        self._rows = np.array([rows for footer in footers for rows in footer.rows], np.int64)
        if not self._rows.sum():
            raise SourceError("there are no rows", where=self._paths[0])
        facts = _fingerprint(self._paths, footers, known, self._partitions)
        self._fingerprint = digest_of(facts.encode(), self.files.fingerprint.encode())
        share = len([name for name in self._fields if name in own]) / len(own)
        sizes = [_decoded(footer, self._fields, share) for footer in footers]
        most = _PART_BYTES
        if sum(map(sum, sizes)) > cache_bytes:
            most = min(most, max(_LEAST_BYTES, cache_bytes // _PARTS_IN_CACHE))
        self._parts = [
            part
            for number, footer in enumerate(footers)
            for part in _parts(number, footer, sizes[number], self._paths[number], most)
        ]
        self._reader: Reader | None = None
        self._apart: ParquetSource | None = None
        self._finer: ParquetSource | None = None
        size = sum(nbytes for footer in footers for nbytes in footer.nbytes)
        self._init_chunks([part.rows for part in self._parts], cache_bytes, data_bytes=size)

    def __repr__(self) -> str:
        name = (
            self._paths[0] if len(self._paths) == 1 else f"{len(self._paths)} files in {common_root(self._paths)}"
        )
        return f"ParquetSource({name!r}, {len(self)} samples)"

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return self._fields

    @property
    def blocks(self) -> Int64:
        """Rows of each row group: int64."""
        return self._rows

    @property
    def fingerprint(self) -> str:
        """Of relative names, sizes, columns, counts, the checksums of footers, and content samples."""
        return self._fingerprint

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples, as with any source; what is wrong with a row group is its own affair.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, a null, or the file cannot be read.
            CorruptError: it is damaged, or another one than it was.
        """
        ids, names = check_ids(sample_ids, len(self)), check_columns(columns, self._fields)
        self.files.check_open(at_intervals=True)
        if self._finer is not None:
            return self._finer.fetch(ids, names)
        try:
            return super().fetch(ids, names)
        except LargeRows as error:
            self._finer = self._cut_into(error.factor)
            return self._finer.fetch(ids, names)
        except (SourceError, CorruptError):
            if all(part.groups == 1 for part in self._parts):
                raise
        # The rows may lie in another row group than what is wrong does: each is read by itself.
        if self._apart is None:
            apart = copy.copy(self)
            apart._parts = [each for part in self._parts for each in part.apart()]
            # What it keeps comes on top of what is kept here.
            apart._init_chunks([part.rows for part in apart._parts], self._cache_bytes // _APART)
            self._apart = apart
        return self._apart.fetch(ids, names)

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """Decode what will be read next, in the background."""
        if self._finer is not None:
            self._finer.expect(sample_ids, columns)
        else:
            super().expect(sample_ids, columns)

    def _cut_into(self, factor: int) -> ParquetSource:
        """The same source, decoding fewer rows at once by this factor."""
        finer = copy.copy(self)
        finer._apart = finer._finer = None
        finer._parts = [each for part in self._parts for each in part.finer(factor)]
        finer._init_chunks([part.rows for part in finer._parts], self._cache_bytes)
        return finer

    def _load_chunk(self, number: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        part = self._parts[number]
        wanted = {name: self._fields[name] for name in names if name in self._roots}
        loaded: dict[str, ColumnBuffer] = {}
        if wanted:
            if self._reader is None or self._reader.pid != os.getpid():
                self._reader = Reader(self._paths, self._digests, self.files, self._cache_bytes)
            roots = tuple(dict.fromkeys(self._roots[name] for name in wanted))
            rows = self._reader.read(part, roots)
            where = f"{self._paths[part.file]}, {part}"
            first = part.before + part.first
            with arrow_errors(where):
                loaded = read_columns(rows, wanted, where=where, first_row=first, nulls=self._nulls)
            for name, stored in loaded.items():
                self._partitions.check(name, part.file, stored)
        for name in names:
            if name not in wanted:
                loaded[name] = self._partitions.stored(name, part.file, part.rows)
        return {name: loaded[name] for name in names}


def _one_schema(paths: Sequence[str], footers: Sequence[Footer]) -> Any:
    """The columns of all files.

    Raises:
        SourceError: they differ; names both files and a column.
    """
    with arrow_errors(paths[0]):  # a name may be no text
        first = _columns(footers[0].schema)
    checked = [footers[0].schema]
    for path, footer in zip(paths, footers, strict=True):
        if any(footer.schema.equals(schema) for schema in checked):
            continue
        with arrow_errors(path):
            columns = _columns(footer.schema)
        if columns != first:
            name = next(each for each in [*first, *columns] if first.get(each) != columns.get(each))
            raise SourceError(
                f"the files differ in column {name!r}",
                expected=f"{first.get(name, 'no such column')} as in {paths[0]}",
                found=columns.get(name, "no such column"),
                where=path,
                remedy="open files of one schema, or leave the column out of all by writing them again",
            )
        checked.append(footer.schema)
    return footers[0].schema


def _columns(schema: Any) -> dict[str, str]:
    """Each column's type, without what makes no difference to a reader; of columns of one name, all of theirs."""
    kinds: dict[str, str] = {}
    for field in schema:
        kind = _type(field.type)
        kinds[field.name] = f"{kinds[field.name]}, {kind}" if field.name in kinds else kind
    return kinds


def _type(kind: Any) -> str:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _type(kind.value_type)
    if pa.types.is_struct(kind):
        return "struct<" + ", ".join(f"{each.name}: {_type(each.type)}" for each in kind) + ">"
    if pa.types.is_fixed_size_list(kind):
        return f"list<{_type(kind.value_type)}>[{kind.list_size}]"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{_type(kind.value_type)}>"
    return str(kind).removeprefix("large_")


def _fingerprint(
    paths: Sequence[str], footers: Sequence[Footer], fields: Mapping[str, Field], partitions: Partitions
) -> str:
    root = common_root(paths)
    files = (
        f"{os.path.relpath(path, root)}|{footer.size}|{footer.digest}"
        for path, footer in zip(paths, footers, strict=True)
    )
    columns = (f"{name}:{field}" for name, field in fields.items())
    return digest_of(b"parquet", *(os.fsencode(text) for text in (*files, *columns, *partitions.describe())))


def _decoded(footer: Footer, fields: Mapping[str, Field], share: float) -> list[int]:
    """Bytes of what is wanted of each row group when it is decoded, about.

    Args:
        footer: of the file.
        fields: what is wanted.
        share: of the file's columns that are read for them.
    """
    row = sum(field.row_bytes() if field.kind == "dense" else _LEAST_ROW for field in fields.values())
    return [int(max(rows * row, size * share)) for rows, size in zip(footer.rows, footer.nbytes, strict=True)]


def _parts(number: int, footer: Footer, sizes: Sequence[int], path: str, most: int) -> list[Part]:
    """The row groups of a file, large ones cut into parts, small ones together.

    Args:
        number: of the file.
        footer: its footer.
        sizes: bytes of each row group when it is decoded.
        path: of the file.
        most: bytes of a part, about.

    Raises:
        CorruptError: a row group has more rows than could be meant.
    """
    parts: list[Part] = []
    before = together = 0  # rows, and bytes of the part that small row groups are added to
    for group, (rows, nbytes) in enumerate(zip(footer.rows, sizes, strict=True)):
        step = max(1, rows // max(1, -(-nbytes // most)))
        if rows // step > _MOST_PARTS:
            raise CorruptError(
                "a row group has more rows than could be meant",
                found=f"{rows} rows, {nbytes} bytes",
                where=f"{path}, row group {group}",
                remedy=REMEDY,
            )
        if parts and together + nbytes <= most:
            parts[-1] = parts[-1].and_then(rows)
            together += nbytes
        else:
            parts += [
                Part(number, group, first, min(step, rows - first), step, (rows,), before)
                for first in range(0, max(rows, 1), step)
            ]
            together = nbytes
        before += rows
    return parts


FORMAT = Format("parquet", "Parquet files (or a folder of them)", fits, ParquetSource)
