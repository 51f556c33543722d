"""Parsing CSV; a quoted value without an end is refused, which pyarrow ends with the file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from csv import Error as CsvError
from csv import reader as csv_reader
from io import BytesIO, StringIO
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from rankfeed._util.validate import invalid
from rankfeed.errors import CorruptError
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.sources.arrow.types import UNNAMED
from rankfeed.sources.formats import BOM
from rankfeed.sources.text.parser import REMEDY, Text, TextParser, is_rounded

_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")


class CsvParser(TextParser):
    """A parser of CSV; without a ``delimiter``, `.tsv` files have tabs and others commas."""

    digits_remedy = "read the column as text with types={'column': 'string'}"

    def __init__(self, types: Mapping[str, str] | None, delimiter: Any = None) -> None:
        super().__init__(types)
        is_one = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
        if delimiter is not None and not (is_one and delimiter not in '"\r\n'):
            raise invalid("delimiter", "one character of ASCII", delimiter)
        self._delimiter = delimiter

    def is_empty(self, content: bytes) -> bool:
        return not content.strip(b"\r\n")  # a line of spaces or tabs is a row

    def end_of_rows(self, content: bytes, path: str) -> int:
        if b'"' in content:
            content = self._quoted(path).sub(lambda value: b"." * len(value[0]), content)
        return super().end_of_rows(content, path)

    def _check(self, text: Text) -> None:
        if text.content.count(b'"') % 2:
            self._check_quotes(text)

    def _check_quotes(self, text: Text) -> None:
        """Refuse a quoted value without an end. Takes almost as long as parsing."""
        for value in self._quoted(text.path).finditer(text.content):
            if not value[1]:
                line = text.first_line + text.content.count(b"\n", 0, value.start())
                raise CorruptError(
                    "a quoted value has no end",
                    expected='a closing "',
                    found="the end of the file",
                    where=f"{text.path}, line {line}",
                    remedy="write the file again, with quotes within values doubled",
                )

    def _parse(
        self, text: Text, types: Mapping[str, Any], names: Sequence[str] | None, columns: Sequence[str] = ()
    ) -> Any:
        """As `TextParser._parse`, of some ``columns`` (empty for all)."""
        # With threads, errors do not name the line. A line must fit into two blocks.
        block_size = len(text.content) + len(BOM) + 1
        read = csv.ReadOptions(use_threads=False, block_size=block_size, column_names=names)
        parse = csv.ParseOptions(delimiter=self._delimiter_of(text.path), newlines_in_values=True)
        convert = csv.ConvertOptions(column_types=dict(types), include_columns=columns)
        # NaN is a number.
        convert.null_values = [word for word in convert.null_values if word.lower().lstrip("-") != "nan"]
        # Arrow counts rows from the first of this text.
        place = text.path if text.first_line == 1 else f"{text.path}, rows from line {text.first_line}"
        with arrow_errors(place, REMEDY):
            # Arrow removes one byte order mark; the text has its own only if a row begins with it.
            table = csv.read_csv(BytesIO(BOM + text.content), read, parse, convert)
        with arrow_errors(f"{text.path}, line 1, which names the columns", "write the file in UTF-8"):
            table.schema.names  # noqa: B018  (Arrow decodes them when they are used)
        # A value without an end reaches the end of the text: in the last line, or with lines in it.
        last_line = text.content[text.content.rfind(b"\n") + 1 :]
        if b'"' in last_line or any(_ends_with_lines(column) for column in table.columns):
            self._check_quotes(text)
        return table

    def _rounded_integers(
        self, text: Text, field: Any, names: Sequence[str] | None
    ) -> Iterator[tuple[str, str, int | str]]:
        column = self._parse(text, {field.name: pa.string()}, names, [field.name]).column(0)
        is_long = pc.greater_equal(pc.binary_length(column), 16).fill_null(False)
        for row in np.flatnonzero(np.asarray(is_long)).tolist():
            value = column[row].as_py()
            if _INTEGER.fullmatch(value) and is_rounded(value):
                yield self._line_of_row(text, row + (names is None)), field.name or UNNAMED, value
                return

    def _line_of_row(self, text: Text, row: int) -> str:
        """The line in which a row ends, for error messages; the header is a row."""
        content = StringIO(text.content.decode(errors="replace"))
        reader = csv_reader(content, delimiter=self._delimiter_of(text.path))
        try:
            lines = (reader.line_num for values in reader if values)
            return f"line {next(islice(lines, row, None)) + text.first_line - 1}"
        except (CsvError, StopIteration):
            return f"row {row}"

    def _delimiter_of(self, path: str) -> str:
        if self._delimiter is not None:
            return str(self._delimiter)
        return "\t" if path.removesuffix(".gz").endswith(".tsv") else ","

    def _quoted(self, path: str) -> re.Pattern[bytes]:
        """Matches quoted values, with the closing quote in a group: it is empty for an unclosed value."""
        delimiter = re.escape(self._delimiter_of(path).encode())
        # A quote within an unquoted value is a character.
        return re.compile(rb'"(?<![^\n\r' + delimiter + rb']")(?:[^"]++|"")*+("?)')


def _ends_with_lines(column: Any) -> bool:
    """Whether the last value of a column contains a line feed."""
    is_text = column.type in (pa.string(), pa.binary()) and len(column)
    return bool(is_text) and b"\n" in (column[-1].cast(pa.binary()).as_py() or b"")
