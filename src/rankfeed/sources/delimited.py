"""CSV and lines of JSON: small files, read into memory through pyarrow's readers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Columns, Field, Stored, column_of_parts
from rankfeed.errors import SourceError, listed
from rankfeed.sources.arrow_columns import Nulls, fields_of, roots_of, stored_of
from rankfeed.sources.delimited_files import files_of, kind_of
from rankfeed.sources.delimited_text import (
    LIMIT,
    Dialect,
    check_types,
    line_of_row,
    names_in,
    parse,
    read_text,
    stream,
    text_size,
    too_large,
)
from rankfeed.sources.exact_numbers import InexactError, whole_as_float
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, common_root
from rankfeed.sources.source import Int64, Source, by_chunk, check_columns, check_ids
from rankfeed.storage import digest_of

#: About what a block holds.
_BLOCK_BYTES = 4 << 20


class _TextSource(Source):
    """What both have in common; see :class:`CsvSource`."""

    _kind: ClassVar[Literal["csv", "jsonl"]]
    default_shuffle: ClassVar[Literal["global", "window"]] = "global"  # all rows are in memory

    def _open(self, where: Paths, columns: Sequence[str] | None, nulls: Nulls, dialect: Dialect) -> None:
        self._paths = [os.path.abspath(path) for path in files_of(where, self._kind)]
        self._columns = None if columns is None else tuple(columns)
        self._nulls: Nulls = nulls
        self._dialect = dialect
        self._stored: list[dict[str, Stored]] | None = None
        self._load()

    def _load(self) -> list[dict[str, Stored]]:
        """Read all files: once in each process."""
        if sum(map(text_size, self._paths)) > LIMIT:
            raise too_large(self._paths[0] if len(self._paths) == 1 else common_root(self._paths))
        tables, digests, total = [], [], 0
        names: dict[str, None] = {}
        for path in self._paths:
            text = read_text(path)
            total += len(text)
            if total > LIMIT:
                raise too_large(common_root(self._paths))
            if text.strip():
                tables.append(parse(text, path, self._dialect, self._columns))
                names |= dict.fromkeys(names_in(tables[-1], text, path, self._dialect))
                digests.append(digest_of(text))
            else:
                raise SourceError("the file is empty", where=path)
        check_types(self._dialect, list(names), listed(self._paths))
        schema = _one_schema(self._paths, [table.schema for table in tables], self._columns)
        known = fields_of(schema, nulls=self._nulls, columns=self._columns)
        self._fields = {name: known[name] for name in check_columns(self._columns, known)}
        roots = roots_of(schema, list(self._fields), nulls=self._nulls)
        wanted = schema_of(schema, roots)
        stored = []
        for path, table in zip(self._paths, tables, strict=True):
            cast = _cast(table, wanted, path, self._dialect)
            stored.append(stored_of(cast, self._fields, where=path, nulls=self._nulls))
            for each in stored[-1].values():  # all was read: nobody need train for hours to meet a null
                if each.unreadable is not None:
                    each.unreadable.refuse(np.arange(each.rows))
        self._starts = np.zeros(len(tables) + 1, np.int64)
        np.cumsum([len(table) for table in tables], out=self._starts[1:])
        if not self._starts[-1]:
            raise SourceError("there are no rows", where=self._paths[0])
        nbytes = sum(each.nbytes for columns in stored for each in columns.values())
        rows = max(1, min(len(self), len(self) * _BLOCK_BYTES // max(1, nbytes)))
        full, rest = divmod(len(self), rows)
        self._blocks = np.array([rows] * full + [rest] * (rest > 0), np.int64)
        root = common_root(self._paths)
        relative = [os.path.relpath(path, root) for path in self._paths]
        facts = [*relative, *digests, *(f"{name}:{field}" for name, field in known.items())]
        self._fingerprint = digest_of(self._kind.encode(), *(os.fsencode(each) for each in facts))
        self._stored = stored
        return stored

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stored": None}

    def _num_samples(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        files = f"{len(self._paths)} files in {common_root(self._paths)!r}"
        name = files if len(self._paths) > 1 else repr(self._paths[0])
        return f"{type(self).__name__}({name}, {len(self)} samples)"

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return self._fields

    @property
    def blocks(self) -> Int64:
        """Runs of rows of about 4 MiB: int64."""
        return self._blocks

    @property
    def fingerprint(self) -> str:
        """Of relative names, columns and the checksums of the text."""
        return self._fingerprint

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples: pointers into memory; nothing is copied.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or the files are others than they were.
        """
        ids = check_ids(sample_ids, len(self))
        names = check_columns(columns, self._fields)
        stored = self._stored or self._loaded_again()
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for number, rows, slots in by_chunk(ids, self._starts):
            for name in names:
                parts[name].append(stored[number][name].part(rows, slots))
        return Columns({name: column_of_parts(self._fields[name], parts[name]) for name in names}, len(ids))

    def _loaded_again(self) -> list[dict[str, Stored]]:
        # Into another source: this one stays what it was, also for threads that read meanwhile.
        again = copy(self)
        stored = again._load()
        if again._fingerprint != self._fingerprint:
            raise SourceError(
                "the files changed while they were in use",
                expected=self._fingerprint,
                found=again._fingerprint,
                where=self._paths[0],
                remedy="start the job again",
            )
        self._stored = stored
        return stored


