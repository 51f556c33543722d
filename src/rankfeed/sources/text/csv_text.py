"""Parsing CSV with pyarrow, without rounding integers and without accepting unclosed quotes."""

import re
from collections.abc import Sequence
from csv import Error as CsvError
from csv import reader as csv_reader
from functools import partial
from io import BytesIO, StringIO
from itertools import islice
from typing import Any

import numpy as np

from rankfeed.errors import CorruptError
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.sources.arrow.types import UNNAMED
from rankfeed.sources.text.dialect import BOM, REMEDY, Dialect
from rankfeed.sources.text.exact_numbers import has_large, inexact_error, is_inexact

_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")


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
    import pyarrow as pa

    if schema is None:
        text = text.removeprefix(BOM)
    if text.count(b'"') % 2:  # a scan for quoted values takes longer than parsing
        check_quotes(text, path, dialect, first_line)
    parse = partial(_parse, text, path, dialect, None if schema is None else schema.names, first_line)
    given = dialect.arrow_types()
    table = parse(given if schema is None else schema)
    for place, (name, column) in enumerate(zip(table.schema.names, table.columns, strict=True)):
        is_wanted = columns is None or (name or UNNAMED) in columns
        # Two columns of one name are refused later.
        if name in given or not is_wanted or table.schema.get_field_index(name) < 0 or not has_large(column):
            continue
        texts = parse({name: pa.string()}, [name]).column(0)
        if (row := _first_inexact(texts)) is None:
            continue
        try:
            if schema is None:
                table = table.set_column(place, name, parse({name: pa.uint64()}, [name]).column(0))
                continue
        except CorruptError:
            pass
        line = _line_of_row(text, path, dialect, row, first_line, header=schema is None)
        remedy = "read the column as text with types={'column': 'string'}"
        raise inexact_error(texts[row].as_py()[:100], f"{path}, {line}", name, remedy)
    return table


def check_quotes(text: bytes, path: str, dialect: Dialect, first_line: int = 1) -> None:
    """Refuse a quoted value without an end."""
    for cell in _quoted(dialect.delimiter_of(path)).finditer(text):
        if not cell[1]:  # Arrow reads all following rows as the text of the cell
            line = first_line + text.count(b"\n", 0, cell.start())
            raise CorruptError(
                "a quoted value has no end",
                expected='a closing "',
                found="the end of the file",
                where=f"{path}, line {line}",
                remedy="write the file again, with quotes within values doubled",
            )


def end_of_csv_lines(text: bytes, delimiter: str) -> int:
    """Where the last line ends that does not end within a quoted value; 0 if there is none."""
    return _quoted(delimiter).sub(lambda cell: b"." * len(cell[0]), text).rfind(b"\n") + 1


def _quoted(delimiter: str) -> re.Pattern[bytes]:
    """Matches quoted values, with the closing quote in a group: it is empty for an unclosed value."""
    # A quote within an unquoted value is a character.
    return re.compile(rb'"(?<![^\n\r' + re.escape(delimiter.encode()) + rb']")(?:[^"]++|"")*+("?)')


def _parse(
    text: bytes,
    path: str,
    dialect: Dialect,
    names: Sequence[str] | None,
    first_line: int,
    types: Any,
    columns: Sequence[str] = (),
) -> Any:
    """A table of ``columns`` (empty for all); ``names`` are those of all, None if the first line has them."""
    import pyarrow as pa
    import pyarrow.csv as csv

    # With threads, errors do not name the line. A line must fit into two blocks.
    read = csv.ReadOptions(use_threads=False, block_size=len(text) + len(BOM) + 1, column_names=names)
    parse = csv.ParseOptions(delimiter=dialect.delimiter_of(path), newlines_in_values=True)
    if isinstance(types, pa.Schema):  # without columns of one name, which are refused later
        types = {field.name: field.type for field in types if types.get_field_index(field.name) >= 0}
    convert = csv.ConvertOptions(column_types=types, include_columns=columns)
    # NaN is a number.
    convert.null_values = [each for each in convert.null_values if each.lower().lstrip("-") != "nan"]
    # Arrow counts rows from the first of this text.
    with arrow_errors(path if first_line == 1 else f"{path}, rows from line {first_line}", REMEDY):
        # Arrow removes one byte order mark; the text has its own only if a row begins with it.
        table = csv.read_csv(BytesIO(BOM + text), read, parse, convert)
        try:
            table.schema.names  # noqa: B018
        except UnicodeDecodeError as error:  # Arrow decodes names when they are used
            raise CorruptError(
                "a column name is not valid text",
                expected="UTF-8",
                found=f"{error.object!r}: {error.reason} at byte {error.start}",
                where=f"{path}, line 1",
                remedy="write the file in UTF-8 (iconv -t UTF-8)",
            ) from error
        return table


def _first_inexact(texts: Any) -> int | None:
    """The first row of a text column with an integer that float64 would round; None if there is none."""
    import pyarrow.compute as pc

    is_long = pc.greater_equal(pc.binary_length(texts), 16).fill_null(False)
    for row in np.flatnonzero(np.asarray(is_long)).tolist():
        text = texts[row].as_py()
        if _INTEGER.fullmatch(text) and is_inexact(text):
            return int(row)
    return None


def _line_of_row(text: bytes, path: str, dialect: Dialect, row: int, first_line: int, *, header: bool) -> str:
    """The line in which a row ends, for error messages."""
    reader = csv_reader(StringIO(text.decode(errors="replace")), delimiter=dialect.delimiter_of(path))
    try:
        full = (reader.line_num for line in reader if line)
        return f"line {next(islice(full, row + header, None)) + first_line - 1}"
    except (CsvError, StopIteration):
        return f"row {row}"
