"""Finding out what lies at a path, and opening it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.numpy_files import is_numpy, open_numpy
from rankfeed.sources.packed import PackedSource
from rankfeed.sources.source import Source
from rankfeed.storage import MANIFEST_NAME

#: Where a pack keeps what is not finished.
STAGING_NAME = ".rankfeed-pack"

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def _is_packed(where: Paths) -> bool:
    return isinstance(where, (str, os.PathLike)) and Path(where, MANIFEST_NAME).is_file()


def _open_packed(where: Any, columns: Sequence[str] | None, _allow_pickle: bool) -> Source:
    return PackedSource(os.fspath(where), columns=columns)


#: Format -> (whether this is one, how it is opened), in the order they are tried. A new format is a row here.
FORMATS: dict[str, tuple[Callable[[Any], bool], Callable[[Any, Sequence[str] | None, bool], Source]]] = {
    "packed": (_is_packed, _open_packed),
    "numpy": (is_numpy, open_numpy),
}


def open(
    uri: Paths,
    *,
    columns: Sequence[str] | None = None,
    format: str | None = None,
    storage_options: dict[str, Any] | None = None,
    allow_pickle: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Source:
    """Open a data set; its format is found by looking.

    Args:
        uri: a folder that `pack` wrote; a `.npy` or `.npz` file; a folder, glob pattern or list of these.
        columns: names of those to offer; None for all.
        format: "packed" or "numpy", to open as that and nothing else.
        storage_options: for object stores, which are not read yet.
        allow_pickle: whether object arrays may be read. Reading them runs code that they contain.
        cache_dir: for object stores, which are not read yet.

    Raises:
        SourceError: nothing is there, it is empty, or no format that is known.
        CorruptError: it is damaged.
        UnsafeError: reading it could run code.
        ArgumentError: no such column or format.

    Examples:
        >>> import tempfile, numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.save(folder / "rows.npy", np.arange(6).reshape(3, 2))
        >>> open(folder / "rows.npy")[2]["array"]
        array([4, 5])
    """
    uri = _checked(uri)
    for each in [uri] if isinstance(uri, (str, os.PathLike)) else uri:
        if "://" in os.fspath(each):
            raise SourceError(
                "object stores are not read yet", found=each, remedy="copy the data to a file system first"
            )
    if storage_options is not None or cache_dir is not None:
        raise ArgumentError(
            "object stores are not read yet: nothing can be cached or configured",
            remedy="leave storage_options and cache_dir out",
        )
    if format is not None and format not in FORMATS:
        raise ArgumentError("no such format", expected=" or ".join(FORMATS), found=format)
    for name, (fits, opened) in FORMATS.items():
        if format in (None, name) and fits(uri):
            return opened(uri, columns, allow_pickle)
    raise _nothing(uri, format)


def _checked(uri: Any) -> Paths:
    """Paths as they were meant."""
    paths = [uri] if isinstance(uri, (str, os.PathLike)) else uri
    if not isinstance(paths, (list, tuple)) or not all(isinstance(each, (str, os.PathLike)) for each in paths):
        raise ArgumentError("this is no path", expected="a path, or a list of paths", found=repr(uri))
    texts = [os.fspath(each) for each in paths]
    for text in texts:
        if not text or "\0" in text or any(len(part) > 255 for part in text.split("/")):
            raise SourceError("no such file or folder", where=repr(text[:80]))
    return texts[0] if paths is not uri else texts


def _nothing(uri: Paths, format: str | None) -> SourceError:
    """Why there is nothing to open."""
    expected = f"{'a folder that rankfeed packed, or .npy or .npz files' if format is None else format}"
    if not isinstance(uri, (str, os.PathLike)):
        return SourceError("these are no files of one known format", expected=expected, found=str(list(uri)[:4]))
    path = Path(uri)
    if Path(path, STAGING_NAME).is_dir():
        return SourceError(
            "packing into this folder was not finished",
            where=path,
            remedy="call rankfeed.pack again with the same input: it goes on where it stopped",
        )
    if any(sign in os.fspath(uri) for sign in "*?[") and not path.exists():
        return SourceError("no file fits the pattern", expected=expected, found=os.fspath(uri))
    if not path.exists():
        return SourceError("no such file or folder", where=path)
    if path.is_dir():
        names = sorted(os.listdir(path))[:4]
        summary = "the folder holds no data that rankfeed reads" if names else "the folder is empty"
        return SourceError(summary, expected=expected, found=", ".join(names) or None, where=path)
    return SourceError("unknown format", expected=expected, found=path.suffix or "no suffix", where=path)
