"""Parsing CSV with pyarrow, without rounding integers and without accepting unclosed quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from csv import Error as CsvError
from csv import reader as csv_reader
from io import BytesIO, StringIO
from itertools import islice
from typing import Any

from rankfeed.errors import CorruptError
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.sources.text.dialect import BOM, REMEDY, Dialect
from rankfeed.sources.text.exact_numbers import first_inexact, has_large, inexact_error


def parse_csv(
    text: bytes,
    path: str,
    dialect: Dialect,
    columns: Sequence[str] | None = None,
    *,
    schema: Any = None,
    first_line: int = 1,
) -> Any:
    """A `pyarrow.Table`.

    ``columns`` are those in which integers may not be rounded (None for all). With a ``schema``, the text
    continues a table of these columns and types: it has no header, and begins at ``first_line`` of the file.
    """
    import pyarrow.csv as csv

    text = text.removeprefix(BOM)
    # A scan for quoted values takes longer than parsing.
    quoted = _quoted(dialect.delimiter_of(path)).finditer(text) if text.count(b'"') % 2 else ()
    for cell in quoted:
        if not cell[1]:  # Arrow reads all following rows as the text of the cell
            line = first_line + text.count(b"\n", 0, cell.start())
            raise CorruptError(
                "a quoted value has no end",
                expected='a closing "',
                found="the end of the file",
                where=f"{path}, line {line}",
                remedy="write the file again, with quotes within values doubled",
            )
    # Arrow counts rows from the first of this text.
    with arrow_errors(path if first_line == 1 else f"{path}, rows from line {first_line}", REMEDY):
        table = csv.read_csv(BytesIO(text), *_options(text, path, dialect, schema))
        _check_names(table, path)
        return _with_exact_integers(table, text, path, dialect, columns, schema, first_line)


def end_of_csv_lines(text: bytes, delimiter: str) -> int:
    """Where the last line ends that does not end within a quoted value; 0 if there is none."""
    return _quoted(delimiter).sub(lambda cell: b"." * len(cell[0]), text).rfind(b"\n") + 1


def _quoted(delimiter: str) -> re.Pattern[bytes]:
    """Matches quoted values, with the closing quote in a group: it is empty for an unclosed value."""
    # A quote within an unquoted value is a character.
    return re.compile(rb'"(?<![^\n\r' + re.escape(delimiter.encode()) + rb']")(?:[^"]++|"")*+("?)')


def _options(text: bytes, path: str, dialect: Dialect, schema: Any) -> tuple[Any, Any, Any]:
    import pyarrow.csv as csv

    # With threads, errors do not name the line. A line must fit into two blocks.
    read = csv.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parse = csv.ParseOptions(delimiter=dialect.delimiter_of(path), newlines_in_values=True)
    types = dialect.arrow_types()
    if schema is not None:
        read.column_names = schema.names
        types = {field.name: field.type for field in schema}
    convert = csv.ConvertOptions(column_types=types)
    # NaN is a number.
    convert.null_values = [each for each in convert.null_values if each.lower().lstrip("-") != "nan"]
    return read, parse, convert


def _check_names(table: Any, path: str) -> None:
    """Refuse column names that are not UTF-8: Arrow decodes them when they are used."""
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


def _with_exact_integers(
    table: Any,
    text: bytes,
    path: str,
    dialect: Dialect,
    columns: Sequence[str] | None,
    schema: Any,
    first_line: int,
) -> Any:
    """The table with rounded columns read again as uint64; an error if a column has other numbers too."""
    import pyarrow as pa
    import pyarrow.csv as csv

    given = dialect.arrow_types()
    for place, field in enumerate(table.schema):
        if field.type != pa.float64() or field.name in given or not has_large(table.column(place)):
            continue
        if table.schema.names.count(field.name) > 1:
            continue  # refused later

        def read_again(kind: Any, name: str = field.name) -> Any:
            read, parse, convert = _options(text, path, dialect, schema)
            convert.include_columns, convert.column_types = [name], {name: kind}
            return csv.read_csv(BytesIO(text), read, parse, convert).column(0)

        texts = read_again(pa.string())
        row = first_inexact(texts)
        if row is None:
            continue
        try:
            if schema is not None:
                raise pa.ArrowInvalid("the type is fixed")
            table = table.set_column(place, pa.field(field.name, pa.uint64()), read_again(pa.uint64()))
        except pa.ArrowInvalid:
            if columns is not None and field.name not in columns:
                continue
            line = line_of_csv_row(text, path, dialect, row + (schema is None), first_line)
            remedy = f"read the column as text with types={{{field.name!r}: 'string'}}"
            raise inexact_error(texts[row].as_py(), f"{path}, {line}", field.name, remedy) from None
    return table


def line_of_csv_row(text: bytes, path: str, dialect: Dialect, row: int, first_line: int = 1) -> str:
    """The line in which a row ends, for error messages; the header is row 0."""
    reader = csv_reader(StringIO(text.decode(errors="replace")), delimiter=dialect.delimiter_of(path))
    try:
        full = (reader.line_num for line in reader if line)
        return f"line {next(islice(full, row, None)) + first_line - 1}"
    except (CsvError, StopIteration):
        return f"row {row}"
