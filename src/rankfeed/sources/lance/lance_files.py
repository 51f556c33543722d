"""Detecting Lance tables."""

import os


def is_lance(paths: list[str]) -> bool:
    """Whether this is a directory with versions of a Lance table."""
    try:
        return any(name.endswith(".manifest") for name in os.listdir(os.path.join(paths[0], "_versions")))
    except OSError:
        return False
