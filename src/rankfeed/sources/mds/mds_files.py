"""Detecting datasets in the MDS format of MosaicML Streaming."""

import os

from rankfeed.sources.paths import Paths, expand, head

INDEX_NAME = "index.json"


def mds_folders(where: Paths) -> list[str]:
    """The directories, each given itself or by its index."""
    return [
        os.path.dirname(path) or "." if os.path.basename(path) == INDEX_NAME else path for path in expand(where)
    ]


def is_mds(paths: list[str]) -> bool:
    """Whether these are directories with an index of shards."""
    heads = [head(os.path.join(folder, INDEX_NAME), 4096) for folder in mds_folders(paths)]
    return all(start.lstrip()[:1] == b"{" and b'"shards"' in start for start in heads)
