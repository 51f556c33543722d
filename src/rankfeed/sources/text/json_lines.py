"""Parsing lines of JSON with pyarrow, after checking them.

Arrow's parser recurses for each level of nesting, so a line of a hundred thousand brackets ends the process; it
names another line if one is cut; and it accepts text that is not UTF-8. So all this is checked first, with numpy.
"""

import json
import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import islice
from typing import Any

import numpy as np

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow.types import UNNAMED
from rankfeed.sources.text.dialect import BOM, REMEDY, Dialect
from rankfeed.sources.text.exact_numbers import has_large, inexact_error, is_inexact

#: Levels of objects and lists in each other.
MOST_LEVELS = 64

#: Values and nulls of a table, beyond those that the text has room for.
_MOST_VALUES = 1 << 25
#: A string and a colon.
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
#: Pieces of a large text that are examined, and their size.
_PROBES, _PROBE_BYTES = 64, 1 << 13

#: Bytes that are checked at once.
_CHUNK = 16 << 20
_QUOTE, _OPEN, _CLOSE, _NEWLINE = 1, 2, 3, 4
_KINDS = np.zeros(256, np.uint8)
for _characters, _kind in ((b'"', _QUOTE), (b"[{", _OPEN), (b"]}", _CLOSE), (b"\n", _NEWLINE)):
    _KINDS[list(_characters)] = _kind
_DEPTH_STEPS = np.array([0, 0, 1, -1, 0], np.int32)
_ESCAPED = re.compile(rb"\\.")
_ROW = re.compile(r"in row (\d+)")
#: An integer with at least as many digits as 2**53.
_LONG_INTEGER = re.compile(rb"(?<![0-9.])[0-9]{16,}(?![0-9.eE])")


def parse_json_lines(
    text: bytes,
    path: str,
    dialect: Dialect,
    columns: Sequence[str] | None = None,
    *,
    schema: Any = None,
    first_line: int = 1,
) -> Any:
    """A `pyarrow.Table`; the arguments are those of `parse_csv`."""
    import pyarrow as pa

    text = text.removeprefix(BOM)
    check_lines(text, path, first_line)
    _check_keys(text, path)
    types = dialect.arrow_types()
    given = pa.schema(types) if types else None
    table = _parse(text, path, first_line, schema or given, "infer" if schema is None else "error")
    for place, field in enumerate(table.schema):
        if field.name in types or not has_large(table.column(place)):
            continue
        found: dict[str, tuple[int, int]] = {}
        for line, name, number in _inexact_integers(field, text, path, first_line):
            # Objects in lists are values of the column around them.
            if columns is None or any(f"{name}.".startswith(f"{each}.") for each in columns):
                found.setdefault(name, (line, number))
        for name, (line, number) in found.items():
            try:
                if schema is None:
                    kind = _with_uint64(field.name or UNNAMED, table.schema.field(place).type, name)
                    exact = table.schema.set(place, field.with_type(kind))
                    table = _parse(text, path, first_line, exact, "infer")
                    continue
            except CorruptError:
                pass
            raise inexact_error(number, f"{path}, line {line}", name, "write its numbers in quotes, as text")
    return table


def _inexact_integers(field: Any, text: bytes, path: str, first_line: int) -> Iterator[tuple[int, str, int]]:
    """Line, column and value of the integers in a top-level column that its Arrow type rounds."""

    def walk(name: str, kind: Any, value: Any) -> Iterator[tuple[str, int]]:
        if isinstance(value, dict):
            for inner, each in value.items():
                yield from walk(f"{name}.{inner}", kind.field(inner).type, each)
        elif isinstance(value, list):
            for each in value:
                yield from walk(name, kind.value_type, each)
        elif type(value) is int and kind == "double" and is_inexact(value):
            yield name, value

    for line, content in enumerate(BytesIO(text), first_line):
        if _LONG_INTEGER.search(content):
            try:
                value = json.loads(content).get(field.name)
            except ValueError as error:
                raise CorruptError(
                    "a line is not one JSON object", found=error, where=f"{path}, line {line}", remedy=REMEDY
                ) from error
            for name, number in walk(field.name or UNNAMED, field.type, value):
                yield line, name, number


