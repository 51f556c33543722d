"""Rates, waiting times and memory of a loader."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from rankfeed.loading.batch_builder import BatchResult
from rankfeed.plan import Cursor


@dataclass
class LoaderStats:
    """Counts since the loader was created, on this rank.

    One thread iterates, any other may read at any time. There is no lock: parts are read in the reverse order of
    their update, so that no ratio exceeds one.

    Attributes:
        steps: batches delivered.
        samples: samples delivered, without padding rows.
        seconds: from the first request to the last answer, pauses between epochs included.
        padding_bytes: bytes of ragged padding.
        padded_bytes: bytes of ragged columns with their padding.
        cache_hits: rows whose chunk was already decoded when they were read.
        cache_lookups: rows that were read from chunks.
        epoch: the current epoch, or the last one.
        epoch_step: steps done of it, those before a resume included.
        epoch_steps: its steps; 0 if unknown.
    """

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    padding_bytes: int = 0
    padded_bytes: int = 0
    cache_hits: int = 0
    cache_lookups: int = 0
    epoch: int = 0
    epoch_step: int = 0
    epoch_steps: int = 0
    _first_request: float = field(default=0.0, repr=False)
    #: Seconds waited so far, and the time of the open request (0.0 if there is none): one tuple, so that a reader
    #: never counts a wait twice.
    _waits: tuple[float, float] = field(default=(0.0, 0.0), repr=False)
    _steps_before: int = field(default=0, repr=False)

    def begin(self, begun: Cursor, steps_left: int | None) -> None:
        """An epoch begins, or continues at a position; the number of steps of a stream is unknown."""
        self.epoch, self._steps_before, self.epoch_step = begun.epoch, begun.steps, begun.steps
        self.epoch_steps = 0 if steps_left is None else begun.steps + steps_left

    def request(self) -> None:
        """The consumer asks for a batch and waits from now on."""
        now = time.perf_counter()
        self._first_request = self._first_request or now
        self._waits = self._waits[0], now

    def answer(self) -> None:
        """The wait is over: a batch, an error or the end of the epoch."""
        now = time.perf_counter()
        self.seconds = now - self._first_request
        waited, requested = self._waits
        self._waits = waited + now - requested, 0.0

    def deliver(self, result: BatchResult) -> None:
        """The wait is over, with a batch."""
        self.answer()
        self.steps += 1
        self.epoch_step = self._steps_before + result.step + 1
        self.samples += len(result.sample_ids)
        self.padded_bytes += result.padding[1]
        self.padding_bytes += result.padding[0]
        self.cache_lookups += result.lookups[1]
        self.cache_hits += result.lookups[0]

    def as_dict(self) -> dict[str, int | float]:
        """Counts, rates, waits (an open one included), cache hits, padding and memory, as plain numbers."""
        hits, padding = self.cache_hits, self.padding_bytes
        waited, requested = self._waits
        now = time.perf_counter()
        waiting = max(0.0, now - requested) if requested else 0.0
        waited += waiting
        seconds = max(self.seconds, waited, now - self._first_request if requested else 0.0)
        return {
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "epoch_steps": self.epoch_steps,
            "steps": self.steps,
            "samples": self.samples,
            "seconds": seconds,
            "samples_per_second": self.samples / seconds if seconds else 0.0,
            "waiting_seconds": waiting,
            "waited_seconds": waited,
            "waited_share": waited / seconds if seconds else 0.0,
            "cache_lookups": self.cache_lookups,
            "cache_hits": hits,
            "cache_hit_share": hits / self.cache_lookups if hits else 0.0,
            "padded_bytes": self.padded_bytes,
            "padding_bytes": padding,
            "padding_share": padding / self.padded_bytes if padding else 0.0,
            "private_bytes": private_bytes(),
        }


def private_bytes() -> int:
    """Resident memory of this process without file-backed and shared pages, in bytes; 0 where it is unknown.

    Mapped data files do not count: the kernel takes their pages back when it needs them.
    """
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
