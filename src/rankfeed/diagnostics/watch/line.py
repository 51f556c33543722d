"""How a loader is doing, in one line: in place on a terminal, now and then in a log."""

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed.diagnostics.watch.watched import Figures, Recent

if TYPE_CHECKING:
    from rich.live import Live

#: Seconds of waiting for one batch from which on the line says so.
_LONG = 5.0


class TerminalLine:
    """The line on standard error, while that is a terminal: what is printed meanwhile stands above it."""

    every = 1.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._recent = Recent()

    def show(self, figures: Figures, rank: int | None) -> None:
        rates = self._recent.rates(figures, time.monotonic())
        _SCREEN.show(self, line_of(figures, rates, name=self._name, rank=rank))

    def close(self) -> None:
        _SCREEN.leave(self)


class LogLine:
    """A line on standard error now and then, where that goes to a file: Slurm's log, say."""

    every = 30.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._recent = Recent()
        self._steps = -1

    def show(self, figures: Figures, rank: int | None) -> None:
        rates = self._recent.rates(figures, time.monotonic())
        if figures["steps"] == self._steps and figures["waiting_seconds"] < _LONG:
            return  # nobody reads: an evaluation, or the end
        self._steps = int(figures["steps"])
        line = line_of(figures, rates, name=self._name, rank=rank)
        sys.stderr.write(f"[rankfeed {time.strftime('%H:%M:%S')}] {line}\n")  # at once: others write there, too
        sys.stderr.flush()

    def close(self) -> None:
        pass


def line_for(name: str) -> TerminalLine | LogLine:
    """The kind of line that standard error takes."""
    from rich.console import Console

    # FORCE_COLOR, which batch systems and CI set, makes a file a terminal for rich.
    terminal = sys.stderr is not None and sys.stderr.isatty()
    return TerminalLine(name) if terminal and Console(stderr=True).is_interactive else LogLine(name)


def line_of(figures: Figures, rates: tuple[float, float], *, name: str = "", rank: int | None = None) -> str:
    """What there is to say, the most important things first.

    Args:
        figures: of ``stats()``.
        rates: samples per second, and share of the time waited.
        name: of the loader.
        rank: that it feeds; None for unknown.

    Examples:
        >>> figures = dict(epoch=3, epoch_step=1204, epoch_steps=15625, waiting_seconds=0.1, private_bytes=1.25e9)
        >>> figures |= dict(cache_lookups=100, cache_hit_share=0.984)
        >>> line_of(figures, (8230.4, 0.021), rank=0)
        'rank 0, epoch 3, step 1,204 of 15,625, 8,230 samples/s, waited 2%, cache hits 98%, 1.2 GB'
        >>> line_of(figures | {"waiting_seconds": 34.2, "cache_lookups": 0}, (0.0, 1.0), name="train")
        'train, epoch 3, step 1,204 of 15,625, 0 samples/s, waited 100%, 1.2 GB, waiting for data for 34 s'
    """
    from rich.filesize import decimal

    speed, waited = rates
    parts = [
        name,
        "" if rank is None else f"rank {rank}",
        f"epoch {figures['epoch']}",
        f"step {figures['epoch_step']:,}" + (f" of {figures['epoch_steps']:,}" if figures["epoch_steps"] else ""),
        f"{speed:,.0f} samples/s" if speed >= 10 or not speed else f"{speed:.2g} samples/s",
        f"waited {waited:.0%}",
        f"cache hits {figures['cache_hit_share']:.0%}" if figures["cache_lookups"] else "",
        decimal(int(figures["private_bytes"])) if figures["private_bytes"] else "",
        f"waiting for data for {waiting:.0f} s" if (waiting := figures["waiting_seconds"]) >= _LONG else "",
    ]
    return ", ".join(part for part in parts if part)


class _Screen:
    """The lines of all watched loaders of the process, one below the other: a terminal has one last line."""

    def __init__(self) -> None:
        self._live: Live | None = None
        init_in_each_process(self.start_anew)

    def start_anew(self) -> None:
        """A forked child has no line: what it prints goes to the terminal itself, past locks of the parent."""
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

        with self._lock:
            self._lines[owner] = line
            if self._live is None:
                # What goes to a file on standard output stays in it.
                redirect = sys.stdout is not None and sys.stdout.isatty()
                console = Console(stderr=True)
                self._live = Live(console=console, auto_refresh=False, redirect_stdout=redirect)
                self._live.start()
            self._live.update(self._text(), refresh=True)

    def leave(self, owner: Any) -> None:
        with self._lock:
            if self._lines.pop(owner, None) is None or self._live is None:
                return
            if not self._lines:
                live, self._live = self._live, None
                live.stop()

    def _text(self) -> Any:
        from rich.text import Text

        return Text("\n".join(self._lines.values()), no_wrap=True, overflow="ellipsis")


_SCREEN = _Screen()
