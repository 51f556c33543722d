"""Detecting `.npy` and `.npz` files, and listing them."""

import os

from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.paths import Paths, common_root, escape, expand, files_in, is_side_file, walk

SUFFIXES = (".npy", ".npz")


def is_numpy(paths: list[str]) -> bool:
    """Whether these are `.npy` or `.npz` files, or a directory with some, also in subdirectories."""
    if len(paths) > 1 or not os.path.isdir(paths[0]):
        return all(path.endswith(SUFFIXES) for path in paths)
    with os.scandir(paths[0]) as entries:
        names = [
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and entry.is_file() and not is_side_file(entry.path)
        ]
    return any(name.endswith(SUFFIXES) for name in names) if names else _nested_file(paths[0]) is not None


def list_files(where: Paths, *, recursive: bool = False) -> tuple[str, list[str]]:
    """The directory that names are relative to, and the files in natural order.

    Files in subdirectories of a directory are an error, unless ``recursive``, which needs a directory.
    """
    paths = expand(where)
    root = common_root(paths)
    if len(paths) == 1 and os.path.isdir(paths[0]):
        (root,) = paths
        paths = files_in(root, SUFFIXES, recursive, skip=(".",))
        if not recursive and (nested := _nested_file(root)) is not None:
            pattern, name = "*" + nested[-4:], os.path.relpath(nested, root)
            raise SourceError(
                f"the directory has {nested[-4:]} files in subdirectories",
                expected="files in one directory, unless an option says how subdirectories are read",
                found=f"{len(paths)} files, and {name!r}",
                where=root,
                remedy='pass labels="folder" to number the samples by their subdirectory; or open one '
                f"subdirectory: {os.path.join(root, name.split(os.sep)[0])!r}; or give a pattern: "
                f"{os.path.join(escape(root), '**', pattern)!r} for all files"
                + (f", {os.path.join(escape(root), pattern)!r} for those at the top" if paths else ""),
            )
    elif recursive:
        raise ArgumentError(
            'labels="folder" needs a directory',
            expected="a directory with a subdirectory for each class",
            found=where,
        )
    if not paths:
        raise SourceError("no .npy or .npz files", where=where)
    if len({path[-4:] for path in paths}) > 1:
        raise SourceError("a dataset is either .npy or .npz files", found="both", where=where)
    return root, paths


def _nested_file(root: str) -> str | None:
    """A `.npy` or `.npz` file in a subdirectory at any depth."""
    below = (os.path.join(here, name) for here, names in walk(root) if here != root for name in names)
    return next((path for path in below if path.endswith(SUFFIXES)), None)
