"""Contestants that run in turn, each in a process of its own.

In turn, so that the machine's moods hit all alike; and apart, so that none has to bear with what another keeps in
memory: mapped files, caches, the allocator's habits.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

#: Does its work once, and says how many samples that were.
Work = Callable[[], int]


def rate(work: Work) -> float:
    """Samples per second."""
    began = time.perf_counter()
    done = work()
    return done / (time.perf_counter() - began)


def _serve(work: Work, asked: Connection) -> None:
    try:
        while asked.recv():
            asked.send(rate(work))
    except EOFError:
        pass
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)  # a contestant's threads and caches must not hold up the end


def in_turn(contestants: Mapping[str, Work], runs: int, *, warm: int = 1) -> dict[str, list[float]]:
    """Samples per second of each contestant in each turn.

    Args:
        contestants: what each does; called in a forked child.
        runs: turns that count.
        warm: turns before them.

    Raises:
        SystemExit: a contestant ended before its time.
    """
    context = multiprocessing.get_context("fork")
    running = {}
    for label, work in contestants.items():
        ask, asked = context.Pipe()
        context.Process(target=_serve, args=(work, asked), daemon=True).start()
        asked.close()
        running[label] = ask
    rates: dict[str, list[float]] = {label: [] for label in contestants}
    for turn in range(warm + runs):
        for label, ask in running.items():
            try:
                ask.send(True)
                got = ask.recv()
            except (EOFError, OSError):
                raise SystemExit(f"{label} ended before its time") from None
            if turn >= warm:
                rates[label].append(got)
    for ask in running.values():
        ask.send(False)
    return rates


def medians(rates: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each contestant's turns."""
    return {label: statistics.median(values) for label, values in rates.items()}
