"""Waiting for another process that builds: who it is, since when, how far it has come, and when it is enough."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rankfeed.building.holder import Holder
from rankfeed.building.turn import BUILD
from rankfeed.errors import PrepareError

_log = logging.getLogger("rankfeed")
#: Seconds after which a waiting process says for whom it waits; then after twice as many, and so on.
_PATIENCE = 5.0
#: Seconds after which it draws that instead, and between drawings; and what part of the time may go into looking.
_DRAWN, _SHARE = 1.0, 0.05


class Patience:
    """Says, now and then, for whom a process waits; and when it has waited enough.

    It is a line that is drawn over and over where this process has the terminal to itself, and a line in the log
    elsewhere.

    Args:
        path: what is waited for.
        me: place of this process in its job; empty where it is alone.
        timeout: seconds to wait; None for ever.
    """

    def __init__(self, path: Path, me: str, timeout: float | None) -> None:
        self.me = me
        self._path, self._timeout = path, timeout
        self._began = time.monotonic()
        # Ranks share one terminal, and so do threads.
        mine = not me and threading.current_thread() is threading.main_thread()
        self._draws = mine and sys.stderr is not None and sys.stderr.isatty()
        self._next = _DRAWN if self._draws else _PATIENCE
        self._line: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.stop()

    def check(self, holder: Holder, folder: Path) -> None:
        """Look at the clock.

        Raises:
            PrepareError: the time is over.
        """
        waited = time.monotonic() - self._began
        if self._timeout is not None and waited >= self._timeout:
            raise PrepareError(
                f"the data were not prepared within {self._timeout:g} s",
                found=f"{holder} is building, {_progress(folder)}",
                where=self._path,
                remedy="give it more time (timeout=), or end that process: another one takes over",
            )
        if waited < self._next:
            return
        who = f"{self.me} waits" if self.me else "waiting"
        whom = f"{who} for {self._path}, which {holder} builds{_since(holder)}"
        text = f"{whom}: {_progress(folder)}, after {waited:.0f} s"
        if holder.is_visible and holder.is_of_this_process:
            text += "; that is this very process, whose builder must not wait for what waits for it"
        if self._draws:
            self._draw(text)
            took = time.monotonic() - self._began - waited
            self._next = waited + max(_DRAWN, took / _SHARE)
        else:
            self._next *= 2
            _log.warning("%s", text)

    def _draw(self, text: str) -> None:
        from rich.console import Console
        from rich.text import Text

        if self._line is None:
            self._line = Console(stderr=True).status("")
            self._line.start()
        self._line.update(Text(text))


def _since(holder: Holder) -> str:
    with suppress(ValueError, OverflowError, OSError):  # its clock may say anything
        if holder.since:
            return f" since {time.strftime('%H:%M:%S', time.localtime(holder.since))}"
    return ""


def _progress(folder: Path) -> str:
    """How far the build in a folder has come."""
    count = nbytes = 0
    for build in folder.glob(f"{BUILD}*"):
        for place, _, names in os.walk(build):
            for name in names:
                with suppress(OSError):
                    nbytes += os.lstat(os.path.join(place, name)).st_size
                    count += 1
    return f"{count} files and {nbytes / 1e6:,.1f} MB so far"
