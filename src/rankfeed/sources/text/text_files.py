"""CSV files and files of JSON lines: detecting, listing and reading them."""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from gzip import GzipFile
from typing import Any, BinaryIO, Literal

from rankfeed.errors import SourceError
from rankfeed.sources.paths import Paths, common_root, expand, files_at, files_in, head
from rankfeed.storage.file_errors import file_errors

Kind = Literal["csv", "jsonl"]

#: Decompressed bytes that are read into memory; larger files must be packed.
LIMIT = 256 << 20
#: A byte order mark before UTF-8.
BOM = b"\xef\xbb\xbf"
_SUFFIXES: dict[Kind, tuple[str, ...]] = {"csv": (".csv", ".tsv"), "jsonl": (".jsonl", ".ndjson", ".json")}
_PROBED_BYTES = 1 << 16


def is_csv(paths: list[str]) -> bool:
    """Whether these are CSV files, by their names and first bytes."""
    return kind_of(paths) == "csv"


def is_jsonl(paths: list[str]) -> bool:
    """Whether these are files of JSON lines, by their names and first bytes."""
    return kind_of(paths) == "jsonl"


def kind_of(where: Paths) -> Kind | None:
    """The kind of these files; None for another format."""
    for kind in _SUFFIXES:
        with suppress(SourceError):  # a directory with files of another kind
            paths = list_files(where, kind)
            if paths and all(_is_kind(path, kind) for path in (paths[0], paths[-1])):
                return kind
    return None


def list_files(where: Paths, kind: Kind) -> list[str]:
    """The files; a directory may only contain files of this kind."""
    suffixes = tuple(suffix + end for suffix in _SUFFIXES[kind] for end in ("", ".gz"))
    for path in expand(where):
        if os.path.isdir(path) and len(files_in(path, suffixes)) != len(files_in(path, ("",))):
            raise SourceError(
                f"the folder holds other files than {kind}", expected=", ".join(suffixes), where=path
            )
    return files_at(where, suffixes)


def _is_kind(path: str, kind: Kind) -> bool:
    name = path.removesuffix(".gz")
    if not name.endswith(_SUFFIXES[kind]):
        return False
    start = head(path, _PROBED_BYTES)
    if path.endswith(".gz"):
        try:
            start = zlib.decompressobj(31).decompress(start, _PROBED_BYTES)
        except zlib.error:
            return False
    start = start.removeprefix(BOM)
    if b"\0" in start or not start.strip():
        return False
    if kind == "csv":
        return True
    lines = [line for line in start.split(b"\n") if line.strip()]
    if not lines[0].lstrip().startswith(b"{"):
        return False
    complete = lines if len(start) < _PROBED_BYTES else lines[:-1]
    if name.endswith(".json"):  # usually one document; JSON lines have an object in each line
        try:
            return len(complete) >= 2 and all(isinstance(json.loads(line), dict) for line in complete[:2])
        except (ValueError, RecursionError):
            return False
    return not complete or b"wids-shard-index" not in complete[0]


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
        if not texts[-1].strip():
            raise SourceError("the file is empty", where=path)
    return texts


@contextmanager
def open_text(path: str) -> Iterator[BinaryIO]:
    """Open a file, decompressed if its name ends with `.gz`."""
    opener: Callable[..., Any] = GzipFile if path.endswith(".gz") else open
    with file_errors(path, EOFError, zlib.error), opener(path, "rb") as file:
        yield file
