"""Parsing lines of JSON, after checking that each is one object.

Arrow's parser recurses for each level of nesting, so a line of a hundred thousand brackets ends the process; it
continues an object that is cut with the next line; and it accepts text that is not UTF-8.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.json as pa_json

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow.types import UNNAMED
from rankfeed.sources.text.parser import REMEDY, Text, TextParser, is_rounded
from rankfeed.storage.commit import decodable

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
#: An integer with at least as many digits as 2**53.
_LONG_INTEGER = re.compile(rb"(?<![0-9.])[0-9]{16,}(?![0-9.eE])")
#: Numbers that Arrow accepts and JSON lacks.
_WORDS = (b"NaN", b"Infinity", b"Inf")
#: Brackets as parentheses; all other bytes are deleted.
_PARENTHESES = bytes.maketrans(b"[{}]", b"(())")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{}]"))


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
        for line_number, line in enumerate(BytesIO(content), text.first_line):
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
                rows = (line_number for line_number, line in _lines(text) if line.strip())
                where = f"{where}, line {next(islice(rows, int(row[1]), None), '?')}"
            raise CorruptError("the text cannot be parsed", found=message, where=where, remedy=REMEDY) from error

    def _rounded_integers(
        self, text: Text, field: Any, names: Sequence[str] | None
    ) -> Iterator[tuple[str, str, int | str]]:
        def walk(name: str, kind: Any, value: Any) -> Iterator[tuple[str, int]]:
            if isinstance(value, dict):
                for key, inner in value.items():
                    yield from walk(f"{name}.{key}", kind.field(key).type, inner)
            elif isinstance(value, list):
                for element in value:
                    yield from walk(name, kind.value_type, element)
            elif type(value) is int and kind == "double" and is_rounded(value):
                yield name, value

        for line_number, line in _lines(text):
            if _LONG_INTEGER.search(line):
                for name, integer in walk(field.name or UNNAMED, field.type, json.loads(line).get(field.name)):
                    yield f"line {line_number}", name, integer


def _lines(text: Text) -> Iterator[tuple[int, bytes]]:
    """The lines of a text with their numbers in the file."""
    return enumerate(BytesIO(text.content), text.first_line)


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