def _with_uint64(name: str, kind: Any, column: str) -> Any:
    """The Arrow type of a top-level column, with uint64 instead of float64 in the column of a name inside it."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return pa.list_(_with_uint64(name, kind.value_type, column))
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_with_uint64(f"{name}.{each.name}", each.type, column)) for each in kind])
    return pa.uint64() if name == column and kind == pa.float64() else kind


def columns_in(table: Any, text: bytes, dialect: Dialect) -> list[str]:
    """The columns in a text: a table of it also has those in ``types``, with nulls."""
    names: list[str] = table.schema.names
    doubtful = {name for name in dialect.types or () if table.column(name).null_count == len(table)}
    keys = {json.loads(b'"' + key + b'"', strict=False) for key in set(_KEY.findall(text))} if doubtful else set()
    return [name for name in names if name not in doubtful - keys]


def check_lines(content: bytes, where: str, first_line: int = 1) -> int:
    """Check that each line is complete JSON in UTF-8, not nested too deeply; the number of the line after them."""
    start, first = 0, first_line
    while start < len(content):
        # Up to the end of a line.
        end = content.rfind(b"\n", start, start + _CHUNK) + 1 or content.find(b"\n", start + _CHUNK) + 1
        chunk = content[start : end or len(content)]
        start += len(chunk)
        try:
            chunk.decode()
        except UnicodeDecodeError as error:
            line = first + chunk.count(b"\n", 0, error.start)
            raise _incomplete(where, line, "UTF-8", f"{error.reason} at byte {error.start}") from error
        text = chunk if chunk.endswith(b"\n") else chunk + b"\n"
        if b"\\" in text:
            text = _ESCAPED.sub(b"", text)
        kinds = _KINDS[np.frombuffer(text, np.uint8)]
        kinds = kinds[kinds != 0]
        in_string = np.cumsum(kinds == _QUOTE) & 1 == 1
        depth = np.cumsum(np.where(in_string, 0, _DEPTH_STEPS[kinds]))
        ends = np.flatnonzero(kinds == _NEWLINE)
        # A line that does not close what it opened ends after it; a bracket too many is where it is.
        bad = depth < 0
        bad[ends] |= (depth[ends] != 0) | in_string[ends]
        if bad.any():
            line = first + int(ends.searchsorted(np.argmax(bad)))
            raise _incomplete(where, line, "as many brackets and quotes closed as opened", None)
        if (depth > MOST_LEVELS).any():
            line = first + int(ends.searchsorted(np.argmax(depth > MOST_LEVELS)))
            raise SourceError(
                "a line of JSON is nested too deeply",
                expected=f"up to {MOST_LEVELS} levels",
                where=f"{where}, line {line}",
                remedy="write the inner part as a string",
            )
        first += len(ends)
    return first


def _incomplete(where: str, line: int, expected: str, found: str | None) -> CorruptError:
    return CorruptError(
        "a line is not a complete JSON object",
        expected=expected,
        found=found,
        where=f"{where}, line {line}",
        remedy="correct or remove the line, or write the file again",
    )


def _check_keys(content: bytes, where: str) -> None:
    """Refuse lines that would be a table of nulls: each line has a value or null for the keys of all lines."""
    lines = content.count(b"\n") + 1
    most = max(len(content), _MOST_VALUES) // lines
    step = max(_PROBE_BYTES, len(content) // _PROBES)
    some = b"".join(content[start : start + _PROBE_BYTES] for start in range(0, len(content), step))
    if len(set(_KEY.findall(some))) > most + _PROBES:  # each piece may begin within a key
        raise SourceError(
            "the lines have too many different keys: each is a column, with a value or null in every line",
            expected=f"up to {most} keys in {lines} lines",
            where=where,
            remedy='write what differs from line to line as values: {"key": "a", "value": 1}',
        )


def _parse(text: bytes, path: str, first_line: int, schema: Any, unexpected: str) -> Any:
    import pyarrow as pa
    import pyarrow.json as pa_json

    # In one block, so that types depend on all values, and rows count from the first.
    read = pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
    try:
        return pa_json.read_json(pa.BufferReader(text), read, options)
    except (pa.ArrowException, ValueError, OSError) as error:
        message = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        place = path
        if row := _ROW.search(message):  # empty lines are not rows
            lines = (line for line, content in enumerate(BytesIO(text), first_line) if content.strip())
            place = f"{path}, line {next(islice(lines, int(row[1]), None), '?')}"
        raise CorruptError("the text cannot be parsed", found=message, where=place, remedy=REMEDY) from error
