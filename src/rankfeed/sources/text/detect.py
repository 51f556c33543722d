"""Detecting CSV files and files of JSON lines, and listing them."""

import json
import os
import zlib
from contextlib import suppress
from typing import Literal

from rankfeed.errors import SourceError
from rankfeed.sources.paths import Paths, expand, files_at, files_in, head

Kind = Literal["csv", "jsonl"]

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
            found = list_files(where, kind)
            if found and all(_is_kind(path, kind) for path in (found[0], found[-1])):
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
    start = start.removeprefix(b"\xef\xbb\xbf")
    if b"\0" in start or not start.strip():
        return False
    if kind == "csv":
        return True
    lines = [line for line in start.split(b"\n") if line.strip()]
    if not lines[0].lstrip().startswith(b"{"):
        return False
    complete = lines if len(start) < _PROBED_BYTES else lines[:-1]
    if name.endswith(".json"):  # usually one document; JSON lines have an object in each line
        return len(complete) >= 2 and all(_is_object(line) for line in complete[:2])
    return not complete or b"wids-shard-index" not in complete[0]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
