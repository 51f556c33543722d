"""How a format is detected and opened, without importing its reader."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rankfeed.errors import ArgumentError
from rankfeed.sources.paths import Paths
from rankfeed.sources.source import Source

#: Options of `rankfeed.open` itself; a reader that does not use one leaves it out of its signature.
_COMMON = ("columns", "allow_pickle", "cache_dir")


@dataclass(frozen=True)
class Format:
    """A format that `rankfeed.open` knows."""

    name: str  # for ``open(uri, format=name)``
    what: str  # its description in error messages
    fits: Callable[[Paths], bool]  # looks at names and first bytes, never raises
    reader: str  # "module:name" of ``reader(where, *, columns=None, ...) -> Source``, imported when it is called

    def open(
        self, where: Paths, columns: Sequence[str] | None, common: dict[str, Any], options: dict[str, Any]
    ) -> Source:
        """Open data in this format; an ArgumentError if it has no such option."""
        module, name = self.reader.split(":")
        reader: Callable[..., Source] = getattr(import_module(module), name)
        parameters = list(inspect.signature(reader).parameters)[1:]
        known = [each for each in parameters if each not in _COMMON]
        for option in options:
            if option not in known:
                raise ArgumentError(
                    f"{self.what} has no such option",
                    expected="one of " + ", ".join(known) if known else "no options",
                    found=option,
                )
        given = {name: value for name, value in common.items() if name in parameters}
        return reader(where, columns=columns, **given, **options)
