"""Lines of JSON, looked at before they are parsed: each one whole object, and none nested without bound.

Arrow's parser calls itself for every level of nesting: a line of a hundred thousand brackets ends the process. It
goes by objects, not by lines: what it says of a cut line names another one. And it takes text that is not UTF-8 as
it is. So all this is checked first, by numpy.
"""

from __future__ import annotations

import re

import numpy as np

from rankfeed.errors import CorruptError, SourceError

#: Levels of objects and lists in each other.
MOST_LEVELS = 64

#: Values and nulls of a table, beyond those that its text has room for.
_MOST_VALUES = 1 << 25
#: A string and a colon. Of large text, this many pieces of this many bytes are examined first.
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
_LOOKS, _LOOKED_AT = 64, 1 << 13

#: Bytes looked at in one go.
_CHUNK = 16 << 20
_QUOTE, _OPEN, _CLOSE, _NEWLINE = 1, 2, 3, 4
_KINDS = np.zeros(256, np.uint8)
for _characters, _kind in ((b'"', _QUOTE), (b"[{", _OPEN), (b"]}", _CLOSE), (b"\n", _NEWLINE)):
    _KINDS[list(_characters)] = _kind
_STEPS = np.array([0, 0, 1, -1, 0], np.int32)
_ESCAPED = re.compile(rb"\\.")


def check_lines(content: bytes | memoryview, where: str, first_line: int = 1) -> int:
    r"""Hold text to what lines of JSON are.

    Args:
        content: the text, which begins and ends where lines do.
        where: the file's name, for errors.
        first_line: number of its first line.

    Returns:
        number of the line after the last.

    Raises:
        CorruptError: a line is no whole object, or not UTF-8; names the line.
        SourceError: one is nested deeper than is read.

    Examples:
        >>> check_lines(b'{"a": "[["}\n{"a": [1]}', "here")
        3
        >>> check_lines(b'{"a": 1}\n{"a": [1}', "here")
        Traceback (most recent call last):
            ...
        rankfeed.errors.CorruptError: a line is no whole JSON object
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
            # Up to the end of a line; a line longer than a chunk is taken whole.
            end = chunk.rfind(b"\n") + 1
            if not end:
                rest = bytes(view[stop:])
                more = rest.find(b"\n") + 1
                chunk += rest[:more] if more else rest
            else:
                chunk = chunk[:end]
        start += len(chunk)
        line = _check(chunk, where, line)
    return line


def check_keys(content: bytes, where: str) -> None:
    """Refuse lines that would be a table of nulls: each line has a value, or a null, for every key of all lines.

    Args:
        content: the text.
        where: the file's name, for errors.

    Raises:
        SourceError: the number of different keys times the number of lines is too large.
    """
    lines = content.count(b"\n") + 1
    most = max(len(content), _MOST_VALUES) // lines
    step = max(_LOOKED_AT, len(content) // _LOOKS)
    some = b"".join(content[start : start + _LOOKED_AT] for start in range(0, len(content), step))
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


def _check(chunk: bytes, where: str, first_line: int) -> int:
    try:
        chunk.decode()
    except UnicodeDecodeError as error:
        line = first_line + chunk.count(b"\n", 0, error.start)
        raise _not_whole(where, line, "UTF-8", f"{error.reason} at byte {error.start}") from error
    text = chunk if chunk.endswith(b"\n") else chunk + b"\n"
    if b"\\" in text:
        text = _ESCAPED.sub(b"", text)
    kinds = _KINDS[np.frombuffer(text, np.uint8)]
    kinds = kinds[kinds != 0]
    inside = np.cumsum(kinds == _QUOTE) & 1 == 1
    depth = np.cumsum(np.where(inside, 0, _STEPS[kinds]))
    ends = np.flatnonzero(kinds == _NEWLINE)
    open_at_end = (depth[ends] != 0) | inside[ends]
    below = depth < 0
    if open_at_end.any() or below.any():
        places = [ends[np.argmax(open_at_end)]] if open_at_end.any() else []
        places += [np.argmax(below)] if below.any() else []
        at = int(min(places))
        line = first_line + int(np.count_nonzero(kinds[:at] == _NEWLINE))
        raise _not_whole(where, line, "as many brackets and quotes closed as opened", None)
    if len(depth) and int(depth.max()) > MOST_LEVELS:
        line = first_line + int(np.count_nonzero(kinds[: int(np.argmax(depth > MOST_LEVELS))] == _NEWLINE))
        raise SourceError(
            "a line of JSON is nested too deeply",
            expected=f"up to {MOST_LEVELS} levels",
            where=f"{where}, line {line}",
            remedy="write the inner part as a string",
        )
    return first_line + len(ends)


def _not_whole(where: str, line: int, expected: str, found: str | None) -> CorruptError:
    return CorruptError(
        "a line is no whole JSON object",
        expected=expected,
        found=found,
        where=f"{where}, line {line}",
        remedy="mend or remove the line, or write the file again",
    )
