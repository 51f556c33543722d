"""CSV and lines of JSON as Arrow tables: read whole where they are small, else in a stream."""

from __future__ import annotations

import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from csv import Error as CsvError
from csv import reader as csv_reader
from dataclasses import dataclass
from functools import partial
from gzip import GzipFile
from io import BytesIO, StringIO
from itertools import islice
from typing import Any, BinaryIO, Literal

from rankfeed._util.validate import invalid
from rankfeed.errors import ArgumentError, CorruptError, SourceError, listed, safe_repr
from rankfeed.sources.arrow_errors import arrow_errors
from rankfeed.sources.exact_numbers import exact_json, first_inexact, has_large, inexact
from rankfeed.sources.json_lines import check_keys, check_lines

#: Text that is read into memory, after decompression; larger files are packed first.
LIMIT = 256 << 20
#: Text parsed at once in a stream. Types are what the first piece of this size says.
PIECE = 16 << 20

#: What some editors write before text in UTF-8.
BOM = b"\xef\xbb\xbf"

_ROW = re.compile(r"in row (\d+)")
_MEND = "mend or remove that line; where a type was taken wrongly, give it: types={'column': 'string'}"


@dataclass(frozen=True)
class Dialect:
    """How text is read.

    Args:
        kind: "csv" or "jsonl".
        delimiter: between the values of a line of CSV; None for what the file's name says: a tab for `.tsv`.
        types: Arrow's names of columns' types ("float32", "string"), instead of what the values look like.
    """

    kind: Literal["csv", "jsonl"]
    delimiter: str | None = None
    types: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        given: Any = self.delimiter
        one = isinstance(given, str) and len(given) == 1 and given.isascii() and given not in '"\r\n'
        if given is not None and not one:
            raise invalid("delimiter", "one character of ASCII", given)
        if self.types is not None and not isinstance(self.types, Mapping):
            raise invalid("types", 'Arrow types by column, such as {"label": "int32"}', self.types)
        self.arrow_types()

    def arrow_types(self) -> dict[str, Any]:
        """The types as pyarrow has them.

        Raises:
            ArgumentError: no such type.
        """
        import pyarrow as pa

        found = {}
        for name, alias in (self.types or {}).items():
            try:
                found[name] = pa.type_for_alias(alias)
            except Exception as error:
                raise ArgumentError(
                    "Arrow has no such type",
                    expected='a name such as "int64", "float32", "string", "timestamp[s]"',
                    found=safe_repr({name: alias}),
                ) from error
        return found

    def delimiter_of(self, path: str) -> str:
        """What stands between the values of a file."""
        if self.delimiter is not None:
            return self.delimiter
        return "\t" if path.removesuffix(".gz").endswith(".tsv") else ","


def read_text(path: str) -> bytes:
    """A file's text, decompressed where its name ends with `.gz`.

    Raises:
        SourceError: it cannot be read, or is larger than is read into memory.
        CorruptError: its compression is damaged.
    """
    with _opened(path) as file:
        text = file.read(LIMIT + 1)
    if len(text) > LIMIT:
        raise too_large(path)
    return text


def too_large(where: str) -> SourceError:
    """The error for text that is not read into memory."""
    return SourceError(
        "the text is too large to be read in place",
        expected=f"up to {LIMIT >> 20} MiB, decompressed",
        where=where,
        remedy=f"`rankfeed write {where} packed/` reads it once, in a stream; then open packed/",
    )


