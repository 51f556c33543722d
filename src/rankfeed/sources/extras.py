"""Importing libraries that only some formats need."""

from importlib import import_module
from typing import Any

from rankfeed.errors import MissingExtraError


def need(module: str, extra: str) -> Any:
    """Import a module of an optional dependency; a MissingExtraError names the extra if it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # installed, but one of its own dependencies is missing
        raise MissingExtraError(
            f"{module} is not installed",
            expected=f"the extra {extra!r}",
            remedy=f"pip install 'rankfeed[{extra}]'",
        ) from error
