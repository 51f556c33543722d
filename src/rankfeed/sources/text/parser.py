"""Parsing text with pyarrow, which reads integers above int64, and those beside fractions, as rounded float64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankfeed._util.validate import invalid
from rankfeed.errors import ArgumentError, CorruptError, SourceError, listed, safe_repr
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.sources.arrow.types import UNNAMED

REMEDY = "correct or remove that line; if a type is wrong, pass types={'column': 'string'}"
#: Integers up to this are exact in float64.
_EXACT = 2**53


class Text(NamedTuple):
    """The text of a file, or a part of it that begins with a line; without a byte order mark."""

    content: bytes
    path: str
    first_line: int = 1


class TextParser(ABC):
    """A parser of CSV or JSON lines.

    Args:
        types: Arrow's names of the types of columns, for those whose types are not inferred.
    """

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
        missing = [name for name in self.types if name not in names]
        if missing:
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
        names: list[str] = table.schema.names
        return names

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
    def _rounded_integers(
        self, text: Text, field: Any, names: Sequence[str] | None
    ) -> Iterator[tuple[str, str, int | str]]:
        """Line, column and value of the integers that the Arrow type of a top-level column rounds."""


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
        return pa.struct(
            [field.with_type(_with_uint64(f"{name}.{field.name}", field.type, column)) for field in kind]
        )
    return pa.uint64() if name == column and kind == pa.float64() else kind
