"""Work on many files in threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rankfeed._util.progress import progress_bar

#: Most of the time is spent waiting for the disk.
_THREADS = min(16, 4 * (os.cpu_count() or 1))


def in_parallel(work: Callable[[str], Any], paths: Sequence[str], label: str, *, progress: bool) -> list[Any]:
    """Results of ``work`` for each path, in order; the first error stops the rest."""
    stop = threading.Event()

    def one(path: str) -> Any:
        if stop.is_set():
            return None
        try:
            return work(path)
        except BaseException:
            stop.set()
            raise

    if len(paths) < 2:
        return [work(path) for path in paths]
    with ThreadPoolExecutor(_THREADS) as pool, progress_bar(label, len(paths), enabled=progress) as advance:
        done = []
        for found in pool.map(one, paths):
            advance()
            done.append(found)
        return done
