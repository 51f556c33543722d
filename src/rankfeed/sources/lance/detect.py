"""Detecting Lance tables."""

import os

from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths


def is_lance(where: Paths) -> bool:
    """Whether this is a directory with versions of a Lance table."""
    if not isinstance(where, (str, os.PathLike)):
        return False
    try:
        with os.scandir(os.path.join(where, "_versions")) as entries:
            return any(entry.name.endswith(".manifest") for entry in entries)
    except (OSError, ValueError):
        return False


FORMAT = Format(
    "lance", "a Lance table (a folder with _versions)", is_lance, "rankfeed.sources.lance.source:LanceSource"
)
