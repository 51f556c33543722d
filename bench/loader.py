"""The Loader alone: large data, transforms, a cold page cache, small batches. `bench.performance` has its peers.

- ``large``: 8 GB in 4 and in 64 shards, as a ratio to one thread that gathers with NumPy into one buffer.
- ``transforms``: 1 ms a sample that holds the GIL, in two processes against one; 100 us that release it, in two
  threads against none.
- ``cold``: data that are not in the page cache, as a ratio to ``preadv`` with O_DIRECT in 32 threads.
- ``small``: microseconds of a batch of 256 small rows, and of the copy in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.peers import Reference
from bench.turns import in_turn, medians
from bench.workloads import WORKLOADS as KINDS
from bench.workloads import Array, blobs, consume, ragged, read_all, tokens

import rankfeed as rf

Figures = dict[str, Any]


def samples(make: Callable[..., Iterator[Any]], count: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    return ({"x": row} for row in make(count, rng))


#: What tar shards and other formats are measured with: samples, their number, batch size.
WORKLOADS: dict[str, tuple[Callable[..., Iterator[dict[str, Any]]], int, int]] = {
    "W1 ragged": (partial(samples, ragged), 20_000, 64),
    "W2 tokens": (partial(samples, tokens), 100_000, 256),
    "W3 bytes": (partial(samples, blobs), 20_000, 64),
}


def drain(batches: Iterable[Any], seconds: float = 1e9) -> int:
    """Take batches for so long; the number of their samples."""
    until, done = time.perf_counter() + seconds, 0
    for batch in batches:
        done += consume(batch)
        if time.perf_counter() > until:
            break
    return done


def ratios(contestants: dict[str, Callable[[], int]], runs: int, against: str) -> Figures:
    """Medians of the rates, and of their ratios to one contestant."""
    rates = in_turn(contestants, runs)
    found = {
        label: round(statistics.median(a / b for a, b in zip(values, rates[against], strict=True)), 3)
        for label, values in rates.items()
    }
    return {"per_second": medians(rates), "ratio": found}


def again(reference: Reference) -> int:
    return drain(reference.epoch(), 3.0)


def large(folder: Path, runs: int, scale: float) -> Figures:
    found: Figures = {}
    for name, count in (("ragged", 244_000), ("tokens", 3_900_000), ("bytes", 133_000)):
        count, kind = int(count * scale), KINDS[name]
        reference = Reference(name, kind, count, folder)
        reference.write()
        reference.open()
        for shards in (4, 64):
            with tempfile.TemporaryDirectory(dir=folder) as data:
                size = (folder / "values").stat().st_size // shards
                rows = ({"x": row} for row in kind.rows(count))
                source = rf.write(rows, data, shard_bytes=size, progress=False)
                read_all(folder)
                contestants: dict[str, Callable[[], int]] = {"reference": partial(again, reference)}
                options: dict[str, Any] = {"shuffle": "global", "lanes": 1, "bytes_as": "view"}
                for label, workers in (("inline", 0), ("2 threads", 2)):
                    loader = rf.Loader(source, kind.batch_size, num_workers=workers, **options)
                    contestants[label] = partial(drain, loader, 3.0)
                found[f"{name}, {shards} shards"] = ratios(contestants, runs, "reference")
    return found


def burn(sample: Any) -> Any:
    """Hold the GIL for 1 ms of CPU time."""
    until = time.thread_time() + 1e-3
    while time.thread_time() < until:
        pass
    return sample


class Hash:
    """About 100 us of native work that releases the GIL."""

    def __init__(self) -> None:
        work = b"0" * (1 << 16)  # small enough for the caches, as what it is measured for
        began = time.perf_counter()
        for _ in range(2000):
            hashlib.sha256(work).digest()
        self.work = b"0" * int(len(work) * 2000 * 100e-6 / (time.perf_counter() - began))

    def __call__(self, sample: Any) -> Any:
        hashlib.sha256(self.work).digest()
        return sample


def transforms(folder: Path, runs: int, scale: float) -> Figures:
    rows = ({"x": row} for row in tokens(int(20_000 * scale), np.random.default_rng(0)))
    source = rf.write(rows, folder / "data", progress=False)

    def loader(transform: Any, workers: int, kind: Any) -> Callable[[], int]:
        made = rf.Loader(source, 64, shuffle=True, transform=transform, num_workers=workers, worker_kind=kind)
        return partial(drain, made, 3.0)

    holding = {f"{workers} processes": loader(burn, workers, "process") for workers in (1, 2)}
    releasing = {f"{workers} threads": loader(Hash(), workers, "thread") for workers in (0, 2)}
    return {
        "1 ms with the GIL": ratios(holding, runs, "1 processes"),
        "100 us without the GIL": ratios(releasing, runs, "0 threads"),
    }


def evict(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_directly(path: Path, order: Array, size: int) -> int:
    """Read blocks of a file past the page cache, in 32 threads."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with ThreadPoolExecutor(32) as threads:
            # A mapping of its own, since O_DIRECT needs aligned memory.
            found = threads.map(lambda block: os.preadv(file, [mmap.mmap(-1, size)], block * size), order.tolist())
            return sum(each == size for each in found)
    finally:
        os.close(file)


