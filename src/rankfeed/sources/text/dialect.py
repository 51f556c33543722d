"""Reading the text of CSV files and files of JSON lines, and options for parsing it."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from typing import Any, BinaryIO

from rankfeed._util.validate import invalid
from rankfeed.errors import ArgumentError, SourceError, listed, safe_repr
from rankfeed.sources.paths import common_root
from rankfeed.sources.text.detect import Kind
from rankfeed.storage.file_errors import file_errors

#: Decompressed bytes that are read into memory; larger files must be packed.
LIMIT = 256 << 20
#: Bytes that are parsed at once in a stream. The first piece defines the types.
PIECE = 16 << 20
#: A byte order mark before UTF-8.
BOM = b"\xef\xbb\xbf"

REMEDY = "correct or remove that line; if a type is wrong, pass types={'column': 'string'}"


@dataclass(frozen=True)
class Dialect:
    """How text is parsed: the options of CsvSource and JsonlSource."""

    kind: Kind
    delimiter: str | None = None
    types: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        given: Any = self.delimiter
        is_one = isinstance(given, str) and len(given) == 1 and given.isascii() and given not in '"\r\n'
        if given is not None and not is_one:
            raise invalid("delimiter", "one character of ASCII", given)
        if self.types is not None and not isinstance(self.types, Mapping):
            raise invalid("types", 'Arrow types by column, such as {"label": "int32"}', self.types)
        self.arrow_types()

    def arrow_types(self) -> dict[str, Any]:
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
        if self.delimiter is not None:
            return self.delimiter
        return "\t" if path.removesuffix(".gz").endswith(".tsv") else ","

    def check_types(self, names: Sequence[str], where: str) -> None:
        """Refuse types of columns that do not exist; ``names`` are the columns of all files."""
        missing = [name for name in self.types or () if name not in names]
        if missing:
            raise ArgumentError(
                "types= names a column that does not exist",
                expected=listed(list(map(repr, names)), most=50),
                found=listed(list(map(repr, missing))),
                where=where,
                remedy="correct the name: upper and lower case differ",
            )


def read_texts(paths: Sequence[str]) -> list[bytes]:
    """The texts of files, decompressed if their names end with `.gz`."""
    texts, size = [], 0
    for path in paths:
        with open_text(path) as file:
            texts.append(file.read(LIMIT + 1 - size))
        size += len(texts[-1])
        if size > LIMIT:
            where = path if len(paths) == 1 else common_root(paths)
            raise SourceError(
                "the text is too large to be read in place",
                expected=f"up to {LIMIT >> 20} MiB, decompressed",
                where=where,
                remedy=f"`rankfeed write {where} packed/` reads it once, in a stream; then open packed/",
            )
    return texts


@contextmanager
def open_text(path: str) -> Iterator[BinaryIO]:
    """Open a file, decompressed if its name ends with `.gz`."""
    opener: Callable[..., Any] = GzipFile if path.endswith(".gz") else open
    with file_errors(path, EOFError, zlib.error), opener(path, "rb") as file:
        yield file
