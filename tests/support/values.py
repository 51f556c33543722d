"""Samples and files as Python's own values, to be compared with literals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rankfeed as rf


def plain(value: Any) -> Any:
    """A value with arrays and tensors as numbers and lists."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if not hasattr(value, "tolist"):
        return value
    listed = value.tolist()
    return plain(listed) if isinstance(listed, list) else listed


def samples_of(source: rf.Source, ids: Any = None, columns: Any = None) -> list[Any]:
    """Samples as plain values: all of them, or those of these ids."""
    return [
        plain(sample) for sample in source.fetch(range(len(source)) if ids is None else ids, columns).samples()
    ]


def column_of(source: rf.Source, name: str) -> list[Any]:
    """All values of a column."""
    return [plain(value) for value in source.fetch(range(len(source)), [name])[name].rows()]


def contents(folder: Path) -> dict[str, bytes | None]:
    """What a folder holds: the bytes of each file by its relative path, and None for a directory."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}
