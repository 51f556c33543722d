"""How a loader is doing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from rankfeed.loading.maker import Made


@dataclass
class Stats:
    """Counts since the loader was made, on this rank.

    One thread iterates; any other may look on at any time. There is no lock: what is written later is read
    earlier, so that a share is never above one.

    Attributes:
        steps: batches delivered.
        samples: samples delivered (rows that only fill are not counted).
        seconds: seconds from the first request to the last answer, pauses between epochs included.
        padding: bytes of ragged padding.
        padded: bytes of ragged columns with their padding.
        found: rows whose chunk was decoded already when they were read.
        looked_up: rows that were read of chunks.
        epoch: the epoch in hand, or the last one if none is.
        epoch_step: steps of it that are done, those before a resumption too.
        epoch_steps: steps that it has; 0 if nobody knows.
    """

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    padding: int = 0
    padded: int = 0
    found: int = 0
    looked_up: int = 0
    epoch: int = 0
    epoch_step: int = 0
    epoch_steps: int = 0
    _began: float = field(default=0.0, repr=False)
    #: Seconds that the consumer waited before, and when it asked for what it waits for now (0.0 if it does not):
    #: in one, so that whoever looks on never counts a wait twice.
    _waits: tuple[float, float] = field(default=(0.0, 0.0), repr=False)
    _before: int = field(default=0, repr=False)

    def begins(self, epoch: int, done: int, left: int | None = None) -> None:
        """An epoch is begun, or gone on with after so many steps; nobody knows how many of a stream are left."""
        steps = 0 if left is None else done + left
        self.epoch, self._before, self.epoch_step, self.epoch_steps = epoch, done, done, steps

    def asked(self) -> None:
        """The consumer asks for a batch, and waits from now on."""
        now = time.perf_counter()
        self._began = self._began or now
        self._waits = self._waits[0], now

    def answered(self) -> None:
        """It waits no longer: a batch, an error or the end of the epoch is there."""
        now = time.perf_counter()
        self.seconds = now - self._began
        waited, asked = self._waits
        self._waits = waited + now - asked, 0.0

    def delivered(self, made: Made) -> None:
        """Count the batch that was asked for."""
        self.answered()
        self.steps += 1
        self.epoch_step = self._before + made.step + 1
        self.samples += len(made.sample_ids)
        self.padded += made.padding[1]
        self.padding += made.padding[0]
        self.looked_up += made.lookups[1]
        self.found += made.lookups[0]

    def as_dict(self) -> dict[str, int | float]:
        """Counts, rates, waiting, cache hits, padding and memory as plain numbers (seconds, shares of one, bytes).

        A wait that lasts is in it as far as it has come.
        """
        found, padding = self.found, self.padding
        waited, asked = self._waits
        now = time.perf_counter()
        waiting = max(0.0, now - asked) if asked else 0.0
        waited += waiting
        seconds = max(self.seconds, waited, now - self._began if asked else 0.0)
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
            "cache_lookups": self.looked_up,
            "cache_hits": found,
            "cache_hit_share": found / self.looked_up if found else 0.0,
            "padded_bytes": self.padded,
            "padding_bytes": padding,
            "padding_share": padding / self.padded if padding else 0.0,
            "private_bytes": private_bytes(),
        }


def private_bytes() -> int:
    """Memory of this process that is no file's and nobody else's, in bytes; 0 where the system doesn't tell.

    Pages of data that are mapped don't count, though no other process may have them mapped: the kernel takes them
    back when it needs them. (USS counts them, and takes 20 ms to read for each GiB that is mapped.)
    """
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
