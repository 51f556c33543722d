"""CSV files and files of JSON lines, parsed into memory with pyarrow."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from rankfeed.columns.chunk_groups import ChunkGroups, by_chunk
from rankfeed.columns.columns import Column, ColumnBuffer, Columns, columns_from_buffers
from rankfeed.errors import CorruptError, SourceError, listed
from rankfeed.sources.arrow.columns import read_columns
from rankfeed.sources.arrow.types import VALID, Nulls, fields_of, logical_types_of, masks_of, roots_of
from rankfeed.sources.paths import Paths, common_root, label
from rankfeed.sources.source import BLOCK_BYTES, Int64, Source, check_columns, even_blocks, reopen, starts_of
from rankfeed.sources.text.csv_text import check_quotes, end_of_csv_lines, parse_csv
from rankfeed.sources.text.detect import kind_of, list_files
from rankfeed.sources.text.dialect import BOM, LIMIT, PIECE, Dialect, open_text, read_texts
from rankfeed.sources.text.json_lines import columns_in, parse_json_lines
from rankfeed.storage.checksum import digest_of


class _TextSource(Source):
    def _open(self, where: Paths, columns: Sequence[str] | None, nulls: Nulls, dialect: Dialect) -> None:
        self._paths = [os.path.abspath(path) for path in list_files(where, dialect.kind)]
        self._options = {"columns": columns, "nulls": nulls, "types": dialect.types}
        parse = parse_csv if dialect.kind == "csv" else parse_json_lines
        tables, digests = [], []
        names: dict[str, None] = {}
        for path, text in zip(self._paths, read_texts(self._paths), strict=True):
            if not text.strip():
                raise SourceError("the file is empty", where=path)
            table = parse(text, path, dialect, columns)
            is_csv = dialect.kind == "csv"
            names |= dict.fromkeys(table.schema.names if is_csv else columns_in(table, text, dialect))
            tables.append(table)
            digests.append(digest_of(text))
        dialect.check_types(list(names), listed(self._paths))
        schema = _common_schema(self._paths, [table.schema for table in tables], columns)
        known = fields_of(schema, nulls=nulls, columns=columns)
        self.derived = masks_of(known, nulls)
        self.logical_types = logical_types_of(schema)
        fields = {name: known[name] for name in check_columns(columns, known, self.derived)}
        wanted = [schema.field(name) for name in roots_of(schema, fields)]
        self._buffers: list[dict[str, ColumnBuffer]] = []
        for path, table in zip(self._paths, tables, strict=True):
            cast = _cast(table, wanted, path)
            self._buffers.append(read_columns(cast, fields, where=path, nulls=nulls))
            for each in self._buffers[-1].values():
                if each.unreadable is not None:
                    each.unreadable.refuse(np.arange(each.rows))  # report nulls now, not when they are read
        self._starts = starts_of([len(table) for table in tables])
        nbytes = sum(each.nbytes for buffers in self._buffers for each in buffers.values())
        rows = int(self._starts[-1])
        blocks = even_blocks(rows, rows * BLOCK_BYTES // max(1, nbytes))
        root = common_root(self._paths)
        relative = [os.path.relpath(path, root) for path in self._paths]
        facts = [*relative, *digests, *(f"{name}:{field}" for name, field in known.items())]
        fingerprint = digest_of(dialect.kind.encode(), *(os.fsencode(each) for each in facts))
        self._init_samples(label(self._paths), fields, blocks, fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, (type(self), self._paths, self._options, self._fingerprint)

    reads_in_place = True

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        groups = by_chunk(ids, self._starts)
        return columns_from_buffers(
            self._fields, names, groups, [self._buffers[number] for number in groups.numbers]
        )


class CsvSource(_TextSource):
    r"""CSV files with a header line, small enough for memory (256 MiB of text together).

    Types are inferred by pyarrow from all values of a column: one fraction of a second changes times from seconds
    to nanoseconds.

    Args:
        where: a path, a glob or brace pattern, a directory of such files, or a list of these; `.csv`, `.tsv`, also
            with `.gz`.
        columns: names of the columns to offer; None for all.
        nulls: "error" or "mask", as with `ParquetSource`. An empty number is a null, an empty text is not.
        delimiter: one character; None for a tab in `.tsv` files and a comma in others.
        types: Arrow's names of columns' types, instead of inferred ones.

    Raises:
        SourceError: there are no files, the text is too large, files differ in their columns, or a value is null.
        CorruptError: a line cannot be parsed; names it.
        ArgumentError: no such column, delimiter or type.

    Examples:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "t.csv")
        >>> _ = path.write_text("name,score\na,1\nb,2.5\n")
        >>> CsvSource(path)[1]
        {'name': 'b', 'score': np.float64(2.5)}
    """

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
        self._options["delimiter"] = delimiter


class JsonlSource(_TextSource):
    r"""Files with one JSON object in each line, small enough for memory (256 MiB of text together).

    Objects in objects are columns "outer.inner"; a missing key is a null.

    Args:
        where: a path, a glob or brace pattern, a directory of such files, or a list of these; `.jsonl`, `.ndjson`,
            `.json`, also with `.gz`.
        columns: names of the columns to offer; None for all.
        nulls: "error" or "mask", as with `ParquetSource`.
        types: Arrow's names of columns' types, such as ``{"t": "string"}``. A column that this does not name, and
            whose values are all text that looks like a date, becomes integers: seconds since 1970.

    Raises:
        SourceError: there are no files, the text is too large, files differ in their columns, or a value is null.
        CorruptError: a line cannot be parsed; names it.
        ArgumentError: no such column or type.

    Examples:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "t.jsonl")
        >>> _ = path.write_text('{"text": "a", "tokens": [1, 2]}\n{"text": "b", "tokens": []}\n')
        >>> JsonlSource(path)[0]
        {'text': 'a', 'tokens': array([1, 2])}
    """

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
    """Whether these are CSV files or JSON lines that are too large to be opened."""
    kind = kind_of(where)
    return kind is not None and sum(map(os.path.getsize, list_files(where, kind))) > LIMIT


def rows(
    where: Paths,
    *,
    columns: Sequence[str] | None = None,
    nulls: Nulls = "error",
    delimiter: str | None = None,
    types: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """The samples of CSV files or JSON lines of any size, read in a stream.

    The first 16 MiB define the types of columns. For files that are too large to be opened:
    ``rankfeed.write(rows("big.csv"), "packed")``.

    Arguments and errors are those of :class:`CsvSource`; it is also an error if a value does not have the type of
    its column in the first piece.
    """
    kind = kind_of(where)
    if kind is None:
        raise SourceError("these are neither CSV nor lines of JSON", where=where)
    dialect = Dialect(kind, delimiter, types)
    paths = list_files(where, kind)
    if kind == "csv" and types:  # for JSON, the first row reports that such a column is null
        _check_csv_types(paths, dialect, columns)
    for path in paths:
        first = 0
        for table in _stream(path, dialect, columns):
            fields = fields_of(table.schema, nulls=nulls, columns=columns)
            fields = {name: fields[name] for name in check_columns(columns, fields, masks_of(fields, nulls))}
            buffers = read_columns(table, fields, where=path, first_row=first, nulls=nulls)
            groups = ChunkGroups([0], np.arange(len(table)), None)
            read = columns_from_buffers(fields, list(buffers), groups, [buffers])
            yield from Columns(read, len(table)).samples()
            first += len(table)


def _stream(path: str, dialect: Dialect, columns: Sequence[str] | None) -> Iterator[Any]:
    """The rows as `pyarrow.Table`s of one schema, which the first piece of text defines."""
    schema, line, is_csv = None, 1, dialect.kind == "csv"
    parse = parse_csv if is_csv else parse_json_lines
    with open_text(path) as file:
        for piece in _pieces(file, path, dialect):
            # In CSV, a line of spaces or tabs is a row.
            if piece.strip(b"\r\n" if is_csv else None):
                if is_csv:  # parse_csv omits this check if the number of quotes is even
                    check_quotes(piece, path, dialect, line)
                table = parse(piece, path, dialect, columns, schema=schema, first_line=line)
                schema = table.schema
                yield table
            line += piece.count(b"\n")
    if schema is None:
        raise SourceError("the file is empty", where=path)


def _pieces(file: BinaryIO, path: str, dialect: Dialect) -> Iterator[bytes]:
    """The text in pieces that end with lines; the first one has more than a header."""
    rest, header = file.read(len(BOM)).removeprefix(BOM), True
    while piece := file.read(PIECE):
        rest += piece
        if len(piece) < PIECE:  # the last line may have no end
            break
        is_csv = dialect.kind == "csv" and b'"' in rest
        end = end_of_csv_lines(rest, dialect.delimiter_of(path)) if is_csv else rest.rfind(b"\n") + 1
        if end and not (header and b"\n" not in rest[:end].strip()):
            yield rest[:end]
            rest, header = rest[end:], False
        elif len(rest) > LIMIT:
            raise CorruptError(
                "a line is too long",
                expected=f"up to {LIMIT >> 20} MiB",
                found=f"{len(rest)} bytes without an end",
                where=path,
                remedy="write the file again, with line feeds between the rows and quotes within values doubled",
            )
    yield rest


def _check_csv_types(paths: Sequence[str], dialect: Dialect, columns: Sequence[str] | None) -> None:
    """Refuse types of columns that no file has; usually the first file has all."""
    names: dict[str, None] = {}
    for path in paths:
        if set(dialect.types or ()) <= names.keys():
            return
        names |= dict.fromkeys(next(_stream(path, dialect, columns)).schema.names)
    dialect.check_types(list(names), listed(paths))


def _common_schema(paths: Sequence[str], schemas: Sequence[Any], columns: Sequence[str] | None) -> Any:
    """One schema for all files: types are widened only from integers to types that hold them."""
    import pyarrow as pa

    twice = set()
    for path, schema in zip(paths, schemas, strict=True):
        for name in schema.names:
            if schema.get_field_index(name) >= 0:
                continue
            if columns is None or name in columns:
                raise SourceError(
                    "two columns of the file have one name",
                    found=repr(name),
                    where=path,
                    remedy="rename one of them, or leave them out with columns=",
                )
            twice.add(name)
    schemas = [pa.schema([field for field in schema if field.name not in twice]) for schema in schemas]
    common = {field.name: field for field in schemas[0]}
    for path, schema in zip(paths[1:], schemas[1:], strict=True):
        for name in dict.fromkeys([*common, *schema.names]):
            try:
                if name not in common or name not in schema.names:
                    raise pa.ArrowInvalid(f"columns {', '.join(schema.names)}")
                both = [pa.schema([common[name]]), pa.schema([schema.field(name)])]
                common[name] = pa.unify_schemas(both, promote_options="permissive").field(0)
            except (pa.ArrowException, ValueError) as error:
                if columns is None or any(_contains(name, column) for column in columns):
                    raise SourceError(
                        "the files differ in their columns",
                        expected=f"{common.get(name, f'no column {name!r}')} as in {paths[0]}",
                        found=str(error).splitlines()[0],
                        where=path,
                        remedy="make them agree, or leave the column out with columns=; "
                        "types={'column': 'string'} says what a column is",
                    ) from error
                common.pop(name, None)
    for name, field in common.items():
        kinds = {schema.field(name).type for schema in schemas}
        if pa.uint64() in kinds and all(map(pa.types.is_integer, kinds)):
            common[name] = field.with_type(pa.uint64())
    return pa.schema(list(common.values()))


def _contains(name: str, column: str) -> bool:
    """Whether a field, or the mask of one, is in a column of this name."""
    return f"{column.removesuffix(VALID)}.".startswith(f"{name}.") or column == name


def _cast(table: Any, fields: Sequence[Any], path: str) -> Any:
    """The rows of a file with the types of all files together; an error if a number would change."""
    import pyarrow as pa

    columns = []
    for field in fields:
        try:
            columns.append(table.column(field.name).cast(field.type))
        except pa.ArrowInvalid as error:
            raise SourceError(
                "a number does not fit the type that its column has over all files",
                expected=str(field.type),
                found=str(error).splitlines()[0],
                where=f"{path}, column {field.name!r}",
                remedy="make the files agree, or give the type: types={'column': 'float64'}, or 'string'",
            ) from error
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))
