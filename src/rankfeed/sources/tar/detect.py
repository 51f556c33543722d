"""Detecting WebDataset tar shards, and folders that describe them."""

import os

from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, files_in, head, is_one, matched
from rankfeed.sources.tar.headers import BLOCK, is_header

#: Names of tar files, compressed or not.
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
#: The directory in which Energon describes a dataset.
META = ".nv-meta"


def tars_in(folder: str) -> list[str]:
    """The shards of a directory."""
    return files_in(folder, (".tar",))


def is_energon(where: str) -> bool:
    """Whether a directory was prepared by Energon."""
    return any(os.path.isfile(os.path.join(where, META, name)) for name in (".info.json", ".info.yaml"))


def is_wids(where: str) -> bool:
    """Whether a file is a wids descriptor."""
    return where.endswith(".json") and os.path.isfile(where) and b'"wids_version"' in head(where, 1 << 20)


def _is_tar(path: str) -> bool:
    if path.endswith(SUFFIXES):
        return os.path.isfile(path)
    return is_header(head(path, BLOCK))


def is_webdataset(where: Paths) -> bool:
    """Whether these are tar shards, directories of them, or a description of them."""
    for path in matched(where)[:1]:
        is_described = is_one(where) and (is_energon(path) or is_wids(path))
        return is_described or (bool(tars_in(path)) if os.path.isdir(path) else _is_tar(path))
    return False


FORMAT = Format(
    "webdataset", "WebDataset tar shards (.tar)", is_webdataset, "rankfeed.sources.tar.source:WebDatasetSource"
)
