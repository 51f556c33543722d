"""Detecting `.npy` and `.npz` files, and listing them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice

from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, common_root, expand, files_in, matched

SUFFIXES = (".npy", ".npz")
#: Directories that are searched for files, so that a cycle of links ends.
_MOST_DIRECTORIES = 1000


def is_numpy(where: Paths) -> bool:
    """Whether these are `.npy` or `.npz` files, or a directory with some, also in subdirectories."""
    if isinstance(where, (str, os.PathLike)) and os.path.isdir(where):
        with os.scandir(where) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file()]
        if names:
            return any(name.endswith(SUFFIXES) for name in names)
        return _nested_directory(os.fspath(where)) is not None
    paths = matched(where)
    return bool(paths) and all(path.endswith(SUFFIXES) for path in paths)


def list_files(where: Paths, *, recursive: bool = False) -> tuple[str, list[str]]:
    """The directory that names are relative to, and the files in natural order.

    Files in subdirectories of a directory are an error, unless ``recursive``, which needs a directory.
    """
    if isinstance(where, (str, os.PathLike)) and os.path.isdir(where):
        root = os.fspath(where)
        paths = files_in(where, SUFFIXES, recursive, skip=(".",))
        if not recursive and (nested := _nested_directory(root)) is not None:
            raise _in_subdirectories(root, paths, nested)
    elif recursive:
        raise ArgumentError(
            'labels="folder" needs a directory',
            expected="a directory with a subdirectory for each class",
            found=where,
        )
    else:
        paths = expand(where)
        root = common_root(paths)
    if not paths:
        raise SourceError("no .npy or .npz files", where=where)
    if len({path[-4:] for path in paths}) > 1:
        raise SourceError("a dataset is either .npy or .npz files", found="both", where=where)
    return root, paths


def _in_subdirectories(root: str, paths: Sequence[str], nested: str) -> SourceError:
    suffix = next(name[-4:] for name in sorted(os.listdir(nested)) if name.endswith(SUFFIXES))
    alone = f", {os.path.join(root, '*' + suffix)!r} for those outside subdirectories" if paths else ""
    return SourceError(
        f"the directory has {suffix} files in subdirectories",
        expected="files in one directory, unless an option says how subdirectories are read",
        found=(f"{len(paths)} files, and more" if paths else "files") + f" in {os.path.relpath(nested, root)!r}",
        where=root,
        remedy=f'pass labels="folder" to number the samples by their subdirectory; or a pattern: '
        f"{os.path.join(root, '**', '*' + suffix)!r} for all files{alone}",
    )


def _nested_directory(root: str) -> str | None:
    """A subdirectory at any depth with `.npy` or `.npz` files, of the first thousand that are searched."""
    for here, folders, names in islice(os.walk(root, followlinks=True), _MOST_DIRECTORIES):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if here != root and any(name.endswith(SUFFIXES) and not name.startswith(".") for name in names):
            return here
    return None


FORMAT = Format("numpy", ".npy or .npz files", is_numpy, "rankfeed.sources.npy.layout:open_numpy")
