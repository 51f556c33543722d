"""Packages that come with an extra."""

import importlib.util

from tests.support.machine import missing


def need_package(name: str) -> None:
    """A package that is not installed fails where all have to be, and is left out elsewhere."""
    if importlib.util.find_spec(name) is None:
        missing(name)
