"""Parsers of CSV and of JSON lines, which check what pyarrow misreads or cannot parse.

pyarrow reads integers above int64, and those beside fractions, as rounded float64. It ends a quoted value of CSV
that has no end with the file. Its parser of JSON recurses for each level of nesting, so a line of a hundred
thousand brackets ends the process; it continues an object that is cut with the next line; and it accepts text that
is not UTF-8.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from csv import Error as CsvError
from csv import reader as csv_reader
from decimal import Decimal
from io import BytesIO, StringIO
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.json as pa_json

from rankfeed._util.validate import invalid
from rankfeed.errors import ArgumentError, CorruptError, SourceError, listed, safe_repr
from rankfeed.sources.arrow.types import UNNAMED
from rankfeed.sources.formats import BOM
from rankfeed.storage.commit import decodable
from rankfeed.storage.file_errors import arrow_errors

REMEDY = "correct or remove that line; if a type is wrong, pass types={'column': 'string'}"
#: Integers up to this are exact in float64.
_EXACT = 2**53
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")
#: Levels of objects and lists in each other.
_MOST_LEVELS = 64
#: Values and nulls of a table, beyond those that the text has room for.
_MOST_VALUES = 1 << 25
#: A string, and the same with a colon.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
#: Pieces of a large text that are examined, and their size.
_PROBES, _PROBE_BYTES = 64, 1 << 13
_ROW = re.compile(r"in row (\d+)")
#: Integers in a text: line, column and value.
_Integers = Iterator[tuple[str, str, int | str]]
#: An integer with at least as many digits as 2**53.
_LONG_INTEGER = re.compile(rb"(?<![0-9.])[0-9]{16,}(?![0-9.eE])")
#: Numbers that Arrow accepts and JSON lacks.
_WORDS = (b"NaN", b"Infinity", b"Inf")
#: Brackets as parentheses; all other bytes are deleted.
_PARENTHESES = bytes.maketrans(b"[{}]", b"(())")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{}]"))


class Text(NamedTuple):
    """The text of a file, or a part of it that begins with a line; without a byte order mark."""

    content: bytes
    path: str
    first_line: int = 1

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines with their numbers in the file."""
        return enumerate(BytesIO(self.content), self.first_line)


class TextParser(ABC):
    """A parser of CSV or JSON lines; ``types`` has Arrow's names of the types of columns that are not inferred."""

    digits_remedy: ClassVar[str]  # how to keep all digits of integers

    def __init__(self, types: Mapping[str, str] | None) -> None:
        if types is not None and not isinstance(types, Mapping):
            raise invalid("types", 'Arrow types by column, such as {"label": "int32"}', types)
        self.types: dict[str, Any] = {}
        for name, alias in (types or {}).items():
            try:
                self.types[name] = pa.type_for_alias(alias)
            except Exception as error:
                raise ArgumentError(
                    "Arrow has no such type",
                    expected='a name such as "int64", "float32", "string", "timestamp[s]"',
                    found=safe_repr({name: alias}),
                ) from error

    def check_types(self, names: Sequence[str], where: str) -> None:
        """Refuse types of columns that do not exist; ``names`` are the columns of all files."""
        if missing := [name for name in self.types if name not in names]:
            raise ArgumentError(
                "types= names a column that does not exist",
                expected=listed(list(map(repr, names)), most=50),
                found=listed(list(map(repr, missing))),
                where=where,
                remedy="correct the name: upper and lower case differ",
            )

    def parse(self, text: Text, columns: Sequence[str] | None = None, schema: Any = None) -> Any:
        """The rows as a `pyarrow.Table`; a SourceError for an integer that float64 would round.

        ``columns`` are those in which integers may not be rounded (None for all). With a ``schema``, the text
        continues a table of these columns and types.
        """
        self._check(text)
        names, types = (None, self.types) if schema is None else (schema.names, types_by_name(schema))
        table = self._parse(text, types, names)
        for field in table.schema:
            # Two columns of one name are refused later.
            is_unique = table.schema.get_field_index(field.name) >= 0
            if field.name in self.types or not is_unique or not _has_large(table.column(field.name)):
                continue
            rounded: dict[str, tuple[str, int | str]] = {}
            with arrow_errors(text.path, REMEDY):
                for line, name, integer in self._rounded_integers(text, field, names):
                    # Objects in lists are values of the column around them.
                    if columns is None or any(f"{name}.".startswith(f"{column}.") for column in columns):
                        rounded.setdefault(name, (line, integer))
            for name, (line, integer) in rounded.items():
                if schema is None:
                    types = types_by_name(table.schema)
                    types[field.name] = _with_uint64(field.name or UNNAMED, types[field.name], name)
                    with suppress(CorruptError):  # a number is negative, has a fraction or does not fit
                        table = self._parse(text, types, None)
                        continue
                lossy = f"; if its exact value does not matter, types={{{field.name!r}: 'float64'}}"
                raise SourceError(
                    "an integer would lose digits: its column has fractions, or numbers of other ranges",
                    expected="int64, uint64, or what float64 holds exactly",
                    found=str(integer)[:100],
                    where=f"{text.path}, {line}, column {name!r}",
                    remedy=self.digits_remedy + (lossy if field.type == "double" else ""),
                )
        return table

    def names_in(self, table: Any, text: Text) -> list[str]:
        """The columns that a text has, given its table."""
        return list(table.schema.names)

    def is_empty(self, content: bytes) -> bool:
        """Whether a text has no rows, and no names."""
        return not content.strip()

    def end_of_rows(self, content: bytes, path: str) -> int:
        """Where the last complete row of a text ends; 0 if there is none."""
        return content.rfind(b"\n") + 1

    @abstractmethod
    def _check(self, text: Text) -> None:
        """Refuse a text that pyarrow would misread, or that would crash it."""

    @abstractmethod
    def _parse(self, text: Text, types: Mapping[str, Any], names: Sequence[str] | None) -> Any:
        """A table with Arrow ``types`` of some columns, and the ``names`` of all; None for those in the text."""

    @abstractmethod
    def _rounded_integers(self, text: Text, field: Any, names: Sequence[str] | None) -> _Integers:
        """The integers that the Arrow type of a top-level column rounds."""


