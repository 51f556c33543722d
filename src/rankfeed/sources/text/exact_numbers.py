"""Whole numbers in text that float64 would round: Arrow takes those above int64, or beside a fraction, for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rankfeed.errors import CorruptError, SourceError

#: Whole numbers up to this are float64 as well.
_EXACT = 2**53
_WHOLE = re.compile(r"\s*[+-]?[0-9]+\s*")
#: A whole number with as many digits as 2**53, in JSON.
_LONG = re.compile(rb"(?<![0-9.])[0-9]{16,}(?![0-9.eE])")

Path = tuple[str, ...]


def has_large(column: Any) -> bool:
    """Whether a float64 column (a `pyarrow` array) may have been a whole number that float64 cannot hold."""
    values = np.asarray(column)
    with np.errstate(invalid="ignore"):
        return bool((np.isfinite(values) & (np.abs(values) >= _EXACT)).any())


def first_inexact(texts: Any) -> int | None:
    """The first row of a column of text whose whole number is another one as float64; None if there is none."""
    import pyarrow.compute as pc

    long = pc.greater_equal(pc.binary_length(texts), 16).fill_null(False)
    for row in np.flatnonzero(np.asarray(long)).tolist():
        text = texts[row].as_py()
        if _WHOLE.fullmatch(text) and _is_inexact(int(text)):
            return int(row)
    return None


class InexactError(ValueError):
    """A whole number that float64 cannot hold."""

    def __init__(self, value: int, row: int) -> None:
        super().__init__(f"{value}, which float64 cannot hold")
        self.row = row


def whole_as_float(column: Any) -> Any:
    """A column of whole numbers (a `pyarrow.ChunkedArray`) as float64; columns of other types are cast.

    Raises:
        InexactError: it cannot hold one of them.
        pyarrow.ArrowInvalid: a value cannot be cast.
    """
    import pyarrow as pa

    if not pa.types.is_integer(column.type):
        return column.cast(pa.float64())
    values = column.fill_null(0).to_numpy()
    large = (values >= _EXACT) | (values <= -_EXACT) if values.dtype.kind == "i" else values >= _EXACT
    for row in np.flatnonzero(large).tolist():
        if _is_inexact(int(values[row])):
            raise InexactError(int(values[row]), row)
    return column.cast(pa.float64(), safe=False)


def inexact(value: object, where: str, column: str, remedy: str) -> SourceError:
    """The error for a number that would lose digits."""
    return SourceError(
        "a whole number would lose digits: its column has fractions, or numbers of other ranges",
        expected="int64, uint64, or what float64 holds exactly",
        found=value,
        where=f"{where}, column {column!r}",
        remedy=f"{remedy}; if its digits do not count, types={{{column!r}: 'float64'}}",
    )


def exact_json(
    table: Any,
    text: bytes,
    where: str,
    first_line: int,
    given: Mapping[str, Any],
    again: Callable[[Any], Any] | None,
    columns: Sequence[str] | None = None,
) -> Any:
    """A table of lines of JSON in which no whole number lost digits.

    Args:
        table: as Arrow read it.
        text: the lines.
        where: the file, for errors.
        first_line: number of the first line.
        given: types that the user gave, by column.
        again: reads the lines with another schema; None where the types are settled.
        columns: names of those in which no number may lose digits; None for all.

    Raises:
        SourceError: a number is too large to stand beside the others of its column.
    """
    floats = {
        path for field in table.schema if field.name not in given for path in _floats((field.name,), field.type)
    }
    if not floats:
        return table
    found: dict[Path, tuple[int, int]] = {}
    for path, each in _inexact_in(text, first_line):
        if path in floats:
            found.setdefault(path, each)
    if not found:
        return table
    # Each by itself: one that cannot be read must not stand in another's way.
    for path, (line, value) in found.items():
        schema = table.schema
        place = schema.get_field_index(path[0])
        schema = schema.set(place, schema.field(place).with_type(_with(schema.field(place).type, path[1:])))
        try:
            if again is not None:
                table = again(schema)
                continue
        except CorruptError:
            pass
        name = ".".join(each for each in path if each != _ITEM)
        if columns is None or name in columns:
            raise inexact(value, f"{where}, line {line}", name, "write its numbers in quotes, as text")
    return table


#: The step of a path from a list to what is in it.
_ITEM = "[]"


def _floats(path: Path, kind: Any) -> Iterator[Path]:
    import pyarrow as pa

    if pa.types.is_list(kind):
        yield from _floats((*path, _ITEM), kind.value_type)
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            yield from _floats((*path, kind.field(index).name), kind.field(index).type)
    elif kind == pa.float64():
        yield path


def _with(kind: Any, path: Path) -> Any:
    """A type with uint64 at the end of a path."""
    import pyarrow as pa

    if not path:
        return pa.uint64()
    if path[0] == _ITEM:
        return pa.list_(_with(kind.value_type, path[1:]))
    return pa.struct(
        [each.with_type(_with(each.type, path[1:])) if each.name == path[0] else each for each in kind]
    )


def _inexact_in(text: bytes, first_line: int) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Whole numbers that float64 cannot hold: where each lies, with its line."""
    end, line = 0, first_line
    while (found := _LONG.search(text, end)) is not None:
        start = text.rfind(b"\n", 0, found.start()) + 1
        line += text.count(b"\n", end, start)
        end = text.find(b"\n", start)
        end = len(text) if end < 0 else end
        for value in _values(text[start:end]):
            for path, number in _numbers((), value):
                if _is_inexact(number):
                    yield path, (line, number)


def _values(line: bytes) -> Iterator[Any]:
    """The objects in a line: Arrow takes several."""
    rest = line.decode().strip()
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            return  # which Arrow refused, or understands otherwise
        yield value
        rest = rest[end:].lstrip()


def _numbers(path: Path, value: Any) -> Iterator[tuple[Path, int]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _numbers((*path, name), each)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers((*path, _ITEM), each)
    elif type(value) is int:
        yield path, value


def _is_inexact(value: int) -> bool:
    try:
        return int(float(value)) != value
    except OverflowError:
        return True
