"""Work on many files in threads."""

import os
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
    """Results of ``work`` for each item, in order; an error stops the rest."""
    if len(items) < 2:
        return [work(item) for item in items]
    results = []
    with ThreadPoolExecutor(_THREADS) as pool, progress_bar(label, len(items), enabled=progress) as advance:
        for result in pool.map(work, items):  # if an item raises, those that have not begun are cancelled
            results.append(result)
            advance()
    return results