def is_rounded(integer: int | str) -> bool:
    """Whether float64 rounds an integer, of any number of digits."""
    return Decimal(integer) != Decimal(float(str(integer)))


def types_by_name(schema: Any) -> dict[str, Any]:
    """The types of a `pyarrow.Schema`, without columns that share a name."""
    return {field.name: field.type for field in schema if schema.get_field_index(field.name) >= 0}


def _has_large(column: Any) -> bool:
    """Whether a `pyarrow.ChunkedArray` has float64 values, at any depth, that may be rounded integers."""
    if pa.types.is_list(column.type):
        return _has_large(pc.list_flatten(column))
    if pa.types.is_struct(column.type):
        return any(map(_has_large, column.flatten()))
    return column.type == pa.float64() and bool((np.abs(np.asarray(column)) >= _EXACT).any())


def _with_uint64(name: str, kind: Any, column: str) -> Any:
    """The Arrow type of a top-level column, with uint64 instead of float64 in the column of a name inside it."""
    if pa.types.is_list(kind):
        return pa.list_(_with_uint64(name, kind.value_type, column))
    if pa.types.is_struct(kind):
        types = [_with_uint64(f"{name}.{field.name}", field.type, column) for field in kind]
        return pa.struct([field.with_type(inner) for field, inner in zip(kind, types, strict=True)])
    return pa.uint64() if name == column and kind == pa.float64() else kind


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
        for match in self._quoted(text.path).finditer(text.content):
            if not match[1]:
                line = text.first_line + text.content.count(b"\n", 0, match.start())
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
        texts = [column for column in table.columns if column.type in (pa.string(), pa.binary()) and len(column)]
        if b'"' in last_line or any(b"\n" in (column[-1].cast("binary").as_py() or b"") for column in texts):
            self._check_quotes(text)
        return table

    def _rounded_integers(self, text: Text, field: Any, names: Sequence[str] | None) -> _Integers:
        column = self._parse(text, {field.name: pa.string()}, names, [field.name]).column(0)
        is_long = pc.greater_equal(pc.binary_length(column), 16).fill_null(False)
        for row in np.flatnonzero(np.asarray(is_long)).tolist():
            digits = column[row].as_py()
            if _INTEGER.fullmatch(digits) and is_rounded(digits):
                yield self._line_of_row(text, row + (names is None)), field.name or UNNAMED, digits
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


@decodable
class _Object(msgspec.Struct, gc=False):
    """Any JSON object; its content is skipped."""


_decode = msgspec.json.Decoder(_Object).decode


