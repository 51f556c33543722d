"""Detecting what PyTorch Geometric saved: a directory, its ``processed`` directory, or the file in it."""

import os
from pathlib import Path

from rankfeed.errors import SourceError
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, files_in, head

#: Written by PyG beside the graphs.
_SIDE_FILES = ("pre_transform.pt", "pre_filter.pt")
_ZIP = b"PK\x03\x04"


def is_pyg(where: Paths) -> bool:
    """Whether this is a directory or file that PyG wrote."""
    if not isinstance(where, (str, os.PathLike)):
        return False
    try:
        if os.path.isfile(where):
            return os.fspath(where).endswith(".pt") and head(where, 4) == _ZIP
        folder = _processed(where)
        return folder is not None and (bool(_saved_files(folder)) or (folder / "sqlite.db").is_file())
    except (OSError, SourceError, ValueError):
        return False


def saved_file(path: Path) -> str:
    """The file with the graphs, which must be the only one."""
    if path.is_file():
        return os.path.abspath(path)
    folder = _processed(path)
    files = _saved_files(folder) if folder is not None else []
    if len(files) == 1:
        return os.path.abspath(files[0])
    if not files:
        raise SourceError(
            "graphs in a database can be read only by their own class",
            where=path,
            remedy="create the OnDiskDataset yourself and pass it to rankfeed.from_dataset()",
        )
    raise SourceError(
        "the folder holds several files of graphs",
        expected="one",
        found=", ".join(map(os.path.basename, files[:8])),
        where=folder,
        remedy="open one of them by its own path",
    )


def _processed(where: str | os.PathLike[str]) -> Path | None:
    """The directory of processed files, if this is one or has one."""
    path = Path(where)
    for folder in (path / "processed", path):
        if folder.is_dir() and any((folder / name).is_file() for name in (*_SIDE_FILES, "data.pt", "sqlite.db")):
            return folder
    return None


def _saved_files(folder: Path) -> list[str]:
    names = [path for path in files_in(folder, [".pt"]) if os.path.basename(path) not in _SIDE_FILES]
    return [path for path in names if head(path, 4) == _ZIP] or names


FORMAT = Format(
    "pyg",
    "a dataset that PyTorch Geometric saved (processed/data.pt)",
    is_pyg,
    "rankfeed.sources.pyg.saved:open_pyg",
)
