"""Detecting the format of data, and opening them."""

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

#: Directory of an unfinished `rankfeed.write` in its target.
STAGING_NAME = ".rankfeed-write"

#: Name of each format -> module and name of its `Format`, in the order of detection; the reader is not imported.
FORMATS: dict[str, tuple[str, str]] = {
    "packed": ("rankfeed.sources.arrow.detect", "PACKED_FORMAT"),
    "numpy": ("rankfeed.sources.npy.detect", "FORMAT"),
    "lance": ("rankfeed.sources.lance.detect", "FORMAT"),
    "webdataset": ("rankfeed.sources.tar.detect", "FORMAT"),
    "parquet": ("rankfeed.sources.parquet.detect", "FORMAT"),
    "huggingface": ("rankfeed.sources.hf.detect", "FORMAT"),
    "arrow": ("rankfeed.sources.arrow.detect", "FORMAT"),
    "mds": ("rankfeed.sources.mds.detect", "FORMAT"),
    "pyg": ("rankfeed.sources.pyg.detect", "FORMAT"),
    "csv": ("rankfeed.sources.text.detect", "CSV_FORMAT"),
    "jsonl": ("rankfeed.sources.text.detect", "JSONL_FORMAT"),
}


def formats(name: str | None = None) -> list[Format]:
    """All formats, or the one of a name; an ArgumentError if there is none of that name."""
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
    """Open a dataset; its format is detected from its content.

    Args:
        uri: a file, a folder, a glob (``*.tar``) or brace pattern (``{000..099}``), or a list of these.
        columns: names of the columns to offer; None for all.
        format: the name of a format, to skip the detection.
        storage_options: reserved for object stores, which are not supported yet: must be None.
        allow_pickle: whether pickled objects may be read. Reading them runs code that they contain.
        cache_dir: directory for indexes if the data directory is read-only.
        options: of the format: ``filter`` and ``version`` for Lance, ``nulls`` for Parquet, and so on.

    Raises:
        SourceError: there are no data, or no data in a known format.
        CorruptError: the data are damaged.
        UnsafeError: reading the data could run code.
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
    for name in FORMATS if format is None else [format]:
        (found,) = formats(name)
        if found.fits(uri):
            return found.open(uri, columns, common, options)
    raise _not_found(uri, format)


def _refuse_unfinished(uri: Paths) -> None:
    """Refuse the target of an unfinished write: without a manifest, its shards may be a part of the data."""
    # Checked for all formats: the shards of an unfinished write are valid Arrow files.
    for folder in dict.fromkeys(path if os.path.isdir(path) else os.path.dirname(path) for path in matched(uri)):
        # In this order: the manifest is written before the staging directory is removed.
        if os.path.isdir(os.path.join(folder, STAGING_NAME)) and not os.path.exists(
            os.path.join(folder, MANIFEST_NAME)
        ):
            raise SourceError(
                "writing into this folder was not finished",
                where=folder or os.curdir,
                remedy="wait for it, or call rankfeed.write again with the same input to resume it",
            )


def _not_found(uri: Paths, format: str | None) -> SourceError:
    """The reason why no format fits."""
    expected = ", ".join(each.what for each in formats(format))
    try:
        expand(uri)
    except SourceError as error:
        return error  # names the file or pattern
    if not isinstance(uri, (str, os.PathLike)):
        found = str(list(uri)[:4])
        return SourceError("the files are not all of one known format", expected=expected, found=found)
    path = Path(uri)
    if not path.is_dir():
        return SourceError("unknown format", expected=expected, found=path.suffix or "no suffix", where=path)
    names = sorted(os.listdir(path))
    for name in names:
        check_link(os.path.join(path, name))
    summary = "the folder holds no data that rankfeed reads" if names else "the folder is empty"
    return SourceError(summary, expected=expected, found=", ".join(names[:4]) or None, where=path)
