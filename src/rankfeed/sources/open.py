"""Finding out what lies at a path, and opening it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rankfeed._util.validate import check_bool, check_choice, check_names, check_path
from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, as_paths, check_link, expand, matched
from rankfeed.sources.source import Source
from rankfeed.storage import MANIFEST_NAME

#: Where a pack keeps what is not finished.
STAGING_NAME = ".rankfeed-write"

#: Format -> where its `Format` is, in the order they are tried. A new format is a row here.
FORMATS: dict[str, tuple[str, str]] = {
    "packed": ("rankfeed.sources.packed", "FORMAT"),
    "numpy": ("rankfeed.sources.numpy_layout", "FORMAT"),
    "lance": ("rankfeed.sources.lance", "FORMAT"),
    "webdataset": ("rankfeed.sources.webdataset", "FORMAT"),
    "parquet": ("rankfeed.sources.parquet", "FORMAT"),
    "huggingface": ("rankfeed.sources.huggingface", "FORMAT"),
    "arrow": ("rankfeed.sources.arrow_files", "FORMAT"),
    "mds": ("rankfeed.sources.mds", "FORMAT"),
    "pyg": ("rankfeed.sources.pyg_folder", "FORMAT"),
    "csv": ("rankfeed.sources.delimited", "CSV_FORMAT"),
    "jsonl": ("rankfeed.sources.delimited", "JSONL_FORMAT"),
}


def formats(name: str | None = None) -> list[Format]:
    """All formats, or the one of a name.

    Raises:
        ArgumentError: there is none of that name.
    """
    if name is not None:
        check_choice("format", name, tuple(FORMATS))
    return [
        getattr(import_module(module), found) for each, (module, found) in FORMATS.items() if name in (None, each)
    ]


def open(
    uri: Paths,
    *,
    columns: Sequence[str] | None = None,
    format: str | None = None,
    storage_options: dict[str, Any] | None = None,
    allow_pickle: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Source:
    """Open a data set; its format is found by looking.

    Args:
        uri: a file, a folder, a glob (``*.tar``) or brace pattern (``{000..099}``), or a list of these.
        columns: names of those to offer; None for all.
        format: its name, to open as that and nothing else.
        storage_options: reserved for object stores, which are not supported yet: must be None.
        allow_pickle: whether pickled objects may be read. Reading them runs code that they contain.
        cache_dir: where an index goes that cannot lie beside the data.
        options: of the format: ``filter`` and ``version`` for Lance, ``nulls`` for Parquet, and so on.

    Raises:
        SourceError: nothing is there, it is empty, or no format that is known.
        CorruptError: it is damaged.
        UnsafeError: reading it could run code.
        ArgumentError: no such column, format or option.
        MissingExtraError: the format needs a library that is not installed.

    Examples:
        >>> import tempfile, numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.save(folder / "rows.npy", np.arange(6).reshape(3, 2))
        >>> open(folder / "rows.npy")[2]["array"]
        array([4, 5])
    """
    allow_pickle = check_bool("allow_pickle", allow_pickle)
    columns = None if columns is None else check_names("columns", columns)
    if cache_dir is not None:
        cache_dir = check_path("cache_dir", cache_dir)
    uri = as_paths(uri)
    for each in [uri] if isinstance(uri, (str, os.PathLike)) else uri:
        if "://" in os.fspath(each):
            raise SourceError(
                "object stores and URLs are not supported yet",
                expected="a path",
                found=each,
                remedy="copy the data to a file system first, on one process with rankfeed.prepare_once",
            )
    if storage_options is not None:
        raise ArgumentError(
            "object stores are not supported yet: storage_options must be None", remedy="leave storage_options out"
        )
    _refuse_unfinished(uri)
    common = {"allow_pickle": allow_pickle, "cache_dir": cache_dir}
    for found in formats(format):
        if found.fits(uri):
            return found.open(uri, columns, common, options)
    raise _nothing(uri, format)


def _refuse_unfinished(uri: Paths) -> None:
    """A pack moves its shards to their names one by one: without a manifest those that are there may be a part.

    Raises:
        SourceError: a pack into one of the folders meant was not finished, or is being finished now.
    """
    # Not of each format's own: the shards of half a pack are good Arrow files.
    for folder in dict.fromkeys(path if os.path.isdir(path) else os.path.dirname(path) for path in matched(uri)):
        # In this order: whoever finishes writes the manifest before the other goes.
        if os.path.isdir(os.path.join(folder, STAGING_NAME)) and not os.path.exists(
            os.path.join(folder, MANIFEST_NAME)
        ):
            raise SourceError(
                "packing into this folder was not finished",
                where=folder or os.curdir,
                remedy="wait for it, or call rankfeed.pack again with the same input: it goes on where it stopped",
            )


def _nothing(uri: Paths, format: str | None) -> SourceError:
    """Why there is nothing to open."""
    expected = ", ".join(each.what for each in formats(format))
    try:
        expand(uri)
    except SourceError as error:
        return error  # it names the file or pattern
    if not isinstance(uri, (str, os.PathLike)):
        return SourceError("these are no files of one known format", expected=expected, found=str(list(uri)[:4]))
    path = Path(uri)
    if path.is_dir():
        names = sorted(os.listdir(path))
        for name in names:
            check_link(os.path.join(path, name))
        names = names[:4]
        summary = "the folder holds no data that rankfeed reads" if names else "the folder is empty"
        return SourceError(summary, expected=expected, found=", ".join(names) or None, where=path)
    return SourceError("unknown format", expected=expected, found=path.suffix or "no suffix", where=path)