class CsvSource(_TextSource):
    r"""CSV files with a header line, small enough to be held in memory (256 MiB of text together).

    What a column holds is taken from all of its values, as pyarrow does it.

    Args:
        where: a path, a glob or brace pattern, a folder of such files, or a list of these; `.csv`, `.tsv`, also
            with `.gz`.
        columns: names of those to offer; None for all.
        nulls: "error" or "mask", as with `ParquetSource`. An empty number is a null, an empty text is not.
        delimiter: one character; a comma, or a tab for `.tsv`, if None.
        types: Arrow's names of columns' types, where what the values look like is not what they are.

    Raises:
        SourceError: nothing is there, it is too large, files differ in their columns, or a value is null.
        CorruptError: a line cannot be parsed; named.
        ArgumentError: no such column, delimiter or type.

    Examples:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "t.csv")
        >>> _ = path.write_text("name,score\na,1\nb,2.5\n")
        >>> CsvSource(path)[1]
        {'name': 'b', 'score': np.float64(2.5)}
    """

    _kind = "csv"

    def __init__(
        self,
        where: Paths,
        *,
        columns: Sequence[str] | None = None,
        nulls: Nulls = "error",
        delimiter: str | None = None,
        types: Mapping[str, str] | None = None,
    ) -> None:
        self._open(where, columns, nulls, Dialect("csv", delimiter, types))


class JsonlSource(_TextSource):
    r"""Files with one JSON object in each line, small enough to be held in memory (256 MiB of text together).

    Objects in objects are columns "outer.inner"; a key that a line lacks is a null there.

    Args:
        where: a path, a glob or brace pattern, a folder of such files, or a list of these; `.jsonl`, `.ndjson`,
            `.json`, also with `.gz`.
        columns: names of those to offer; None for all.
        nulls: "error" or "mask", as with `ParquetSource`.
        types: Arrow's names of columns' types. Text that looks like a time is one, unless this says "string".

    Raises:
        SourceError: nothing is there, it is too large, files differ in their columns, or a value is null.
        CorruptError: a line cannot be parsed; named.
        ArgumentError: no such column or type.

    Examples:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "t.jsonl")
        >>> _ = path.write_text('{"text": "a", "tokens": [1, 2]}\n{"text": "b", "tokens": []}\n')
        >>> JsonlSource(path)[0]
        {'text': 'a', 'tokens': array([1, 2])}
    """

    _kind = "jsonl"

    def __init__(
        self,
        where: Paths,
        *,
        columns: Sequence[str] | None = None,
        nulls: Nulls = "error",
        types: Mapping[str, str] | None = None,
    ) -> None:
        self._open(where, columns, nulls, Dialect("jsonl", None, types))


def is_large(where: Paths) -> bool:
    """Whether these are CSV or JSONL files that are too large to be opened."""
    kind = kind_of(where)
    return kind is not None and sum(map(text_size, files_of(where, kind))) > LIMIT


