"""A loader that is looked at while it is iterated, and how fast it goes now."""

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from rankfeed.errors import TopologyError

Figures = Mapping[str, int | float]

#: What is said of now is said of so many seconds at least, and of so many steps if they are to be had.
_SECONDS, _STEPS = 10.0, 8
#: Looks kept, at most.
_LOOKS = 1024


class Watched:
    """A loader that is looked at from other threads, and not kept alive by that.

    Args:
        loader: what has ``stats()`` and a ``topology``.
        name: what it is called where there are several.
    """

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = weakref.ref(loader)
        self.name = name

    def stats(self) -> Figures | None:
        """Its figures; None if it is gone."""
        loader = self._loader()
        return None if loader is None else loader.stats()

    def rank(self) -> int | None:
        """The rank that it feeds, as far as that is known by now."""
        loader = self._loader()
        try:
            return None if loader is None else int(loader.topology.rank)
        except TopologyError:  # whoever iterates is told
            return None


class Recent:
    """What figures that only grow say of the last seconds.

    Where steps are slow, it is of the last steps instead: between two of them nothing seems to move.

    Examples:
        >>> recent = Recent()
        >>> figures = {"steps": 4, "samples": 40, "waited_seconds": 1.0}
        >>> recent.rates(figures | {"samples_per_second": 8.0, "waited_share": 0.2}, now=5.0)
        (8.0, 0.2)
        >>> recent.rates({"steps": 9, "samples": 90, "waited_seconds": 1.5}, now=7.0)
        (25.0, 0.25)
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Figures]] = deque(maxlen=_LOOKS)

    def rates(self, figures: Figures, now: float) -> tuple[float, float]:
        """Samples per second, and the share of the time that was waited for data.

        Args:
            figures: of ``stats()``.
            now: seconds, of a clock that only goes on.
        """
        self._looks.append((now, figures))
        while len(self._looks) > 2 and self._enough(*self._looks[1]):
            self._looks.popleft()
        then, before = self._looks[0]
        if now <= then:  # the first look: all that was before it
            return figures["samples_per_second"], figures["waited_share"]
        waited = figures["waited_seconds"] - before["waited_seconds"]
        return (figures["samples"] - before["samples"]) / (now - then), min(1.0, max(0.0, waited / (now - then)))

    def _enough(self, then: float, before: Figures) -> bool:
        now, figures = self._looks[-1]
        return now - then >= _SECONDS and figures["steps"] - before["steps"] >= _STEPS
