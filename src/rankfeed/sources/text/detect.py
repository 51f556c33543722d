"""Which files are CSV, and which are lines of JSON."""

from __future__ import annotations

import json
import os
import zlib
from typing import Literal

from rankfeed.errors import RankfeedError, SourceError
from rankfeed.sources.paths import Paths, expand, files_in, head, matched

Kind = Literal["csv", "jsonl"]

_SUFFIXES: dict[Kind, tuple[str, ...]] = {"csv": (".csv", ".tsv"), "jsonl": (".jsonl", ".ndjson", ".json")}

#: Bytes at a file's start that are looked at to see what it is.
_LOOKED_AT = 1 << 16


def kind_of(where: Paths) -> Kind | None:
    """Which of both these files are, by their names and how they begin; None for neither."""
    paths = matched(where)
    for kind in _SUFFIXES:
        try:
            found = files_of(where, kind) if paths else []
        except RankfeedError:  # a folder with files of another kind
            continue
        if found and all(_looks_like(path, kind) for path in (found[0], found[-1])):
            return kind
    return None


def files_of(where: Paths, kind: Kind) -> list[str]:
    """The files that are meant; of a folder, all that are in it.

    Raises:
        SourceError: nothing is there, or a folder holds other files too.
    """
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


def _looks_like(path: str, kind: Kind) -> bool:
    name = path.removesuffix(".gz")
    if not name.endswith(_SUFFIXES[kind]):
        return False
    start = head(path, _LOOKED_AT)
    if path.endswith(".gz"):
        try:
            start = zlib.decompressobj(31).decompress(start, _LOOKED_AT)
        except zlib.error:
            return False
    if b"\0" in start or not start.strip():
        return False
    if kind == "csv":
        return True
    start = start.removeprefix(b"\xef\xbb\xbf")
    lines = [line for line in start.split(b"\n") if line.strip()]
    if not lines[0].lstrip().startswith(b"{"):
        return False
    # A file called .json is mostly one document: lines of JSON have whole objects in at least two.
    whole = lines if len(start) < _LOOKED_AT else lines[:-1]
    if name.endswith(".json"):
        return len(whole) >= 2 and all(_is_object(line) for line in whole[:2])
    return not whole or b"wids-shard-index" not in whole[0]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
