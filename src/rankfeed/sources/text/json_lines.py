"""Parsing lines of JSON with pyarrow, after checking them.

Arrow's parser recurses for each level of nesting, so a line of a hundred thousand brackets ends the process; it
names another line if one is cut; and it accepts text that is not UTF-8. So all this is checked first, with numpy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.text.dialect import BOM, LIMIT, PIECE, REMEDY, Dialect
from rankfeed.sources.text.exact_numbers import with_exact_integers

#: Levels of objects and lists in each other.
MOST_LEVELS = 64

#: Values and nulls of a table, beyond those that the text has room for.
_MOST_VALUES = 1 << 25
#: A string and a colon.
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
#: Pieces of a large text that are examined first, and their size.
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


def parse_json_lines(text: bytes, path: str, dialect: Dialect, columns: Sequence[str] | None = None) -> Any:
    """A `pyarrow.Table`; ``columns`` are those in which integers may not be rounded (None for all)."""
    import pyarrow as pa

    text = text.removeprefix(BOM)
    check_lines(text, path)
    _check_keys(text, path)
    types = dialect.arrow_types()
    table = _parse(text, path, 1, pa.schema(types) if types else None, "infer")
    parse_again = partial(_parse, text, path, 1, unexpected="infer")
    return with_exact_integers(table, text, path, 1, types, parse_again, columns)


def stream_json_lines(file: BinaryIO, path: str, dialect: Dialect) -> Iterator[Any]:
    """The rows as `pyarrow.Table`s of one schema, which the first piece of text defines."""
    import pyarrow as pa

    types = dialect.arrow_types()
    schema, line = pa.schema(types) if types else None, 1
    for piece in _pieces(file, path):
        first, line = line, check_lines(piece, path, line)
        _check_keys(piece, path)
        unexpected = "infer" if first == 1 else "error"
        table = _parse(piece, path, first, schema, unexpected)
        parse_again = partial(_parse, piece, path, first, unexpected=unexpected) if first == 1 else None
        table = with_exact_integers(table, piece, path, first, types, parse_again)
        schema = table.schema
        yield table


def names_in(table: Any, text: bytes, path: str, dialect: Dialect) -> list[str]:
    """The columns in a text: a table of it also has those in ``types``."""
    import pyarrow as pa

    types = dialect.arrow_types()
    empty = [name for name in types if table.column(name).null_count == len(table)]
    if not empty:
        names: list[str] = table.schema.names
        return names
    schema = pa.schema({name: kind for name, kind in types.items() if name not in empty})
    found: list[str] = _parse(text.removeprefix(BOM), path, 1, schema, "infer").schema.names
    return found


def line_of_json_row(text: bytes, row: int) -> int:
    """The line, counted from 0, of a row: empty lines are no rows."""
    full = (number for number, line in enumerate(text.split(b"\n")) if line.strip())
    return next((number for index, number in enumerate(full) if index == row), row)


def check_lines(content: bytes | memoryview, where: str, first_line: int = 1) -> int:
    r"""Check that each line is one complete object in UTF-8, not nested too deeply.

    Returns:
        number of the line after the last.

    Examples:
        >>> check_lines(b'{"a": "[["}\n{"a": [1]}', "here")
        3
        >>> check_lines(b'{"a": 1}\n{"a": [1}', "here")
        Traceback (most recent call last):
            ...
        rankfeed.errors.CorruptError: a line is no complete JSON object
          expected: as many brackets and quotes closed as opened
          where: here, line 2
          remedy: mend or remove the line, or write the file again
    """
    view = memoryview(content)
    start, line = 0, first_line
    while start < len(view):
        stop = min(start + _CHUNK, len(view))
        chunk = bytes(view[start:stop])
        if stop < len(view):
            # Up to the end of a line; a longer line completely.
            end = chunk.rfind(b"\n") + 1
            if not end:
                rest = bytes(view[stop:])
                more = rest.find(b"\n") + 1
                chunk += rest[:more] if more else rest
            else:
                chunk = chunk[:end]
        start += len(chunk)
        line = _check_chunk(chunk, where, line)
    return line


def _check_chunk(chunk: bytes, where: str, first_line: int) -> int:
    try:
        chunk.decode()
    except UnicodeDecodeError as error:
        line = first_line + chunk.count(b"\n", 0, error.start)
        raise _incomplete(where, line, "UTF-8", f"{error.reason} at byte {error.start}") from error
    text = chunk if chunk.endswith(b"\n") else chunk + b"\n"
    if b"\\" in text:
        text = _ESCAPED.sub(b"", text)
    kinds = _KINDS[np.frombuffer(text, np.uint8)]
    kinds = kinds[kinds != 0]
    in_string = np.cumsum(kinds == _QUOTE) & 1 == 1
    depth = np.cumsum(np.where(in_string, 0, _DEPTH_STEPS[kinds]))
    ends = np.flatnonzero(kinds == _NEWLINE)
    open_at_end = (depth[ends] != 0) | in_string[ends]
    below = depth < 0
    if open_at_end.any() or below.any():
        places = [ends[np.argmax(open_at_end)]] if open_at_end.any() else []
        places += [np.argmax(below)] if below.any() else []
        line = first_line + int(np.count_nonzero(kinds[: int(min(places))] == _NEWLINE))
        raise _incomplete(where, line, "as many brackets and quotes closed as opened", None)
    if len(depth) and int(depth.max()) > MOST_LEVELS:
        line = first_line + int(np.count_nonzero(kinds[: int(np.argmax(depth > MOST_LEVELS))] == _NEWLINE))
        raise SourceError(
            "a line of JSON is nested too deeply",
            expected=f"up to {MOST_LEVELS} levels",
            where=f"{where}, line {line}",
            remedy="write the inner part as a string",
        )
    return first_line + len(ends)


def _incomplete(where: str, line: int, expected: str, found: str | None) -> CorruptError:
    return CorruptError(
        "a line is no complete JSON object",
        expected=expected,
        found=found,
        where=f"{where}, line {line}",
        remedy="mend or remove the line, or write the file again",
    )


def _check_keys(content: bytes, where: str) -> None:
    """Refuse lines that would be a table of nulls: each line has a value or null for the keys of all lines."""
    lines = content.count(b"\n") + 1
    most = max(len(content), _MOST_VALUES) // lines
    step = max(_PROBE_BYTES, len(content) // _PROBES)
    some = b"".join(content[start : start + _PROBE_BYTES] for start in range(0, len(content), step))
    if len(set(_KEY.findall(some))) <= most:
        return
    keys: set[bytes] = set()
    for found in _KEY.finditer(content):
        keys.add(found[1])
        if len(keys) > most:
            raise SourceError(
                "the lines have too many different keys: each is a column, with a value or null in every line",
                expected=f"up to {most} keys in {lines} lines",
                where=where,
                remedy='write what differs from line to line as values: {"key": "a", "value": 1}',
            )


def _parse(text: bytes, path: str, first_line: int, schema: Any, unexpected: str) -> Any:
    import pyarrow as pa
    import pyarrow.json as json

    # In one block, so that types depend on all values, and rows count from the first.
    read = json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
    try:
        return json.read_json(pa.BufferReader(text), read, options)
    except (pa.ArrowException, ValueError, OSError) as error:
        message = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        row = _ROW.search(message)
        place = path if row is None else f"{path}, line {line_of_json_row(text, int(row[1])) + first_line}"
        raise CorruptError("the text cannot be parsed", found=message, where=place, remedy=REMEDY) from error


def _pieces(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The text in pieces that end with lines."""
    rest = file.read(len(BOM)).removeprefix(BOM)
    while piece := file.read(PIECE):
        end = piece.rfind(b"\n") + 1
        if not end:
            rest += piece
            if len(rest) > LIMIT:
                raise CorruptError("a line is too long", found=f"{len(rest)} bytes", where=path)
            continue
        if (rest + piece[:end]).strip():
            yield rest + piece[:end]
        rest = piece[end:]
    if rest.strip():
        yield rest