def parse(text: bytes, path: str, dialect: Dialect, columns: Sequence[str] | None = None) -> Any:
    """The rows of a text as a `pyarrow.Table`.

    Args:
        text: of the file.
        path: of the file.
        dialect: how it is read.
        columns: names of those in which no number may lose digits; None for all.

    Raises:
        SourceError: it is nested too deeply.
        CorruptError: it cannot be parsed; names the line.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.json

    if dialect.kind == "csv":
        _check_quotes(text, path, dialect.delimiter_of(path))
        read, parse_options, convert = _csv_options(path, dialect, len(text) + 1)
        with arrow_errors(path, _MEND):
            table = _named(pa.csv.read_csv(BytesIO(text), read, parse_options, convert), path)
            return _exact_csv(table, text, path, dialect, columns)
    text = text.removeprefix(BOM)
    check_lines(text, path)
    check_keys(text, path)
    types = dialect.arrow_types()
    table = _parse_json(text, path, 1, pa.schema(types) if types else None, "infer")
    again = partial(_parse_json, text, path, 1, unexpected="infer")
    return exact_json(table, text, path, 1, types, again, columns)


def names_in(table: Any, text: bytes, path: str, dialect: Dialect) -> list[str]:
    """The columns that a text has: its table, as :func:`parse` made it, also has those that ``types`` names."""
    import pyarrow as pa

    names: list[str] = table.schema.names
    if dialect.kind == "csv":
        return names
    types = dialect.arrow_types()
    empty = [name for name in types if table.column(name).null_count == len(table)]
    if not empty:
        return names
    schema = pa.schema({name: kind for name, kind in types.items() if name not in empty})
    found: list[str] = _parse_json(text.removeprefix(BOM), path, 1, schema, "infer").schema.names
    return found


def check_types(dialect: Dialect, names: Sequence[str], where: str) -> None:
    """Refuse types of columns that do not exist.

    Args:
        dialect: with the types.
        names: of the columns of all files.
        where: the files, for errors.

    Raises:
        ArgumentError: names the columns that exist.
    """
    missing = [name for name in dialect.types or () if name not in names]
    if missing:
        raise ArgumentError(
            "types= names a column that does not exist",
            expected=listed(list(map(repr, names)), most=50),
            found=listed(list(map(repr, missing))),
            where=where,
            remedy="correct the name: upper and lower case differ",
        )


def stream(path: str, dialect: Dialect) -> Iterator[Any]:
    """The rows of a text of any size, as `pyarrow.Table` or `pyarrow.RecordBatch` after another, of one schema.

    Raises:
        SourceError, CorruptError: as with :func:`parse`, also where a value is not of its column's type in the
            first piece.
    """
    import pyarrow as pa
    import pyarrow.csv

    with _opened(path) as file:
        if dialect.kind == "csv":
            with arrow_errors(path, _MEND):
                yield from _stream_csv(file, path, dialect)
            return
        types = dialect.arrow_types()
        schema, line = pa.schema(types) if types else None, 1
        for piece in _pieces(file, path):
            first, line = line, check_lines(piece, path, line)
            check_keys(piece, path)
            unexpected = "infer" if first == 1 else "error"
            table = _parse_json(piece, path, first, schema, unexpected)
            parsed = partial(_parse_json, piece, path, first, unexpected=unexpected)
            # What is a whole number or not is settled by the first piece.
            again = parsed if first == 1 else None
            table = exact_json(table, piece, path, first, types, again)
            schema = table.schema
            yield table


def _named(table: Any, path: str) -> Any:
    """A table or reader of CSV, if its columns' names are text: that, Arrow leaves to whoever asks for them."""
    try:
        table.schema.names  # noqa: B018
    except UnicodeDecodeError as error:
        raise CorruptError(
            "a column's name is no text",
            expected="UTF-8",
            found=f"{error.object!r}: {error.reason} at byte {error.start}",
            where=f"{path}, line 1",
            remedy="write the file in UTF-8 (iconv -t UTF-8)",
        ) from error
    return table


def _check_quotes(text: bytes, path: str, delimiter: str) -> None:
    """Refuse a cell whose quote is never closed: Arrow takes all rows that follow for its text."""
    if text.count(b'"') % 2 == 0:  # a scan takes longer than to parse the text
        return
    before = rb'"(?<![^\n\r' + re.escape(delimiter.encode()) + rb']")'  # a quote within a cell is a character
    for cell in re.finditer(before + rb'(?:[^"]++|"")*+("?)', text.removeprefix(BOM)):
        if not cell[1]:
            line = text.count(b"\n", 0, cell.start()) + 1
            raise _unclosed(f"{path}, line {line}")


def _unclosed(where: str) -> CorruptError:
    return CorruptError(
        "a quoted value has no end",
        expected='a closing "',
        found="the end of the file",
        where=where,
        remedy="write the file again, with quotes within values doubled",
    )


