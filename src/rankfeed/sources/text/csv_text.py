"""Parsing CSV with pyarrow, without rounding integers and without accepting unclosed quotes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from csv import Error as CsvError
from csv import reader as csv_reader
from io import BytesIO, StringIO
from itertools import islice
from typing import Any, BinaryIO

from rankfeed.errors import CorruptError
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.sources.text.dialect import BOM, PIECE, REMEDY, Dialect
from rankfeed.sources.text.exact_numbers import first_inexact, has_large, inexact_error


def parse_csv(text: bytes, path: str, dialect: Dialect, columns: Sequence[str] | None = None) -> Any:
    """A `pyarrow.Table`; ``columns`` are those in which integers may not be rounded (None for all)."""
    import pyarrow.csv as csv

    _check_quotes(text, path, dialect.delimiter_of(path))
    read, parse, convert = _options(path, dialect, len(text) + 1)
    with arrow_errors(path, REMEDY):
        table = _check_names(csv.read_csv(BytesIO(text), read, parse, convert), path)
        return _with_exact_integers(table, text, path, dialect, columns)


def stream_csv(file: BinaryIO, path: str, dialect: Dialect) -> Iterator[Any]:
    """The rows as `pyarrow.RecordBatch`es; the first piece of text defines which columns are numbers."""
    with arrow_errors(path, REMEDY):
        yield from _stream(file, path, dialect)


def line_of_csv_row(text: bytes, path: str, dialect: Dialect, row: int) -> str:
    """The line in which a row ends, for error messages."""
    reader = csv_reader(StringIO(text.decode(errors="replace")), delimiter=dialect.delimiter_of(path))
    try:
        full = (reader.line_num for line in reader if line)
        return f"line {next(islice(full, row + 1, None))}"
    except (CsvError, StopIteration):
        return f"row {row}"


def _options(path: str, dialect: Dialect, block_size: int) -> tuple[Any, Any, Any]:
    import pyarrow.csv as csv

    # With threads, errors do not name the line. A line must fit into two blocks.
    read = csv.ReadOptions(use_threads=False, block_size=block_size)
    parse = csv.ParseOptions(delimiter=dialect.delimiter_of(path), newlines_in_values=True)
    convert = csv.ConvertOptions(column_types=dialect.arrow_types())
    # NaN is a number.
    convert.null_values = [each for each in convert.null_values if each.lower().lstrip("-") != "nan"]
    return read, parse, convert


def _check_names(table: Any, path: str) -> Any:
    """The table or reader, if its column names are UTF-8: Arrow decodes them when they are used."""
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
    """Refuse an unclosed quote: Arrow reads all following rows as the text of the cell."""
    if text.count(b'"') % 2 == 0:  # a scan takes longer than parsing
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


def _with_exact_integers(
    table: Any, text: bytes, path: str, dialect: Dialect, columns: Sequence[str] | None
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
            read, parse, convert = _options(path, dialect, len(text) + 1)
            convert.include_columns, convert.column_types = [name], {name: kind}
            return csv.read_csv(BytesIO(text), read, parse, convert).column(0)

        row = first_inexact(read_again(pa.string()))
        if row is None:
            continue
        try:
            table = table.set_column(place, pa.field(field.name, pa.uint64()), read_again(pa.uint64()))
        except pa.ArrowInvalid:
            if columns is not None and field.name not in columns:
                continue
            value = read_again(pa.string())[row].as_py()
            line = line_of_csv_row(text, path, dialect, row)
            raise inexact_error(value, f"{path}, {line}", field.name, _as_text(field.name)) from None
    return table


def _as_text(name: str) -> str:
    return f"read the column as text with types={{{name!r}: 'string'}}"


def _stream(file: BinaryIO, path: str, dialect: Dialect) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.csv as csv

    read, parse, convert = _options(path, dialect, PIECE)
    first = file.read(PIECE)
    end = first.rfind(b"\n") + 1 if len(first) == PIECE else len(first)
    floats, unsigned = list[str](), dict[str, Any]()
    given = dialect.arrow_types()
    if first[:end].count(b'"') % 2 == 0:  # otherwise the piece may end within a quoted value: Arrow infers types
        schema = parse_csv(first[:end], path, dialect).schema
        floats = [field.name for field in schema if pa.types.is_floating(field.type) and field.name not in given]
        unsigned = {field.name: field.type for field in schema if field.type == pa.uint64()}
    convert.column_types = {**unsigned, **dict.fromkeys(floats, pa.string()), **given}
    rows = 0
    text = _Prepended(first, file)
    last = None
    for batch in _check_names(csv.open_csv(pa.PythonFile(text, "r"), read, parse, convert), path):
        columns = []
        last = batch.columns[-1] if len(batch) else last
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name in floats:
                column = _to_floats(column, convert.null_values, name, path, rows)
            columns.append(column)
        yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
        rows += len(batch)
    if last is not None and pa.types.is_string(last.type) and last[-1].is_valid:
        value = last[-1].as_py().encode()
        if _is_unclosed(value, text.end, dialect.delimiter_of(path)):
            raise _unclosed(f"{path}, row {rows - 1}")


def _is_unclosed(value: bytes, end: bytes, delimiter: str) -> bool:
    """Whether the last value of a text has an opening quote only; ``end`` are the last bytes of the text."""
    cell = b'"' + value.replace(b'"', b'""')
    before = end[: len(end) - len(cell)][-1:]
    return end.endswith(cell) and before in (b"", b"\n", b"\r", delimiter.encode())


def _to_floats(column: Any, nulls: list[str], name: str, path: str, first_row: int) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = pc.utf8_trim_whitespace(column)
    texts = pc.if_else(pc.is_in(texts, pa.array(nulls)), pa.scalar(None, pa.string()), texts)
    numbers = texts.cast(pa.float64())
    if has_large(numbers) and (row := first_inexact(texts)) is not None:
        raise inexact_error(texts[row].as_py(), f"{path}, row {first_row + row}", name, _as_text(name))
    return numbers


class _Prepended:
    """A file whose first bytes were read already."""

    closed = False

    def __init__(self, first: bytes, file: BinaryIO) -> None:
        self._first, self._file = first, file
        self._read: deque[bytes] = deque(maxlen=3)  # a row is in two blocks at most

    @property
    def end(self) -> bytes:
        """The last bytes that were read, at least two blocks."""
        return b"".join(self._read)

    def read(self, size: int) -> bytes:
        if self._first:
            found, self._first = self._first[:size], self._first[size:]
        else:
            found = self._file.read(size)
        if found:
            self._read.append(found)
        return found
