"""The figures of a loader as one line: updated in place on a terminal, appended to a log."""

import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rankfeed._util.fork_safety import init_in_each_process

if TYPE_CHECKING:
    from rich.live import Live

Figures = Mapping[str, int | float]

#: Seconds of waiting for one batch from which the line says so.
_LONG = 5.0
#: Stages of a batch, and the share of waiting from which the line names the longest.
_STAGES, _WAITS = ("source", "transform", "collate", "transfer"), 0.1


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
