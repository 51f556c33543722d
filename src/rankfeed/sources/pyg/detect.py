"""Recognising what PyTorch Geometric saved: a data set's folder, its ``processed`` folder, or the file in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, files_in, head, is_one
from rankfeed.sources.source import Source

#: What PyG writes beside the graphs.
_OF_PYG = ("pre_transform.pt", "pre_filter.pt")
_ZIP = b"PK\x03\x04"


def _processed(where: str | os.PathLike[str]) -> Path | None:
    """The folder of processed files, if this is one or holds one."""
    path = Path(where)
    for folder in (path / "processed", path):
        if folder.is_dir() and any((folder / name).is_file() for name in (*_OF_PYG, "data.pt", "sqlite.db")):
            return folder
    return None


def _saved(folder: Path) -> list[str]:
    names = [path for path in files_in(folder, [".pt"]) if os.path.basename(path) not in _OF_PYG]
    return [path for path in names if head(path, 4) == _ZIP] or names


def is_pyg(where: Paths) -> bool:
    """Whether this is a folder or file that PyG wrote."""
    if not isinstance(where, (str, os.PathLike)):
        return False
    try:
        if os.path.isfile(where):
            return os.fspath(where).endswith(".pt") and head(where, 4) == _ZIP
        folder = _processed(where)
        return folder is not None and (bool(_saved(folder)) or (folder / "sqlite.db").is_file())
    except (OSError, SourceError, ValueError):
        return False


def open_pyg(
    where: Paths,
    *,
    columns: Sequence[str] | None = None,
    allow_pickle: bool = False,
    follow_batch: Sequence[str] | None = None,
    exclude_keys: Sequence[str] | None = None,
) -> Source:
    """Graphs that an ``InMemoryDataset`` saved, memory-mapped.

    Args:
        where: its folder, or its ``processed`` folder, or a file in it (``data.pt``).
        columns: None: graphs are read whole.
        allow_pickle: whether the file may name classes and functions that torch does not know to be harmless.
        follow_batch: attributes for which a batch gets ``<name>_batch`` and ``<name>_ptr``.
        exclude_keys: attributes that batches leave out.

    Raises:
        SourceError: it holds no graphs, or several files of them.
        UnsafeError: reading it would run code.
        CorruptError: it is damaged.
    """
    if not is_one(where):
        raise ArgumentError(
            "graphs are opened from one path", found=repr(where)[:80], remedy="rf.concat joins them"
        )
    if columns is not None:
        remedy = "leave columns out; exclude_keys= leaves attributes out of the batches"
        raise ArgumentError("graphs are read whole", found=columns, remedy=remedy)
    from rankfeed.sources.pyg.saved import PyGFileSource

    path = _file(Path(where))  # type: ignore[arg-type]
    return PyGFileSource(path, allow_pickle=allow_pickle, follow_batch=follow_batch, exclude_keys=exclude_keys)


def _file(path: Path) -> str:
    if path.is_file():
        return os.path.abspath(path)
    folder = _processed(path)
    files = _saved(folder) if folder is not None else []
    if len(files) == 1:
        return os.path.abspath(files[0])
    if not files:
        raise SourceError(
            "graphs in a database can be read only by their own class",
            where=path,
            remedy="make the OnDiskDataset yourself and hand it to rankfeed.from_dataset()",
        )
    raise SourceError(
        "the folder holds several files of graphs",
        expected="one",
        found=", ".join(map(os.path.basename, files[:8])),
        where=folder,
        remedy="open one of them by its own path",
    )


FORMAT = Format("pyg", "a data set that PyTorch Geometric saved (processed/data.pt)", is_pyg, open_pyg)
