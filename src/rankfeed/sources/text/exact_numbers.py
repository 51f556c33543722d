"""Detecting integers in text that float64 would round: Arrow infers float64 above int64, or beside a fraction."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rankfeed.errors import CorruptError, SourceError

#: Integers up to this are exact in float64.
_EXACT = 2**53
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")
#: An integer in JSON with at least as many digits as 2**53.
_LONG_INTEGER = re.compile(rb"(?<![0-9.])[0-9]{16,}(?![0-9.eE])")

#: Names of columns and struct fields, with _ITEM for the items of a list.
ColumnPath = tuple[str, ...]
_ITEM = "[]"


class InexactError(ValueError):
    """An integer that float64 would round, and its row."""

    def __init__(self, value: int, row: int) -> None:
        super().__init__(f"{value}, which float64 cannot hold")
        self.row = row


def has_large(column: Any) -> bool:
    """Whether a float64 column has values that may be rounded integers."""
    values = np.asarray(column)
    with np.errstate(invalid="ignore"):
        return bool((np.isfinite(values) & (np.abs(values) >= _EXACT)).any())


def first_inexact(texts: Any) -> int | None:
    """The first row of a text column with an integer that float64 would round; None if there is none."""
    import pyarrow.compute as pc

    is_long = pc.greater_equal(pc.binary_length(texts), 16).fill_null(False)
    for row in np.flatnonzero(np.asarray(is_long)).tolist():
        text = texts[row].as_py()
        if _INTEGER.fullmatch(text) and _is_inexact(int(text)):
            return int(row)
    return None


def to_float64(column: Any) -> Any:
    """A `pyarrow.ChunkedArray` as float64; an InexactError if an integer would be rounded."""
    import pyarrow as pa

    if not pa.types.is_integer(column.type):
        return column.cast(pa.float64())
    values = column.fill_null(0).to_numpy()
    large = (values >= _EXACT) | (values <= -_EXACT) if values.dtype.kind == "i" else values >= _EXACT
    for row in np.flatnonzero(large).tolist():
        if _is_inexact(int(values[row])):
            raise InexactError(int(values[row]), row)
    return column.cast(pa.float64(), safe=False)


def with_exact_integers(
    table: Any,
    found: Iterable[tuple[ColumnPath, str, object]],
    parse_again: Callable[[Any], Any] | None,
    columns: Sequence[str] | None,
    where: str,
    remedy: str,
) -> Any:
    """A table with columns of rounded integers parsed again as uint64; an error if one has other numbers too.

    ``found`` has path, line and value of an integer in each such column. ``parse_again`` parses the text with
    another schema; None if the types are fixed. Errors are about ``columns`` (None for all).
    """
    # One by one: a column that cannot be parsed must not affect others.
    for path, line, value in found:
        place = table.schema.get_field_index(path[0])
        field = table.schema.field(place)
        try:
            if parse_again is not None:
                table = parse_again(table.schema.set(place, field.with_type(_as_uint64(field.type, path[1:]))))
                continue
        except CorruptError:
            pass
        name = ".".join(each for each in path if each != _ITEM)
        if columns is None or name in columns:
            raise SourceError(
                "a whole number would lose digits: its column has fractions, or numbers of other ranges",
                expected="int64, uint64, or what float64 holds exactly",
                found=value,
                where=f"{where}, {line}, column {name!r}",
                remedy=f"{remedy}; if its digits do not count, types={{{name!r}: 'float64'}}",
            )
    return table


def inexact_in_json(
    table: Any, text: bytes, first_line: int, given: Collection[str]
) -> Iterator[tuple[ColumnPath, str, object]]:
    """Path, line and value of the first rounded integer of each column of lines of JSON."""
    fields = [field for field in table.schema if field.name not in given]
    floats = {path for field in fields for path in _float_paths((field.name,), field.type)}
    for path, line, value in _inexact_integers(text, first_line) if floats else ():
        if path in floats:
            floats.remove(path)
            yield path, f"line {line}", value


def _float_paths(path: ColumnPath, kind: Any) -> Iterator[ColumnPath]:
    import pyarrow as pa

    if pa.types.is_list(kind):
        yield from _float_paths((*path, _ITEM), kind.value_type)
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            yield from _float_paths((*path, kind.field(index).name), kind.field(index).type)
    elif kind == pa.float64():
        yield path


def _as_uint64(kind: Any, path: ColumnPath) -> Any:
    """A type with uint64 at the end of a path."""
    import pyarrow as pa

    if not path:
        return pa.uint64()
    if path[0] == _ITEM:
        return pa.list_(_as_uint64(kind.value_type, path[1:]))
    return pa.struct(
        [each.with_type(_as_uint64(each.type, path[1:])) if each.name == path[0] else each for each in kind]
    )


def _inexact_integers(text: bytes, first_line: int) -> Iterator[tuple[ColumnPath, int, int]]:
    """Path, line and value of integers that float64 cannot represent."""
    end, line = 0, first_line
    while (found := _LONG_INTEGER.search(text, end)) is not None:
        start = text.rfind(b"\n", 0, found.start()) + 1
        line += text.count(b"\n", end, start)
        end = text.find(b"\n", start)
        end = len(text) if end < 0 else end
        for value in _objects_in(text[start:end]):
            for path, number in _integers_in((), value):
                if _is_inexact(number):
                    yield path, line, number


def _objects_in(line: bytes) -> Iterator[Any]:
    """The objects in a line: Arrow accepts several."""
    rest = line.decode().strip()
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            return  # refused by Arrow, or parsed differently
        yield value
        rest = rest[end:].lstrip()


def _integers_in(path: ColumnPath, value: Any) -> Iterator[tuple[ColumnPath, int]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _integers_in((*path, name), each)
    elif isinstance(value, list):
        for each in value:
            yield from _integers_in((*path, _ITEM), each)
    elif type(value) is int:
        yield path, value


def _is_inexact(value: int) -> bool:
    try:
        return int(float(value)) != value
    except OverflowError:
        return True
