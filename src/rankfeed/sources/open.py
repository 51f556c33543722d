"""Opens data of any format, or names what is at a path of no known format, and how to read that."""

import inspect
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import islice
from typing import Any

from rankfeed._util.validate import check_bool, check_columns_option, check_optional, check_path
from rankfeed.errors import ArgumentError, SourceError, listed
from rankfeed.sources.formats import FORMATS, Format, check_format, detect_format, fitting_format
from rankfeed.sources.paths import Paths, as_paths, escape, expand, files_in, natural, walk
from rankfeed.sources.source import Source
from rankfeed.storage.manifest import MANIFEST_NAME, STAGING_NAME

_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_TEXTS = (".txt", ".text", ".md")
_SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval")
#: Subfolders that are examined for data.
_MAX_EXAMINED = 16


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
    cache_dir = check_optional(check_path, "cache_dir", cache_dir)
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
    # The shards of an unfinished write are valid Arrow files, but may be a part of the data.
    for folder in dict.fromkeys(path if os.path.isdir(path) else os.path.dirname(path) for path in paths):
        is_staging = os.path.isdir(os.path.join(folder, STAGING_NAME))
        # In this order: the manifest is written before the staging directory is removed.
        if is_staging and not os.path.exists(os.path.join(folder, MANIFEST_NAME)):
            raise SourceError(
                "writing into this folder was not finished",
                where=folder or os.curdir,
                remedy="wait for it, or call rankfeed.write again with the same input to resume it",
            )
    if name is None:
        raise _unknown_format_error(uri, paths, format)
    common = {"allow_pickle": allow_pickle, "cache_dir": cache_dir}
    return _call_reader(FORMATS[name], uri, columns, common, options)


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
    accepted = {name: value for name, value in common.items() if name in parameters}
    source: Source = reader(where, columns=columns, **accepted, **options)
    return source


def _split_remedy(where: Paths) -> str:
    """How to open a split of a format whose splits are folders."""
    remedy = "leave split out: a split of this format is a folder, which is opened by its path"
    folders = _data_folders(where, None) if isinstance(where, str) and os.path.isdir(where) else {}
    return f"{remedy}: {', '.join(os.path.join(str(where), name) for name in folders)}" if folders else remedy


def _unknown_format_error(where: Paths, paths: Sequence[str], format: str | None) -> SourceError:
    """The error for data at paths that no format fits, or not the given one."""
    if format is not None and (detected := detect_format(where)) is not None:
        return SourceError(
            "the data are in another format",
            expected=FORMATS[format].description,
            found=FORMATS[detected].description,
            where=", ".join(paths[:4]),
            remedy=f"leave format out, or pass format={detected!r}",
        )
    expected = ", ".join(kind.description for name, kind in FORMATS.items() if format in (None, name))
    if len(paths) == 1 and os.path.isdir(paths[0]):
        return _folder_error(paths[0], expected, format)
    suffixes = [os.path.splitext(path)[1].lower() for path in paths]
    remedy = _remedy_for(max(suffixes, key=suffixes.count), paths[0]) if paths else None
    if len(paths) == 1:
        return SourceError(
            "unknown format", expected=expected, found=suffixes[0] or "no suffix", where=paths[0], remedy=remedy
        )
    return SourceError(
        "the files are not all of one known format", expected=expected, found=str(paths[:4]), remedy=remedy
    )


def _data_folders(folder: str, format: str | None) -> dict[str, str]:
    """Name and format of the subfolders that are datasets themselves, of the first ones."""
    formats: dict[str, str] = {}
    for name in islice(_subfolders(folder), _MAX_EXAMINED):
        with suppress(SourceError, OSError):
            if (detected := detect_format(os.path.join(folder, name), format)) is not None:
                formats[name] = detected
    return formats


def _folder_error(folder: str, expected: str, format: str | None) -> SourceError:
    files = files_in(folder, ("",), skip=())  # raises for a broken link
    names = [*_subfolders(folder), *map(os.path.basename, files)]
    if not names:
        return SourceError("the folder is empty", expected=expected, where=folder)
    if formats := _data_folders(folder, format):
        return SourceError(
            "the folder is not a dataset, but its subfolders are",
            expected=expected,
            found=listed([f"{name} ({detected})" for name, detected in formats.items()]),
            where=folder,
            remedy=f"open one of them: rankfeed.open({os.path.join(folder, next(iter(formats)))!r}); "
            "rankfeed.concat joins several",
        )
    counts: Counter[tuple[str, int]] = Counter()  # of suffixes, and levels below the folder
    for parent, file_names in walk(folder):
        depth = 0 if parent == folder else os.path.relpath(parent, folder).count(os.sep) + 1
        counts.update((os.path.splitext(name)[1].lower(), depth) for name in file_names)
    suffix, depth = counts.most_common(1)[0][0] if counts else ("", 0)
    pattern_remedy = _pattern_remedy(folder, files, format)
    return SourceError(
        "the folder holds no data that rankfeed reads"
        if pattern_remedy is None
        else "the files of the folder are not all of one format",
        expected=expected,
        found=listed(names) + (f"; {suffix} files in subfolders" if depth and suffix else ""),
        where=folder,
        remedy=pattern_remedy or _remedy_for(suffix, folder, depth),
    )


def _subfolders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(names, key=natural)


def _pattern_remedy(folder: str, files: Sequence[str], format: str | None) -> str | None:
    """How to open the files of each format in a folder that also has other files; None if there are none."""
    patterns: dict[str, str] = {}
    for suffix, path in {os.path.splitext(path)[1]: path for path in reversed(files)}.items():
        with suppress(SourceError, OSError):
            if suffix and detect_format(path, format) is not None:
                patterns[suffix] = f"rankfeed.open({os.path.join(escape(folder), f'*{suffix}')!r})"
    if not patterns:
        return None
    calls = " or ".join(patterns[suffix] for suffix in sorted(patterns))
    return f"open the {' or '.join(sorted(patterns))} files by a pattern: {calls}"


def _remedy_for(suffix: str, path: str, depth: int = 0) -> str:
    """How to read files with a suffix that are ``depth`` levels below a path."""
    if suffix in _IMAGES:
        split = next((name for name in _subfolders(path) if name.lower() in _SPLITS), None) if depth else None
        if split is not None:
            path, depth = os.path.join(path, split), depth - 1
        if depth and len(_subfolders(path)) > 1:
            return (
                "open the classes, which are subfolders, by torchvision, with a transform that returns tensors: "
                f"rankfeed.from_dataset(torchvision.datasets.ImageFolder({path!r}, transform))"
            )
        return "read the images in a Dataset that returns tensors: rankfeed.from_dataset(dataset)"
    if suffix in _TEXTS:
        return (
            "for a text per file, read the files in a Dataset: rankfeed.from_dataset(dataset); for a text per "
            'line, write the lines once: rankfeed.write(({"text": line} for line in file), "texts")'
        )
    if suffix == ".mds":
        return (
            "open the folder that has the index.json of these shards: copy it there, or write the dataset again "
            "(MDSWriter writes it last, when it is closed)"
        )
    return "read it in a Dataset: rankfeed.from_dataset(dataset)"
