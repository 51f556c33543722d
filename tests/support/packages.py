"""Packages that come with an extra."""

import importlib.util
import os

import pytest


def need_package(name: str) -> None:
    """A package that is not installed fails where all have to be, and is left out elsewhere."""
    if importlib.util.find_spec(name) is not None:
        return
    if os.environ.get("CI") == "true" or os.environ.get("RANKFEED_REQUIRE_LAUNCHERS") == "1":
        pytest.fail(f"needs {name}")
    pytest.skip(f"needs {name}", allow_module_level=True)
