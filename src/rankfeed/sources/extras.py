"""Libraries that only some formats need, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rankfeed.errors import MissingExtraError


def need(module: str, extra: str) -> Any:
    """Import a library that comes with an extra.

    Args:
        module: its name, as in an import statement.
        extra: the extra of rankfeed that installs it.

    Raises:
        MissingExtraError: it is not installed; names the extra.

    Examples:
        >>> need("math", extra="image").floor(2.5)
        2
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # it is there, and lacks something itself: its own words say what
        raise MissingExtraError(
            f"{module} is not installed",
            expected=f"the extra {extra!r}",
            remedy=f"pip install 'rankfeed[{extra}]'",
        ) from error