def _csv_options(path: str, dialect: Dialect, block_size: int) -> tuple[Any, Any, Any]:
    import pyarrow.csv as csv

    # One thread: the other way errors don't say in which line they are. A line must lie in one or two blocks.
    read = csv.ReadOptions(use_threads=False, block_size=block_size)
    parse_options = csv.ParseOptions(delimiter=dialect.delimiter_of(path), newlines_in_values=True)
    convert = csv.ConvertOptions(column_types=dialect.arrow_types())
    # These are numbers.
    convert.null_values = [each for each in convert.null_values if each.lower().lstrip("-") != "nan"]
    return read, parse_options, convert


def _exact_csv(table: Any, text: bytes, path: str, dialect: Dialect, columns: Sequence[str] | None) -> Any:
    """A table in which no whole number lost digits: columns of such are read again as uint64.

    Raises:
        SourceError: a number is too large to stand beside the others of its column.
    """
    import pyarrow as pa
    import pyarrow.csv as csv

    given = dialect.arrow_types()
    for place, field in enumerate(table.schema):
        if field.type != pa.float64() or field.name in given or not has_large(table.column(place)):
            continue
        if table.schema.names.count(field.name) > 1:
            continue  # which is refused

        def again(kind: Any, name: str = field.name) -> Any:
            read, parse_options, convert = _csv_options(path, dialect, len(text) + 1)
            convert.include_columns, convert.column_types = [name], {name: kind}
            return csv.read_csv(BytesIO(text), read, parse_options, convert).column(0)

        row = first_inexact(again(pa.string()))
        if row is None:
            continue
        try:
            table = table.set_column(place, pa.field(field.name, pa.uint64()), again(pa.uint64()))
        except pa.ArrowInvalid:
            if columns is not None and field.name not in columns:
                continue
            value = again(pa.string())[row].as_py()
            line = _csv_line(text, path, dialect, row)
            raise inexact(value, f"{path}, {line}", field.name, _as_text(field.name)) from None
    return table


def _as_text(name: str) -> str:
    return f"read the column as text with types={{{name!r}: 'string'}}"


def line_of_row(path: str, dialect: Dialect, row: int) -> str:
    """The line of a file that a row lies in (or ends in), counted from 1, in words."""
    text = read_text(path)
    if dialect.kind == "csv":
        return _csv_line(text, path, dialect, row)
    return f"line {_line_of_row(text, row) + 1}"


def _csv_line(text: bytes, path: str, dialect: Dialect, row: int) -> str:
    """The line in which a row of CSV ends."""
    reader = csv_reader(StringIO(text.decode(errors="replace")), delimiter=dialect.delimiter_of(path))
    try:
        full = (reader.line_num for line in reader if line)
        return f"line {next(islice(full, row + 1, None))}"
    except (CsvError, StopIteration):
        return f"row {row}"


def _stream_csv(file: BinaryIO, path: str, dialect: Dialect) -> Iterator[Any]:
    """The rows of CSV in pieces: columns of numbers as the first piece has them, and no digit is lost."""
    import pyarrow as pa
    import pyarrow.csv as csv

    read, parse_options, convert = _csv_options(path, dialect, PIECE)
    first = file.read(PIECE)
    end = first.rfind(b"\n") + 1 if len(first) == PIECE else len(first)
    kinds, unsigned = dict[str, Any](), dict[str, Any]()
    if first[:end].count(b'"') % 2 == 0:  # else a quoted value may go on; types are then what Arrow takes them for
        schema = parse(first[:end], path, dialect).schema
        kinds = {field.name: field.type for field in schema if pa.types.is_floating(field.type)}
        unsigned = {field.name: field.type for field in schema if field.type == pa.uint64()}
    given = dialect.arrow_types()
    floats = [name for name in kinds if name not in given]
    convert.column_types = {**unsigned, **dict.fromkeys(floats, pa.string()), **given}
    rows = 0
    text = _Prepended(first, file)
    last = None
    for batch in _named(csv.open_csv(pa.PythonFile(text, "r"), read, parse_options, convert), path):
        columns = []
        last = batch.columns[-1] if len(batch) else last
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            columns.append(_floats(column, convert.null_values, name, path, rows) if name in floats else column)
        yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
        rows += len(batch)
    if last is not None and pa.types.is_string(last.type) and last[-1].is_valid:
        _check_last_quote(
            last[-1].as_py().encode(), text.end, dialect.delimiter_of(path), f"{path}, row {rows - 1}"
        )


