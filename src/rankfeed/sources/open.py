"""Opens data of any format."""

import inspect
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rankfeed._util.validate import check_bool, check_columns_option, check_path
from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.formats import FORMATS, Format, check_format, detect_format, fitting_format
from rankfeed.sources.paths import Paths, as_paths, expand
from rankfeed.sources.source import Source
from rankfeed.sources.unknown_format import data_folders, unknown_format_error
from rankfeed.storage.manifest import MANIFEST_NAME

#: Directory of an unfinished `rankfeed.write` in its target.
STAGING_NAME = ".rankfeed-write"


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
        uri: a file, a folder, a glob (``*.tar``) or brace pattern (``{000..099}``), or a list of these. A path
            that exists is no pattern; a folder with brackets in its name is escaped by ``glob.escape`` in one.
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
        >>> import pathlib, tempfile, numpy as np
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> np.save(folder / "rows.npy", np.arange(6).reshape(3, 2))
        >>> open(folder / "rows.npy")[2]["array"]
        array([4, 5])
    """
    allow_pickle = check_bool("allow_pickle", allow_pickle)
    columns = None if columns is None else check_columns_option(columns)
    if cache_dir is not None:
        cache_dir = check_path("cache_dir", cache_dir)
    uri = as_paths(uri)
    for path in [uri] if isinstance(uri, (str, os.PathLike)) else uri:
        if "://" in str(path):
            raise SourceError(
                "object stores and URLs are not supported yet",
                expected="a path",
                found=path,
                remedy="copy the data to a file system first, on one process with rankfeed.prepare_once",
            )
    if storage_options is not None:
        raise ArgumentError(
            "object stores are not supported yet: storage_options must be None", remedy="leave storage_options out"
        )
    check_format(format)
    paths = expand(uri)
    name = fitting_format(uri, paths, format)
    _refuse_unfinished(paths)
    if name is None:
        raise unknown_format_error(uri, paths, format)
    common = {"allow_pickle": allow_pickle, "cache_dir": cache_dir}
    return _call_reader(FORMATS[name], uri, columns, common, options)


def _refuse_unfinished(paths: list[str]) -> None:
    """Refuse the target of an unfinished write: without a manifest, its shards may be a part of the data."""
    # Checked for all formats: the shards of an unfinished write are valid Arrow files.
    for folder in dict.fromkeys(path if os.path.isdir(path) else os.path.dirname(path) for path in paths):
        # In this order: the manifest is written before the staging directory is removed.
        if os.path.isdir(os.path.join(folder, STAGING_NAME)) and not os.path.exists(
            os.path.join(folder, MANIFEST_NAME)
        ):
            raise SourceError(
                "writing into this folder was not finished",
                where=folder or os.curdir,
                remedy="wait for it, or call rankfeed.write again with the same input to resume it",
            )


def _call_reader(
    format: Format, where: Paths, columns: Sequence[str] | None, common: dict[str, Any], options: dict[str, Any]
) -> Source:
    """Open data in a format; an ArgumentError if it has no such option."""
    module, _, name = format.reader.partition(":")
    reader = getattr(import_module(f"rankfeed.sources.{module}"), name)
    parameters = list(inspect.signature(reader).parameters)[1:]
    allowed = [name for name in parameters if name not in ("columns", *common)]
    for option in options:
        if option not in allowed:
            raise ArgumentError(
                f"{format.description} has no such option",
                expected="one of " + ", ".join(allowed) if allowed else "no options",
                found=option,
                remedy=_split_remedy(where) if option == "split" else None,
            )
    given = {name: value for name, value in common.items() if name in parameters}
    source: Source = reader(where, columns=columns, **given, **options)
    return source


def _split_remedy(where: Paths) -> str:
    """How to open a split of a format whose splits are folders."""
    remedy = "leave split out: a split of this format is a folder, which is opened by its path"
    names = data_folders(where, detect_format) if isinstance(where, str) and os.path.isdir(where) else {}
    return f"{remedy}: {', '.join(os.path.join(str(where), name) for name in names)}" if names else remedy
