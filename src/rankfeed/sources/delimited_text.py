"""CSV and lines of JSON as Arrow tables: read whole where they are small, else in a stream."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from io import BytesIO
from typing import Any, BinaryIO, Literal

from rankfeed._util.validate import invalid
from rankfeed.errors import ArgumentError, CorruptError, SourceError, safe_repr
from rankfeed.sources.arrow_errors import arrow_errors
from rankfeed.sources.json_lines import check_lines

#: Text that is read into memory, after decompression; larger files are packed first.
LIMIT = 256 << 20
#: Text parsed at once in a stream. Types are what the first piece of this size says.
PIECE = 16 << 20

_ROW = re.compile(r"in row (\d+)")
_MEND = "mend or remove that line; where a type was taken wrongly, give it: types={'column': 'string'}"


@dataclass(frozen=True)
class Dialect:
    """How text is read.

    Args:
        kind: "csv" or "jsonl".
        delimiter: between the values of a line of CSV; None for what the file's name says: a tab for `.tsv`.
        types: Arrow's names of columns' types ("float32", "string"), instead of what the values look like.
    """

    kind: Literal["csv", "jsonl"]
    delimiter: str | None = None
    types: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        given: Any = self.delimiter
        one = isinstance(given, str) and len(given) == 1 and given.isascii() and given not in '"\r\n'
        if given is not None and not one:
            raise invalid("delimiter", "one character of ASCII", given)
        if self.types is not None and not isinstance(self.types, Mapping):
            raise invalid("types", 'Arrow types by column, such as {"label": "int32"}', self.types)
        self.arrow_types()

    def arrow_types(self) -> dict[str, Any]:
        """The types as pyarrow has them.

        Raises:
            ArgumentError: no such type.
        """
        import pyarrow as pa

        found = {}
        for name, alias in (self.types or {}).items():
            try:
                found[name] = pa.type_for_alias(alias)
            except Exception as error:
                raise ArgumentError(
                    "Arrow has no such type",
                    expected='a name such as "int64", "float32", "string", "timestamp[s]"',
                    found=safe_repr({name: alias}),
                ) from error
        return found

    def delimiter_of(self, path: str) -> str:
        """What stands between the values of a file."""
        if self.delimiter is not None:
            return self.delimiter
        return "\t" if path.removesuffix(".gz").endswith(".tsv") else ","


def read_text(path: str) -> bytes:
    """A file's text, decompressed where its name ends with `.gz`.

    Raises:
        SourceError: it cannot be read, or is larger than is read into memory.
        CorruptError: its compression is damaged.
    """
    with _opened(path) as file:
        text = file.read(LIMIT + 1)
    if len(text) > LIMIT:
        raise too_large(path)
    return text


def too_large(where: str) -> SourceError:
    """The error for text that is not read into memory."""
    return SourceError(
        "the text is too large to be read in place",
        expected=f"up to {LIMIT >> 20} MiB, decompressed",
        where=where,
        remedy=f"`rankfeed pack {where} packed/` reads it once, in a stream; then open packed/",
    )


def parse(text: bytes, path: str, dialect: Dialect) -> Any:
    """The rows of a text as a `pyarrow.Table`.

    Raises:
        SourceError: it is nested too deeply.
        CorruptError: it cannot be parsed; names the line.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.json

    if dialect.kind == "csv":
        read, parse_options, convert = _csv_options(path, dialect)
        with arrow_errors(path, _MEND):
            return _named(pa.csv.read_csv(BytesIO(text), read, parse_options, convert), path)
    check_lines(text, path)
    types = dialect.arrow_types()
    return _parse_json(text, path, 1, pa.schema(types) if types else None, "infer")


def stream(path: str, dialect: Dialect) -> Iterator[Any]:
    """The rows of a text of any size, as `pyarrow.Table` or `pyarrow.RecordBatch` after another, of one schema.

    Raises:
        SourceError, CorruptError: as with :func:`parse`, also where a value is not of its column's type in the
            first piece.
    """
    import pyarrow as pa
    import pyarrow.csv

    with _opened(path) as file:
        if dialect.kind == "csv":
            read, parse_options, convert = _csv_options(path, dialect)
            read.block_size = PIECE
            with arrow_errors(path, _MEND):
                reader = pa.csv.open_csv(pa.PythonFile(file, "r"), read, parse_options, convert)
                yield from _named(reader, path)
            return
        types = dialect.arrow_types()
        schema, line = pa.schema(types) if types else None, 1
        for piece in _pieces(file, path):
            first, line = line, check_lines(piece, path, line)
            table = _parse_json(piece, path, first, schema, "infer" if first == 1 else "error")
            schema = table.schema
            yield table


def _named(table: Any, path: str) -> Any:
    """A table or reader of CSV, if its columns' names are text: that, Arrow leaves to whoever asks for them."""
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


def _csv_options(path: str, dialect: Dialect) -> tuple[Any, Any, Any]:
    import pyarrow.csv as csv

    # One thread: the other way errors don't say in which line they are.
    read = csv.ReadOptions(use_threads=False)
    parse_options = csv.ParseOptions(delimiter=dialect.delimiter_of(path), newlines_in_values=True)
    return read, parse_options, csv.ConvertOptions(column_types=dialect.arrow_types())


def _parse_json(text: bytes, path: str, first_line: int, schema: Any, unexpected: str) -> Any:
    import pyarrow as pa
    import pyarrow.json as json

    # In one piece, so that a type is what all of its values ask for, and rows count from the first.
    read = json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
    try:
        return json.read_json(pa.BufferReader(text), read, options)
    except (pa.ArrowException, ValueError, OSError) as error:
        message = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        row = _ROW.search(message)
        place = path if row is None else f"{path}, line {_line_of_row(text, int(row[1])) + first_line}"
        raise CorruptError("the text cannot be parsed", found=message, where=place, remedy=_MEND) from error


def _line_of_row(text: bytes, row: int) -> int:
    """The line, counted from 0, of a row: empty lines are no rows."""
    full = (number for number, line in enumerate(text.split(b"\n")) if line.strip())
    return next((number for index, number in enumerate(full) if index == row), row)


def _pieces(file: BinaryIO, path: str) -> Iterator[bytes]:
    """Text cut where lines end."""
    rest = b""
    while piece := file.read(PIECE):
        end = piece.rfind(b"\n") + 1
        if not end:
            rest += piece
            if len(rest) > LIMIT:
                raise CorruptError("a line is longer than could be meant", found=f"{len(rest)} bytes", where=path)
            continue
        if (rest + piece[:end]).strip():
            yield rest + piece[:end]
        rest = piece[end:]
    if rest.strip():
        yield rest


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """A file's text as it is read, decompressed where its name ends with `.gz`."""
    opened: Callable[..., Any] = GzipFile if path.endswith(".gz") else open
    try:
        with opened(path, "rb") as file:
            yield file
    except (EOFError, zlib.error) as error:
        raise CorruptError(
            "the file's compression is damaged", found=error, where=path, remedy="fetch the file anew"
        ) from error
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        kind = CorruptError if error.errno is None else SourceError  # gzip's own have no number
        raise kind("the file cannot be read", found=error, where=path, remedy="fetch the file anew") from error


def text_size(path: str) -> int:
    """Bytes of a file as it lies.

    Raises:
        SourceError: it is not there.
    """
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise SourceError("the file cannot be read", found=error.strerror, where=path) from error
