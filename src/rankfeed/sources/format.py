"""What `rankfeed.open` has to know of a format; each format's own file says it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rankfeed.errors import ArgumentError
from rankfeed.sources.paths import Paths
from rankfeed.sources.source import Source

#: What every format may be asked for; those that have no use for one leave it out of their signature.
COMMON = ("allow_pickle", "cache_dir")


@dataclass(frozen=True)
class Format:
    """How a format is recognised and opened.

    Args:
        name: as in ``open(uri, format=name)``.
        what: how it is called in a sentence.
        fits: whether this is one: looks at the data, does not raise, imports no heavy library.
        opened: ``opened(where, *, columns=None, ...)``; its further keywords are the format's own options.
    """

    name: str
    what: str
    fits: Callable[[Paths], bool]
    opened: Callable[..., Source]

    @property
    def options(self) -> list[str]:
        """Names of the format's own options."""
        names = list(inspect.signature(self.opened).parameters)[1:]
        return [name for name in names if name not in (*COMMON, "columns")]

    def open(
        self, where: Paths, columns: Sequence[str] | None, common: dict[str, Any], options: dict[str, Any]
    ) -> Source:
        """Open one.

        Raises:
            ArgumentError: an option that the format does not have.
            SourceError: it cannot be read.
        """
        known = self.options
        for name in options:
            if name not in known:
                raise ArgumentError(
                    f"{self.what} has no such option",
                    expected="one of " + ", ".join(known) if known else "no options",
                    found=name,
                )
        taken = inspect.signature(self.opened).parameters
        return self.opened(
            where, columns=columns, **{name: value for name, value in common.items() if name in taken}, **options
        )