class JsonParser(TextParser):
    """A parser of lines with a JSON object each."""

    digits_remedy = "write its numbers in quotes, as text"

    def names_in(self, table: Any, text: Text) -> list[str]:
        # A table also has the columns in ``types``, with nulls.
        doubtful = {name for name in self.types if table.column(name).null_count == len(table)}
        keys = {b'"' + key + b'"' for key in set(_KEY.findall(text.content))} if doubtful else set()
        missing = doubtful - {json.loads(key, strict=False) for key in keys}
        return [name for name in table.schema.names if name not in missing]

    def _check(self, text: Text) -> None:
        content = text.content
        for word in _WORDS:
            content = content.replace(word, b"0")
        for line_number, line in text._replace(content=content).lines():
            try:
                _decode(line.decode())
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if not line.isspace():
                    raise CorruptError(
                        "a line is not one JSON object",
                        expected="a complete object in UTF-8",
                        found=error,
                        where=f"{text.path}, line {line_number}",
                        remedy="correct or remove the line, or write the file again",
                    ) from error
            except RecursionError as error:
                raise _nested_too_deeply(text, line_number) from error
            if line.count(b"[") + line.count(b"{") > _MOST_LEVELS:
                nested = _STRING.sub(b"", line).translate(_PARENTHESES, _NO_BRACKETS)
                for _ in range(_MOST_LEVELS):
                    nested = nested.replace(b"()", b"")
                if nested:
                    raise _nested_too_deeply(text, line_number)
        _check_keys(text)

    def _parse(self, text: Text, types: Mapping[str, Any], names: Sequence[str] | None) -> Any:
        def read(schema: Any) -> Any:
            # In one block, so that types depend on all values, and rows count from the first.
            options = pa_json.ReadOptions(use_threads=False, block_size=len(text.content) + 1)
            unexpected = "infer" if names is None else "error"
            parse = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
            return pa_json.read_json(pa.BufferReader(text.content), options, parse)

        try:
            table = read(pa.schema(list(types.items())) if types else None)
            try:
                table.validate()
            except pa.ArrowInvalid:  # Arrow loses a null before all values of lists whose type it infers
                table = read(table.schema)
            return table
        except (pa.ArrowException, ValueError, OSError) as error:
            message = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            where = text.path
            if row := _ROW.search(message):  # empty lines are not rows
                rows = (line_number for line_number, line in text.lines() if line.strip())
                where = f"{where}, line {next(islice(rows, int(row[1]), None), '?')}"
            raise CorruptError("the text cannot be parsed", found=message, where=where, remedy=REMEDY) from error

    def _rounded_integers(self, text: Text, field: Any, names: Sequence[str] | None) -> _Integers:
        def walk(name: str, kind: Any, value: Any) -> Iterator[tuple[str, int]]:
            if isinstance(value, dict):
                for key, inner in value.items():
                    yield from walk(f"{name}.{key}", kind.field(key).type, inner)
            elif isinstance(value, list):
                for element in value:
                    yield from walk(name, kind.value_type, element)
            elif type(value) is int and kind == "double" and is_rounded(value):
                yield name, value

        for line_number, line in text.lines():
            if _LONG_INTEGER.search(line):
                for name, integer in walk(field.name or UNNAMED, field.type, json.loads(line).get(field.name)):
                    yield f"line {line_number}", name, integer


def _nested_too_deeply(text: Text, line_number: int) -> SourceError:
    return SourceError(
        "a line of JSON is nested too deeply",
        expected=f"up to {_MOST_LEVELS} levels",
        where=f"{text.path}, line {line_number}",
        remedy="write the inner part as a string",
    )


def _check_keys(text: Text) -> None:
    """Refuse lines that would be a table of nulls: each line has a value or null for the keys of all lines."""
    content, lines = text.content, text.content.count(b"\n") + 1
    most = max(len(content), _MOST_VALUES) // lines
    step = max(_PROBE_BYTES, len(content) // _PROBES)
    sample = b"".join(content[start : start + _PROBE_BYTES] for start in range(0, len(content), step))
    if len(set(_KEY.findall(sample))) > most + _PROBES:  # each piece may begin within a key
        raise SourceError(
            "the lines have too many different keys: each is a column, with a value or null in every line",
            expected=f"up to {most} keys in {lines} lines",
            where=text.path,
            remedy='write what differs from line to line as values: {"key": "a", "value": 1}',
        )