def _check_last_quote(value: bytes, end: bytes, delimiter: str, where: str) -> None:
    """Refuse a last value whose quote is never closed.

    Args:
        value: of the last cell.
        end: the last bytes of the text.
        delimiter: of cells.
        where: the row, for the error.
    """
    cell = b'"' + value.replace(b'"', b'""')
    before = end[: len(end) - len(cell)][-1:]
    if end.endswith(cell) and before in (b"", b"\n", b"\r", delimiter.encode()):
        raise _unclosed(where)


def _floats(column: Any, nulls: list[str], name: str, path: str, first_row: int) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = pc.utf8_trim_whitespace(column)
    texts = pc.if_else(pc.is_in(texts, pa.array(nulls)), pa.scalar(None, pa.string()), texts)
    numbers = texts.cast(pa.float64())
    if has_large(numbers) and (row := first_inexact(texts)) is not None:
        raise inexact(texts[row].as_py(), f"{path}, row {first_row + row}", name, _as_text(name))
    return numbers


def _parse_json(text: bytes, path: str, first_line: int, schema: Any, unexpected: str) -> Any:
    import pyarrow as pa
    import pyarrow.json as json

    # In one piece, so that a type is what all of its values ask for, and rows count from the first.
    read = json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
    try:
        return json.read_json(pa.BufferReader(text), read, options)
    except (pa.ArrowException, ValueError, OSError) as error:
        message = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        row = _ROW.search(message)
        place = path if row is None else f"{path}, line {_line_of_row(text, int(row[1])) + first_line}"
        raise CorruptError("the text cannot be parsed", found=message, where=place, remedy=_MEND) from error


def _line_of_row(text: bytes, row: int) -> int:
    """The line, counted from 0, of a row: empty lines are no rows."""
    full = (number for number, line in enumerate(text.split(b"\n")) if line.strip())
    return next((number for index, number in enumerate(full) if index == row), row)


class _Prepended:
    """A file of which the first bytes were read already."""

    closed = False

    def __init__(self, first: bytes, file: BinaryIO) -> None:
        self._first, self._file = first, file
        self._read: deque[bytes] = deque(maxlen=3)  # a row lies in two blocks at most

    @property
    def end(self) -> bytes:
        """What was read last, at least two blocks of it."""
        return b"".join(self._read)

    def read(self, size: int) -> bytes:
        if self._first:
            found, self._first = self._first[:size], self._first[size:]
        else:
            found = self._file.read(size)
        if found:
            self._read.append(found)
        return found


def _pieces(file: BinaryIO, path: str) -> Iterator[bytes]:
    """Text cut where lines end."""
    rest = file.read(len(BOM)).removeprefix(BOM)
    while piece := file.read(PIECE):
        end = piece.rfind(b"\n") + 1
        if not end:
            rest += piece
            if len(rest) > LIMIT:
                raise CorruptError("a line is longer than could be meant", found=f"{len(rest)} bytes", where=path)
            continue
        if (rest + piece[:end]).strip():
            yield rest + piece[:end]
        rest = piece[end:]
    if rest.strip():
        yield rest


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """A file's text as it is read, decompressed where its name ends with `.gz`."""
    opened: Callable[..., Any] = GzipFile if path.endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            yield file
    except (EOFError, zlib.error) as error:
        raise CorruptError(
            "the file's compression is damaged", found=error, where=path, remedy="fetch the file anew"
        ) from error
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        kind = CorruptError if error.errno is None else SourceError  # gzip's own have no number
        raise kind("the file cannot be read", found=error, where=path, remedy="fetch the file anew") from error


def text_size(path: str) -> int:
    """Bytes of a file as it lies.

    Raises:
        SourceError: it is not there.
    """
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise SourceError("the file cannot be read", found=error.strerror, where=path) from error
