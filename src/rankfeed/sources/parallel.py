"""Work on many files in threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rankfeed._util.progress import progress_bar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: Most of the time is spent waiting for the disk.
_THREADS = min(16, 4 * (os.cpu_count() or 1))


def in_parallel(
    work: Callable[[_Item], _Result], items: Sequence[_Item], label: str = "", *, progress: bool = False
) -> list[_Result]:
    """Results of ``work`` for each item, in order; the first error stops the rest."""
    stop = threading.Event()

    def one(item: _Item) -> _Result:
        if stop.is_set():
            return None  # type: ignore[return-value]  # another item's error is raised
        try:
            return work(item)
        except BaseException:
            stop.set()
            raise

    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(_THREADS) as pool, progress_bar(label, len(items), enabled=progress) as advance:
        done = []
        for found in pool.map(one, items):
            advance()
            done.append(found)
        return done