def cold(folder: Path, runs: int, scale: float) -> Figures:
    found: Figures = {}
    for size in (65_536, 2_048):
        count = int((1 << 30) * scale) // size if size > 4096 else int(20_000 * scale)
        rng, flat, data = np.random.default_rng(0), folder / "flat", folder / f"rows{size}"
        rows = [rng.integers(0, 256, size, np.uint8) for _ in range(16)]
        rf.write(({"x": rows[i % 16]} for i in range(count)), data, progress=False)
        with flat.open("wb") as file:
            for i in range(count):
                file.write(rows[i % 16])
        block = max(size, 4096)
        order = rng.permutation(count * size // block)
        loader = rf.Loader(rf.open(data), 64, shuffle="global", drop_behind=True)

        def ours(loader: rf.Loader, data: Path) -> int:
            evict(data)
            return drain(loader)

        contestants = {
            "O_DIRECT": partial(read_directly, flat, order, block),
            "Loader": partial(ours, loader, data),
        }
        found[f"rows of {size} bytes"] = ratios(contestants, runs, "O_DIRECT")
    return found


def small(folder: Path, runs: int, scale: float) -> Figures:
    count, rng = int(200_000 * scale), np.random.default_rng(0)
    values = rng.integers(0, 9, (count, 8), np.int32)
    kinds: dict[str, Iterable[Array]] = {
        "fixed": values,
        "ragged": (row[: 1 + i % 8] for i, row in enumerate(values)),
    }
    found: Figures = {}
    for name, rows in kinds.items():
        source = rf.write(({"x": row} for row in rows), folder / name, progress=False)
        loader, times = rf.Loader(source, 256, shuffle="global"), []
        for _ in range(100 * runs):  # of 10 ms
            began = time.perf_counter()
            steps = sum(1 for _ in loader)
            times.append((time.perf_counter() - began) / steps)
        ids = loader.plan.sample_ids(0, np.arange(256))
        column: Any = source.fetch(ids)["x"]
        out = column.gather() if name == "fixed" else column.pad()
        copy = column.pointers.copy_rows if name == "fixed" else column.pointers.copy_padded
        copies = []
        for _ in range(5000):
            began = time.perf_counter()
            copy(out)
            copies.append(time.perf_counter() - began)
        whole, part = (round(statistics.median(each) * 1e6, 1) for each in (times, copies))
        found[name] = {"batch_us": whole, "copy_us": part}
    return found


CASES = {each.__name__: each for each in (large, transforms, cold, small)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of samples")
    parser.add_argument("--runs", type=int, default=5, help="turns that count")
    parser.add_argument("--only", choices=list(CASES), action="append", help="one case (repeatable)")
    parser.add_argument("--folder", help="where to put the data, 18 GB (default: a temporary folder)")
    options = parser.parse_args()
    for name in options.only or CASES:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(json.dumps({name: CASES[name](Path(folder), options.runs, options.scale)}, indent=1), flush=True)


if __name__ == "__main__":
    main()
