"""Detecting CSV files and files of JSON lines, and listing them."""

import json
import os
import zlib
from typing import Literal

from rankfeed.errors import RankfeedError, SourceError
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, expand, files_in, head, matched

Kind = Literal["csv", "jsonl"]

_SUFFIXES: dict[Kind, tuple[str, ...]] = {"csv": (".csv", ".tsv"), "jsonl": (".jsonl", ".ndjson", ".json")}
_PROBED_BYTES = 1 << 16


def kind_of(where: Paths) -> Kind | None:
    """The kind of these files, by their names and first bytes; None for another format."""
    paths = matched(where)
    for kind in _SUFFIXES:
        try:
            found = list_files(where, kind) if paths else []
        except RankfeedError:  # a directory with files of another kind
            continue
        if found and all(_is_kind(path, kind) for path in (found[0], found[-1])):
            return kind
    return None


def list_files(where: Paths, kind: Kind) -> list[str]:
    """The files; a directory may only contain files of this kind."""
    suffixes = tuple(suffix + end for suffix in _SUFFIXES[kind] for end in ("", ".gz"))
    found: list[str] = []
    for path in expand(where):
        if not os.path.isdir(path):
            found.append(path)
            continue
        inside = files_in(path, suffixes)
        if len(inside) != len(files_in(path, ("",))) or not inside:
            raise SourceError(
                f"the folder holds other files than {kind}", expected=", ".join(suffixes), where=path
            )
        found += inside
    return found


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


CSV_FORMAT = Format(
    "csv", "CSV files", lambda where: kind_of(where) == "csv", "rankfeed.sources.text.source:CsvSource"
)
JSONL_FORMAT = Format(
    "jsonl",
    "files with a JSON object in each line",
    lambda where: kind_of(where) == "jsonl",
    "rankfeed.sources.text.source:JsonlSource",
)
