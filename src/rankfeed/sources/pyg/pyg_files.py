"""Detecting what PyTorch Geometric saved: a directory, its ``processed`` directory, or the file in it."""

import os
from pathlib import Path

from rankfeed.errors import SourceError
from rankfeed.sources.paths import files_in, head

#: Written by PyG beside the graphs.
_SIDE_FILES = ("pre_transform.pt", "pre_filter.pt")
_ZIP = b"PK\x03\x04"


def is_pyg(paths: list[str]) -> bool:
    """Whether this is a directory or file that PyG wrote."""
    path = Path(paths[0])
    if path.is_file():
        return path.suffix == ".pt" and head(path, 4) == _ZIP
    folder = _processed(path)
    return folder is not None and (bool(_saved_files(folder)) or (folder / "sqlite.db").is_file())


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


def _processed(path: Path) -> Path | None:
    """The directory of processed files, if this is one or has one."""
    for folder in (path / "processed", path):
        if folder.is_dir() and any((folder / name).is_file() for name in (*_SIDE_FILES, "data.pt", "sqlite.db")):
            return folder
    return None


def _saved_files(folder: Path) -> list[str]:
    names = [path for path in files_in(folder, [".pt"]) if os.path.basename(path) not in _SIDE_FILES]
    return [path for path in names if head(path, 4) == _ZIP] or names
