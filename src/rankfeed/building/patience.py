"""Waiting for another process that builds: who it is, since when, how far it has come, and when it is enough."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from rankfeed.building.holder import Holder
from rankfeed.building.turn import BUILD
from rankfeed.errors import PrepareError

_log = logging.getLogger("rankfeed")
#: Seconds after which a waiting process says for whom it waits; then after twice as many, and so on.
_PATIENCE = 5.0


class Patience:
    """Says, now and then, for whom a process waits; and when it has waited enough."""

    def __init__(self, path: Path, me: str, timeout: float | None) -> None:
        self._path, self._me, self._timeout = path, me, timeout
        self._began = time.monotonic()
        self._next = _PATIENCE

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
        if waited >= self._next:
            self._next *= 2
            who = f"{self._me} waits" if self._me else "waiting"
            _log.warning(
                "%s for %s, which %s builds: %s, after %.0f s", who, self._path, holder, _progress(folder), waited
            )


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
