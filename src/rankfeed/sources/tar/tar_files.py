"""Detecting WebDataset tar shards, and folders that describe them."""

import os

from rankfeed.sources.paths import files_in, head
from rankfeed.sources.tar.headers import BLOCK, is_header

#: Names of tar files, compressed or not.
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
#: The directory in which Energon describes a dataset.
META = ".nv-meta"


def is_energon(where: str) -> bool:
    """Whether a directory was prepared by Energon."""
    return any(os.path.isfile(os.path.join(where, META, name)) for name in (".info.json", ".info.yaml"))


def is_wids(where: str) -> bool:
    """Whether a file is a wids descriptor."""
    return where.endswith(".json") and os.path.isfile(where) and b'"wids_version"' in head(where, 1 << 20)


def is_webdataset(paths: list[str]) -> bool:
    """Whether these are tar shards, directories of them, or a description of them."""
    first = paths[0]
    if len(paths) == 1 and (is_energon(first) or is_wids(first)):
        return True
    if os.path.isdir(first):
        return bool(files_in(first, (".tar",)))
    return first.endswith(SUFFIXES) or is_header(head(first, BLOCK))
