"""CSV files and files of JSON lines, parsed into memory with pyarrow."""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from gzip import GzipFile
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from rankfeed.columns.chunk_groups import ChunkGroups, by_chunk
from rankfeed.columns.columns import Column, ColumnBuffer, Columns, columns_from_buffers
from rankfeed.errors import CorruptError, SourceError, listed
from rankfeed.sources.arrow.arrow_columns import read_columns
from rankfeed.sources.arrow.types import VALID, Nulls, fields_of, logical_types_of, masks_of, roots_of
from rankfeed.sources.formats import BOM, TextKind, text_files, text_kind
from rankfeed.sources.paths import Paths, common_root, label
from rankfeed.sources.source import BLOCK_BYTES, Int64, Source, check_columns, even_blocks, reopen, starts_of
from rankfeed.sources.text.parsers import CsvParser, JsonParser, Text, TextParser, types_by_name
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.file_errors import arrow_errors, file_errors

#: Decompressed bytes that are read into memory; larger files must be packed.
LIMIT = 256 << 20
#: Bytes that are parsed at once in a stream. The first part of a text defines the types.
PIECE = 16 << 20


class _TextSource(Source):
    _options: dict[str, Any]

    def _open(
        self, kind: TextKind, parser: TextParser, where: Paths, columns: Sequence[str] | None, nulls: Nulls
    ) -> None:
        self._paths = [os.path.abspath(path) for path in text_files(where, kind)]
        tables, digests = [], []
        names: dict[str, None] = {}
        for path, content in zip(self._paths, _read_texts(self._paths), strict=True):
            text = Text(content.removeprefix(BOM), path)
            tables.append(parser.parse(text, columns))
            names |= dict.fromkeys(parser.names_in(tables[-1], text))
            digests.append(digest_of(content))
        parser.check_types(list(names), listed(self._paths))
        schema = _common_schema(self._paths, [table.schema for table in tables], columns)
        all_fields = fields_of(schema, nulls=nulls, columns=columns)
        self.derived = masks_of(all_fields, nulls)
        self.logical_types = logical_types_of(schema)
        fields = {name: all_fields[name] for name in check_columns(columns, all_fields, self.derived)}
        arrow_fields = [schema.field(name) for name in roots_of(schema, fields)]
        self._buffers: list[dict[str, ColumnBuffer]] = []
        for path, table in zip(self._paths, tables, strict=True):
            self._buffers.append(read_columns(_cast(table, arrow_fields, path), fields, where=path, nulls=nulls))
            for buffer in self._buffers[-1].values():
                if buffer.unreadable is not None:
                    buffer.unreadable.refuse(np.arange(buffer.rows))  # report nulls now, not when they are read
        self._starts = starts_of([len(table) for table in tables])
        nbytes = sum(buffer.nbytes for buffers in self._buffers for buffer in buffers.values())
        rows = int(self._starts[-1])
        blocks = even_blocks(rows, rows * BLOCK_BYTES // max(1, nbytes))
        root = common_root(self._paths)
        relative = [os.path.relpath(path, root) for path in self._paths]
        facts = [*relative, *digests, *(f"{name}:{field}" for name, field in all_fields.items())]
        fingerprint = digest_of(kind.encode(), *map(os.fsencode, facts))
        self._init_samples(label(self._paths), fields, blocks, fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, (type(self), self._paths, self._options, self._fingerprint)

    reads_in_place = True

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        groups = by_chunk(ids, self._starts)
        return columns_from_buffers(self._fields, names, groups, [self._buffers[file] for file in groups.numbers])


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
        self._options = {"columns": columns, "nulls": nulls, "types": types, "delimiter": delimiter}
        self._open("csv", CsvParser(types, delimiter), where, columns, nulls)


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
        self._options = {"columns": columns, "nulls": nulls, "types": types}
        self._open("jsonl", JsonParser(types), where, columns, nulls)


def is_large(where: Paths) -> bool:
    """Whether these are CSV files or JSON lines that are too large to be opened."""
    kind = text_kind(where)
    return kind is not None and sum(map(os.path.getsize, text_files(where, kind))) > LIMIT


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
    if (kind := text_kind(where)) is None:
        raise SourceError("these are neither CSV nor lines of JSON", where=where)
    parser = CsvParser(types, delimiter) if kind == "csv" else JsonParser(types)
    paths = text_files(where, kind)
    if kind == "csv" and types:  # for JSON, the first row reports that such a column is null
        names: dict[str, None] = {}
        for path in paths:
            if not types.keys() <= names.keys():  # usually the first file has all
                names |= dict.fromkeys(next(_stream(path, parser, columns)).schema.names)
        parser.check_types(list(names), listed(paths))
    for path in paths:
        first = 0
        for table in _stream(path, parser, columns):
            fields = fields_of(table.schema, nulls=nulls, columns=columns)
            fields = {name: fields[name] for name in check_columns(columns, fields, masks_of(fields, nulls))}
            buffers = read_columns(table, fields, where=path, first_row=first, nulls=nulls)
            groups = ChunkGroups([0], np.arange(len(table)), None)
            read = columns_from_buffers(fields, list(buffers), groups, [buffers])
            yield from Columns(read, len(table)).samples()
            first += len(table)


def _stream(path: str, parser: TextParser, columns: Sequence[str] | None) -> Iterator[Any]:
    """The rows as `pyarrow.Table`s of one schema, which the first part of the text defines."""
    schema = None
    with _open_text(path) as file:
        for text in _texts(file, path, parser):
            if not parser.is_empty(text.content):
                table = parser.parse(text, columns, schema)
                schema = table.schema
                yield table
    if schema is None:
        raise SourceError("the file is empty", where=path)


def _texts(file: BinaryIO, path: str, parser: TextParser) -> Iterator[Text]:
    """The text in parts of complete rows; the first one has more than a header."""
    rest, line = file.read(len(BOM)).removeprefix(BOM), 1
    while piece := file.read(PIECE):
        rest += piece
        if len(piece) < PIECE:  # the last line may have no end
            break
        end = parser.end_of_rows(rest, path)
        if end and (line > 1 or b"\n" in rest[:end].strip()):
            yield Text(rest[:end], path, line)
            line += rest.count(b"\n", 0, end)
            rest = rest[end:]
        elif len(rest) > LIMIT:
            raise CorruptError(
                "a line is too long",
                expected=f"up to {LIMIT >> 20} MiB",
                found=f"{len(rest)} bytes without an end",
                where=path,
                remedy="write the file again, with line feeds between the rows and quotes within values doubled",
            )
    yield Text(rest, path, line)


def _read_texts(paths: Sequence[str]) -> list[bytes]:
    """The texts of files, decompressed if their names end with `.gz`."""
    texts, size = [], 0
    for path in paths:
        with _open_text(path) as file:
            texts.append(file.read(LIMIT + 1 - size))
        size += len(texts[-1])
        if size > LIMIT:
            where = path if len(paths) == 1 else common_root(paths)
            raise SourceError(
                "the text is too large to be read in place",
                expected=f"up to {LIMIT >> 20} MiB, decompressed",
                where=where,
                remedy=f"`rankfeed write {where} packed/` reads it once, in a stream; then open packed/",
            )
        if not texts[-1].strip():
            raise SourceError("the file is empty", where=path)
    return texts


@contextmanager
def _open_text(path: str) -> Iterator[BinaryIO]:
    """Open a file, decompressed if its name ends with `.gz`."""
    opener: Callable[..., Any] = GzipFile if path.endswith(".gz") else open
    with file_errors(path, EOFError, zlib.error), opener(path, "rb") as file:
        yield file


def _common_schema(paths: Sequence[str], schemas: Sequence[Any], columns: Sequence[str] | None) -> Any:
    """One schema for all files: types are widened only from integers to types that hold them."""
    for path, schema in zip(paths, schemas, strict=True):
        with arrow_errors(path):
            fields_of(schema, columns=columns)  # refuses two columns of one name
    files = [types_by_name(schema) for schema in schemas]
    common: dict[str, Any] = {}
    for name in dict.fromkeys(name for types in files for name in types):
        kind = files[0].get(name)
        for path, types in zip(paths, files, strict=True):
            other = types.get(name)
            try:
                if kind is None or other is None:
                    raise pa.ArrowInvalid(f"columns {', '.join(types)}")
                if pa.uint64() in (kind, other) and pa.types.is_integer(kind) and pa.types.is_integer(other):
                    kind = pa.uint64()
                    continue
                candidates = [pa.schema([(name, column_type)]) for column_type in (kind, other)]
                kind = pa.unify_schemas(candidates, promote_options="permissive").field(0).type
            except pa.ArrowException as error:
                if columns is None or any(_contains(name, column) for column in columns):
                    raise SourceError(
                        "the files differ in their columns",
                        expected=f"no column {name!r}" if kind is None else f"{name}: {kind} as in {paths[0]}",
                        found=str(error).splitlines()[0],
                        where=path,
                        remedy="make them agree, or leave the column out with columns=; "
                        "types={'column': 'string'} says what a column is",
                    ) from error
                break
        else:
            common[name] = kind
    return pa.schema(list(common.items()))


def _contains(name: str, column: str) -> bool:
    """Whether a field, or the mask of one, is in a column of this name."""
    return f"{column.removesuffix(VALID)}.".startswith(f"{name}.") or column == name


def _cast(table: Any, fields: Sequence[Any], path: str) -> Any:
    """The rows of a file with the types of all files together; an error if a number would change."""
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
