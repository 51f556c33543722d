"""The samples of the benchmarks, and what a consumer does with a batch. Imports nothing but NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


def ragged(count: int, rng: np.random.Generator) -> Iterator[Array]:
    noise = rng.standard_normal((1 << 16, 64), dtype=np.float32)
    for length in rng.integers(16, 241, count).tolist():
        start = int(rng.integers(0, len(noise) - length))
        yield noise[start : start + length]


def tokens(count: int, rng: np.random.Generator) -> Iterator[Array]:
    for _ in range(count):
        yield rng.integers(0, 50_000, 512, dtype=np.int32)


def blobs(count: int, rng: np.random.Generator) -> Iterator[bytes]:
    noise = rng.bytes(1 << 20)
    for size in rng.integers(20_000, 100_001, count).tolist():
        start = int(rng.integers(0, len(noise) - size))
        yield noise[start : start + size]


class Workload(NamedTuple):
    """Samples of one kind."""

    make: Callable[[int, np.random.Generator], Iterator[Any]]
    samples: int
    batch_size: int
    text: str

    def rows(self, samples: int) -> Iterator[Any]:
        """The first samples, the same in every process."""
        return self.make(samples, np.random.default_rng(0))


WORKLOADS = {
    "ragged": Workload(ragged, 20_000, 64, "float32 arrays of 16 to 240 rows by 64, padded in batches of 64"),
    "tokens": Workload(tokens, 400_000, 256, "rows of 512 int32 in batches of 256"),
    "bytes": Workload(blobs, 20_000, 64, "byte strings of 20 to 100 KB in batches of 64, not decoded"),
}


def consume(batch: Any) -> int:
    """Read one value of every cache line, as the cheapest consumer does; the number of samples in the batch."""
    rows = batch["x"] if isinstance(batch, dict) else batch
    if isinstance(rows, list):
        for row in rows:
            np.frombuffer(row, np.uint8)[::64].max()
    else:
        values = rows if isinstance(rows, np.ndarray) else rows.numpy()
        # Of 4 bytes each: a step of 16 is a cache line.
        values.reshape(-1)[::16].max()
    return len(rows)


def read_all(folder: Path) -> None:
    """Read the files below a folder into the page cache: the kernel may have dropped them since their last use."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass
