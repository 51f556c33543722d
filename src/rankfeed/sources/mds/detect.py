"""Detecting datasets in the MDS format of MosaicML Streaming."""

import os

from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, head

INDEX_NAME = "index.json"


def mds_folders(where: Paths) -> list[str]:
    """The directories, each given itself or by its index."""
    paths = [os.fspath(where)] if isinstance(where, (str, os.PathLike)) else [os.fspath(each) for each in where]
    return [os.path.dirname(path) or "." if os.path.basename(path) == INDEX_NAME else path for path in paths]


def is_mds(where: Paths) -> bool:
    """Whether these are directories with an index of shards."""
    found = [head(os.path.join(folder, INDEX_NAME), 4096) for folder in mds_folders(where)]
    return bool(found) and all(each.lstrip()[:1] == b"{" and b'"shards"' in each for each in found)


FORMAT = Format(
    "mds",
    "an MDS folder of MosaicML Streaming (with index.json)",
    is_mds,
    "rankfeed.sources.mds.source:MdsSource",
)