def rows(where: Paths, *, delimiter: str | None = None, types: Mapping[str, str] | None = None) -> Iterator[Any]:
    """The samples of CSV or JSONL files of any size, one after the other, in memory for a few MiB of text.

    Types of columns are what the first 16 MiB say. This is what packs files that are too large to be opened:
    ``rankfeed.write(rows("big.csv"), "packed")``.

    Args:
        where: as with :class:`CsvSource`; the names say which of both it is.
        delimiter: as with :class:`CsvSource`.
        types: as with :class:`CsvSource`.

    Raises:
        SourceError, CorruptError, ArgumentError: as with :class:`CsvSource`.
    """
    kind = kind_of(where)
    if kind is None:
        raise SourceError("these are neither CSV nor lines of JSON", where=where)
    dialect = Dialect(kind, delimiter, types)
    paths = files_of(where, kind)
    if kind == "csv" and types:  # of JSON, the first row says that such a column is null
        _check_csv_types(paths, dialect)
    for path in paths:
        first = 0
        for table in stream(path, dialect):
            fields = fields_of(table.schema)
            stored = stored_of(table, fields, where=path, first_row=first)
            every = np.arange(len(table))
            columns = {name: column_of_parts(fields[name], [each.part(every)]) for name, each in stored.items()}
            yield from Columns(columns, len(table)).samples()
            first += len(table)


def _check_csv_types(paths: Sequence[str], dialect: Dialect) -> None:
    """Refuse types of columns that no file has; mostly the first file has all."""
    names: dict[str, None] = {}
    for path in paths:
        if set(dialect.types or ()) <= names.keys():
            return
        names |= dict.fromkeys(next(stream(path, dialect)).schema.names)
    check_types(dialect, list(names), listed(paths))


def schema_of(schema: Any, names: Sequence[str]) -> Any:
    """The part of a `pyarrow.Schema` with some columns."""
    import pyarrow as pa

    return pa.schema([schema.field(name) for name in names])


def _one_schema(paths: Sequence[str], schemas: Sequence[Any], columns: Sequence[str] | None) -> Any:
    """One schema for all files: whole numbers give way to others that hold them, nothing else differs.

    Raises:
        SourceError: files differ; names both. Or two columns of one have one name.
    """
    import pyarrow as pa

    counts = [Counter(schema.names) for schema in schemas]
    twice = {name for count in counts for name in count if count[name] > 1}
    for path, count in zip(paths, counts, strict=True):
        for name in count:
            if count[name] > 1 and (columns is None or name in columns):
                raise SourceError(
                    "two columns of the file have one name",
                    found=repr(name),
                    where=path,
                    remedy="rename one of them, or leave them out with columns=",
                )
    if twice:
        schemas = [pa.schema([field for field in schema if field.name not in twice]) for schema in schemas]
    joined = schemas[0]
    for path, schema in zip(paths[1:], schemas[1:], strict=True):
        try:
            if set(schema.names) != set(joined.names) or len(schema.names) != len(joined.names):
                raise pa.ArrowInvalid(f"columns {', '.join(schema.names)}")
            joined = pa.unify_schemas([joined, schema], promote_options="permissive")
        except (pa.ArrowException, ValueError) as error:
            raise SourceError(
                "the files differ in their columns",
                expected=", ".join(f"{field.name}: {field.type}" for field in joined) + f" as in {paths[0]}",
                found=str(error).splitlines()[0],
                where=path,
                remedy="make them agree; types={'column': 'string'} says what a column is",
            ) from error
    for place, field in enumerate(joined):
        kinds = {schema.field(field.name).type for schema in schemas}
        if pa.uint64() in kinds and all(map(pa.types.is_integer, kinds)):
            joined = joined.set(place, field.with_type(pa.uint64()))
    return joined


def _cast(table: Any, schema: Any, path: str, dialect: Dialect) -> Any:
    """The rows of a file, with the types that all files together have.

    Raises:
        SourceError: a number would become another one.
    """
    import pyarrow as pa

    columns = []
    for field in schema:
        column = table.column(field.name)
        try:
            columns.append(whole_as_float(column) if field.type == pa.float64() else column.cast(field.type))
        except (pa.ArrowInvalid, InexactError) as error:
            row = getattr(error, "row", None)
            place = path if row is None else f"{path}, {line_of_row(path, dialect, row)}"
            raise SourceError(
                "a number does not fit the type that its column has over all files",
                expected=str(field.type),
                found=str(error).splitlines()[0],
                where=f"{place}, column {field.name!r}",
                remedy="make the files agree, or read the column as text with types={'column': 'string'}",
            ) from error
    return pa.Table.from_arrays(columns, schema=schema)


CSV_FORMAT = Format("csv", "CSV files", lambda where: kind_of(where) == "csv", CsvSource)
JSONL_FORMAT = Format(
    "jsonl", "files with a JSON object in each line", lambda where: kind_of(where) == "jsonl", JsonlSource
)
