"""Reads the figures of a loader from a thread, and shows them: a console line, or a function of the user.

The line is updated in place on a terminal, and appended to a log.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed._util.validate import check_bool, check_seconds, check_str, invalid
from rankfeed.errors import TopologyError, safe_str

if TYPE_CHECKING:
    from rich.live import Live

Figures = Mapping[str, int | float]

#: Seconds of waiting for one batch from which the line says so.
_LONG = 5.0
#: Stages of a batch, and the share of waiting from which the line names the longest.
_STAGES, _WAITS = ("source", "transform", "collate", "transfer"), 0.1
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


class ConsoleLine:
    """One line on standard error: in place on a terminal, else appended with the time while batches arrive."""

    def __init__(self, name: str) -> None:
        from rich.console import Console

        # FORCE_COLOR, which batch systems and CI set, makes rich take a file for a terminal.
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self.is_in_place = is_terminal and Console(stderr=True).is_interactive
        self._name, self._steps = name, -1.0

    def show(self, figures: Figures, rank: int) -> None:
        line = line_of(figures, name=self._name, rank=rank)
        if self.is_in_place:
            _SCREEN.show(self, line)
        elif figures["steps"] != self._steps or figures["waiting_seconds"] >= _LONG:
            self._steps = figures["steps"]
            sys.stderr.write(f"[rankfeed {time.strftime('%H:%M:%S')}] {line}\n")  # one call: ranks share the file
            sys.stderr.flush()

    def close(self) -> None:
        """Leave the last line on the terminal."""
        _SCREEN.remove(self)


def line_of(figures: Figures, *, name: str, rank: int) -> str:
    """The line for the figures of ``stats()``."""
    from rich.filesize import decimal

    limit = max(_STAGES, key=lambda stage: figures[f"{stage}_seconds"])
    named = figures["waited_share"] >= _WAITS and figures[f"{limit}_seconds"] > 0
    speed, waiting = figures["samples_per_second"], figures["waiting_seconds"]
    parts = [
        name,
        f"rank {rank}",
        f"epoch {figures['epoch']}",
        f"step {figures['epoch_step']:,}" + (f" of {figures['epoch_steps']:,}" if figures["epoch_steps"] else ""),
        f"{speed:,.0f} samples/s" if speed >= 10 or not speed else f"{speed:.2g} samples/s",
        f"waited {figures['waited_share']:.0%}" + (f" ({limit})" if named else ""),
        f"cache hits {figures['cache_hit_share']:.0%}" if figures["cache_lookups"] else "",
        decimal(int(figures["private_bytes"])) if figures["private_bytes"] else "",
        f"waiting for data for {waiting:.0f} s" if waiting >= _LONG else "",
    ]
    return ", ".join(part for part in parts if part)


class LiveLines:
    """The lines of all watched loaders of a process, below each other at the end of the terminal."""

    def __init__(self) -> None:
        self._live: Live | None = None
        init_in_each_process(self.reset)

    def reset(self) -> None:
        """In a forked child: no lines, and output goes to the terminal, past the locks of the parent."""
        if self._live is not None:
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                setattr(sys, name, getattr(stream, "rich_proxied_file", stream))
        self._lock = threading.Lock()
        self._lines: dict[Any, str] = {}
        self._live = None

    def show(self, owner: Any, line: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with self._lock:
            self._lines[owner] = line
            if self._live is None:
                # Standard output that is a file stays one.
                redirect = sys.stdout is not None and sys.stdout.isatty()
                self._live = Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=redirect)
                self._live.start()
            lines = Text("\n".join(self._lines.values()), no_wrap=True, overflow="ellipsis")
            self._live.update(lines, refresh=True)

    def remove(self, owner: Any) -> None:
        with self._lock:
            if self._lines.pop(owner, None) is not None and not self._lines and self._live is not None:
                live, self._live = self._live, None
                live.stop()


_SCREEN = LiveLines()
