"""Reads the figures of a loader from a thread, and shows them while the loader is iterated."""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rankfeed._util.validate import check_bool, check_seconds, check_str, invalid
from rankfeed.diagnostics.watch.line import ConsoleLine, Figures
from rankfeed.errors import TopologyError, safe_str

#: Longest interval of a line that is updated in place, in seconds.
_MAX_TERMINAL_INTERVAL = 1.0
#: Seconds that the end of a job waits for a terminal, a disk or a function that hangs.
_CLOSE_TIMEOUT = 5.0
#: Rates are over at least ten seconds, and over eight steps if those take longer.
_RATE_SECONDS, _RATE_STEPS, _MAX_READINGS = 10.0, 8, 1024


def watch(
    loader: Any,
    *,
    every: float = 10.0,
    to: Callable[[dict[str, int | float]], object] | None = None,
    name: str = "",
    all_ranks: bool = False,
) -> Watch:
    """Show the figures of a loader while it is iterated: speed, time waited for data, cache hits, memory.

    A thread reads the figures and shows them. An error there (a full disk, a closed terminal, an exception of the
    function) ends the watch with one warning, and never the training.

    Args:
        loader: a `Loader`, also one that Accelerate prepared.
        every: seconds between two readings. A line on a terminal is updated at least once a second.
        to: function, such as ``wandb.log``, that the thread calls with a dict of numbers named
            ``rankfeed/<name>/<figure>``. If None, a line on standard error: in place on a terminal, appended to a
            file.
        name: of the loader, if several are watched.
        all_ranks: show all ranks, not only rank 0.

    Returns:
        a context manager; without ``with`` it ends at `Watch.close`, or with the loader or the process.

    Raises:
        ArgumentError: an invalid argument.

    Examples:
        >>> import rankfeed as rf
        >>> loader = rf.Loader(rf.from_dataset([{"x": 1.0}] * 8), batch_size=2)
        >>> readings = []
        >>> with rf.watch(loader, to=readings.append):
        ...     for batch in loader:
        ...         pass
        >>> readings[-1]["rankfeed/epoch_step"]
        4
    """
    if not (callable(getattr(loader, "stats", None)) and hasattr(type(loader), "__iter__")):
        raise invalid("loader", "a rankfeed.Loader", loader)
    every = check_seconds("every", every, at_least=0.01)
    name, all_ranks = check_str("name", name), check_bool("all_ranks", all_ranks)
    if to is None:
        line = ConsoleLine(name)
        interval = min(every, _MAX_TERMINAL_INTERVAL) if line.is_in_place else every
        return Watch(loader, interval, line.show, all_ranks=all_ranks, end=line.close)
    if not callable(to):
        raise invalid("to", "a function of a dict of numbers, or None for a line on the console", to)
    prefix = f"rankfeed/{name}/" if name else "rankfeed/"

    def call(figures: Figures, rank: int) -> None:
        to({prefix + figure: value for figure, value in figures.items()})

    return Watch(loader, every, call, all_ranks=all_ranks)


class Watch:
    """A watched loader, as `watch` returns it: a daemon thread, which does not keep the loader alive."""

    def __init__(
        self,
        loader: Any,
        every: float,
        show: Callable[[Figures, int], object],
        *,
        all_ranks: bool,
        end: Callable[[], object] = lambda: None,
    ) -> None:
        self._loader, self._every, self._all_ranks = weakref.ref(loader), every, all_ranks
        self._show, self._end = show, end
        self._closed, self._process = threading.Event(), os.getpid()
        self._thread = threading.Thread(target=self._run, name="rankfeed-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Show the last figures and end."""
        atexit.unregister(self.close)
        if self._process == os.getpid():  # a forked child has no thread
            self._closed.set()
            self._thread.join(_CLOSE_TIMEOUT)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        text = ""
        try:
            rates, is_last = RecentRates(), False
            while not is_last:
                is_last = self._closed.wait(self._every) or self._loader() is None
                self._show_reading(rates)
        except Exception as error:
            text = f"the loader is no longer watched: {type(error).__name__}: {safe_str(error)}"
        with suppress(Exception):
            self._end()
        if text:
            warnings.warn(text, RuntimeWarning, stacklevel=1)

    def _show_reading(self, rates: RecentRates) -> None:
        """Show the current figures of an iterated loader."""
        loader: Any = self._loader()
        figures: Figures = {} if loader is None else loader.stats()
        if not figures.get("seconds"):  # not iterated yet: reading its rank would detect the topology too early
            return
        with suppress(TopologyError):  # raised to the code that iterates
            rank: int = loader.topology.rank
            if self._all_ranks or rank == 0:
                self._show(rates.update(figures, time.monotonic()), rank)


class RecentRates:
    """Replaces rates since the start by those of the last seconds, or of the last steps if steps are slow."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Figures]] = deque(maxlen=_MAX_READINGS)

    def update(self, figures: Figures, now: float) -> Figures:
        """Add a reading at a time of a monotonic clock; returns the figures with recent rates."""
        self._readings.append((now, figures))
        while len(self._readings) > 2:
            then, before = self._readings[1]
            if now - then < _RATE_SECONDS or figures["steps"] - before["steps"] < _RATE_STEPS:
                break
            self._readings.popleft()
        then, before = self._readings[0]
        if now <= then:
            return figures
        speed = (figures["samples"] - before["samples"]) / (now - then)
        waited = (figures["waited_seconds"] - before["waited_seconds"]) / (now - then)
        return {**figures, "samples_per_second": speed, "waited_share": min(1.0, max(0.0, waited))}
