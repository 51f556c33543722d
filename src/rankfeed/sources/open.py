"""Detecting the format of data, and opening them."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from rankfeed._util.validate import check_bool, check_choice, check_columns_option, check_path
from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.paths import Paths, as_paths, expand
from rankfeed.sources.source import Source
from rankfeed.sources.unknown_format import data_folders, unknown_format_error
from rankfeed.storage.manifest import MANIFEST_NAME

#: Directory of an unfinished `rankfeed.write` in its target.
STAGING_NAME = ".rankfeed-write"


@dataclass(frozen=True)
class Format:
    """A format that `rankfeed.open` knows; its detection and its reader are imported when they are called."""

    description: str  # in error messages
    detection: str  # "module:function" in this package; the function looks at names and first bytes of paths
    reader: str  # "module:function" of ``reader(where, *, columns=None, ...) -> Source``
    is_single: bool = False  # whether the data are at a single path, not at a pattern or list

    def fits(self, where: Paths, paths: list[str]) -> bool:
        """Whether the given data, whose paths exist, are in this format."""
        if not paths or (self.is_single and paths != [where]):
            return False
        try:
            return bool(_load(self.detection)(paths))
        except OSError:
            return False

    def open(
        self, where: Paths, columns: Sequence[str] | None, common: dict[str, Any], options: dict[str, Any]
    ) -> Source:
        """Open data in this format; an ArgumentError if it has no such option."""
        reader = _load(self.reader)
        parameters = list(inspect.signature(reader).parameters)[1:]
        allowed = [name for name in parameters if name not in ("columns", *common)]
        for option in options:
            if option not in allowed:
                raise ArgumentError(
                    f"{self.description} has no such option",
                    expected="one of " + ", ".join(allowed) if allowed else "no options",
                    found=option,
                    remedy=_split_remedy(where) if option == "split" else None,
                )
        given = {name: value for name, value in common.items() if name in parameters}
        source: Source = reader(where, columns=columns, **given, **options)
        return source


#: In the order of detection.
FORMATS = {
    "packed": Format(
        "a folder that rankfeed.write wrote", "arrow.arrow_files:is_packed", "packed:PackedSource", is_single=True
    ),
    "numpy": Format(".npy or .npz files", "npy.npy_files:is_numpy", "npy.layout:open_numpy"),
    "lance": Format(
        "a Lance table (a folder with _versions)",
        "lance.lance_files:is_lance",
        "lance.lance_source:LanceSource",
        is_single=True,
    ),
    "webdataset": Format(
        "WebDataset tar shards (.tar)", "tar.tar_files:is_webdataset", "tar.tar_source:WebDatasetSource"
    ),
    "parquet": Format(
        "Parquet files (or a folder of them)",
        "parquet.parquet_files:is_parquet",
        "parquet.parquet_source:ParquetSource",
    ),
    "huggingface": Format(
        "a folder of Hugging Face datasets (save_to_disk)",
        "hf.hf_files:is_saved_to_disk",
        "hf.hf_source:HuggingFaceSource",
        is_single=True,
    ),
    "arrow": Format(
        "Arrow IPC files or streams (.arrow, .feather)",
        "arrow.arrow_files:is_arrow",
        "arrow.arrow_source:ArrowSource",
    ),
    "mds": Format(
        "an MDS folder of MosaicML Streaming (with index.json)", "mds.mds_files:is_mds", "mds.mds_source:MdsSource"
    ),
    "pyg": Format(
        "a dataset that PyTorch Geometric saved (processed/data.pt)",
        "pyg.pyg_files:is_pyg",
        "pyg.saved:PyGFileSource",
        is_single=True,
    ),
    "csv": Format("CSV files", "text.text_files:is_csv", "text.text_source:CsvSource"),
    "jsonl": Format(
        "files with a JSON object in each line", "text.text_files:is_jsonl", "text.text_source:JsonlSource"
    ),
}


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"rankfeed.sources.{module}"), attribute)


def detect(where: Paths, format: str | None = None) -> str | None:
    """The name of the format of data, ``format`` itself if they are in it; None if they are in no such format."""
    return _detect(where, format)[0]


def _detect(where: Paths, format: str | None) -> tuple[str | None, list[str]]:
    """The name of the format, and the paths that were looked at."""
    if format is not None:
        check_choice("format", format, tuple(FORMATS))
    paths = expand(where)
    names = FORMATS if format is None else [format]
    return next((name for name in names if FORMATS[name].fits(where, paths)), None), paths


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
    name, paths = _detect(uri, format)
    _refuse_unfinished(paths)
    if name is None:
        raise _unknown_format(uri, paths, format)
    return FORMATS[name].open(uri, columns, {"allow_pickle": allow_pickle, "cache_dir": cache_dir}, options)


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


def _split_remedy(where: Paths) -> str:
    """How to open a split of a format whose splits are folders."""
    remedy = "leave split out: a split of this format is a folder, which is opened by its path"
    names = data_folders(where, detect) if isinstance(where, str) and os.path.isdir(where) else {}
    return f"{remedy}: {', '.join(os.path.join(str(where), name) for name in names)}" if names else remedy


def _unknown_format(where: Paths, paths: list[str], format: str | None) -> SourceError:
    """The reason why no format fits."""
    if format is not None and (other := detect(where)) is not None:
        return SourceError(
            "the data are in another format",
            expected=FORMATS[format].description,
            found=FORMATS[other].description,
            where=", ".join(paths[:4]),
            remedy=f"leave format out, or pass format={other!r}",
        )
    expected = ", ".join(entry.description for name, entry in FORMATS.items() if format in (None, name))
    return unknown_format_error(paths, expected, partial(detect, format=format))
