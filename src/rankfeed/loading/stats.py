"""How a loader is doing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankfeed.loading.maker import Made


@dataclass
class Stats:
    """Counts since the loader was made, on this rank.

    Attributes:
        steps: batches delivered.
        samples: samples delivered (rows that only fill are not counted).
        waited: seconds that the consumer waited for batches.
        seconds: seconds from the first request to the last delivery, pauses between epochs included.
        padding: bytes of ragged padding.
        padded: bytes of ragged columns with their padding.
    """

    steps: int = 0
    samples: int = 0
    waited: float = 0.0
    seconds: float = 0.0
    padding: int = 0
    padded: int = 0
    _began: float = field(default=0.0, repr=False)

    def delivered(self, made: Made, asked: float) -> None:
        """Count a batch that was asked for at ``asked`` (of ``time.perf_counter``) and is delivered now."""
        now = time.perf_counter()
        self._began = self._began or asked
        self.seconds = now - self._began
        self.waited += now - asked
        self.steps += 1
        self.samples += len(made.sample_ids)
        self.padding += made.padding[0]
        self.padded += made.padding[1]

    def as_dict(self) -> dict[str, Any]:
        """Rates, waiting, padding and memory as plain numbers (seconds, shares of one, bytes)."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "seconds": self.seconds,
            "samples_per_second": self.samples / self.seconds if self.seconds else 0.0,
            "waited_seconds": self.waited,
            "waited_share": self.waited / self.seconds if self.seconds else 0.0,
            "padding_share": self.padding / self.padded if self.padded else 0.0,
            "private_bytes": private_bytes(),
        }


def private_bytes() -> int | None:
    """Memory that only this process has (USS), in bytes; None where the system doesn't tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
