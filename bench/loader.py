"""Rows per second of the loader, against a hand-written numpy gather over the same shuffled order.

The reference is what one would write by hand if nothing else mattered: one thread, the data memory-mapped, each
batch gathered into one buffer that is used again, the order known beforehand.

Workloads: W1 ragged float32 rows of 16 to 240 x 64, padded, batch 64. W2 samples of 512 int32, batch 256. W3 byte
strings of 20 to 100 KB, batch 64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.turns import in_turn, medians
from bench.workloads import Array, blobs, ragged, tokens

import rankfeed as rf


def samples(make: Callable[..., Iterator[Any]], count: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    return ({"x": row} for row in make(count, rng))


WORKLOADS: dict[str, tuple[Callable[..., Iterator[dict[str, Any]]], int, int]] = {
    "W1 ragged": (partial(samples, ragged), 20_000, 64),
    "W2 tokens": (partial(samples, tokens), 100_000, 256),
    "W3 bytes": (partial(samples, blobs), 20_000, 64),
}


class Reference:
    """The hand-written gather: one flat file, offsets, one buffer."""

    def __init__(self, source: rf.Source, folder: Path, batch: int, kind: str) -> None:
        self.batch, self.kind = batch, kind
        if kind == "W2 tokens":
            path = folder / "flat"
            with path.open("wb") as file:
                for start in range(0, len(source), 4096):
                    ids = range(start, min(start + 4096, len(source)))
                    file.write(source.fetch(ids)["x"].gather().tobytes())  # type: ignore[attr-defined]
            self.values: Array = np.memmap(path, np.int32, "r").reshape(-1, 512)
            self.buffer: Array = np.empty((batch, 512), np.int32)
            return
        lengths = []
        with (folder / "flat").open("wb") as file:
            for start in range(0, len(source), 256):
                column: Any = source.fetch(range(start, min(start + 256, len(source))))["x"]
                lengths.append(column.lengths)
                for row in column.rows():
                    file.write(row if isinstance(row, bytes) else row.tobytes())
        self.offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).tolist()
        if kind == "W1 ragged":
            self.values = np.memmap(folder / "flat", np.float32, "r").reshape(-1, 64)
            self.buffer = np.empty((batch, 240, 64), np.float32)
        else:
            self.values = np.memmap(folder / "flat", np.uint8, "r")
            self.buffer = np.empty((batch, 100_000), np.uint8)

    def run(self, order: Array) -> int:
        values, buffer = np.asarray(self.values), self.buffer
        done = 0
        for start in range(0, len(order), self.batch):
            ids = order[start : start + self.batch]
            done += len(ids)
            if self.kind == "W2 tokens":
                np.take(values, ids, axis=0, out=buffer[: len(ids)], mode="clip")
                continue
            for slot, sample in enumerate(ids.tolist()):
                low, high = self.offsets[sample], self.offsets[sample + 1]
                buffer[slot, : high - low] = values[low:high]
                if self.kind == "W1 ragged":
                    buffer[slot, high - low :] = 0
        return done


def drain(loader: rf.Loader) -> int:
    done = 0
    for batch in loader:
        done += len(batch["x"])
    return done


def measure(name: str, scale: float, runs: int, folder: Path) -> dict[str, Any]:
    make, count, batch = WORKLOADS[name]
    count = max(batch, int(count * scale))
    source = rf.write(make(count, np.random.default_rng(0)), folder / "packed", progress=False)
    reference = Reference(source, folder, batch, name)
    plan = rf.Plan(len(source), shuffle="global", seed=1)
    order = plan.sample_ids(0, np.arange(len(source)))
    one = rf.Topology()
    contestants: dict[str, Callable[[], int]] = {"reference": lambda: reference.run(order)}
    for label, options in {
        "inline": {},
        "1 thread": {"num_workers": 1},
        "2 threads": {"num_workers": 2},
    }.items():
        loader = rf.Loader(source, batch, shuffle="global", seed=1, topology=one, **options)  # type: ignore[arg-type]
        contestants[label] = lambda loader=loader: drain(loader)  # type: ignore[misc]
    rates = in_turn(contestants, runs, warm=2)
    ratios = {
        label: statistics.median(a / b for a, b in zip(values, rates["reference"], strict=True))
        for label, values in rates.items()
    }
    return {"workload": name, "samples": count, "rows_per_second": medians(rates), "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of samples")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (after two to warm up)")
    parser.add_argument("--only", choices=[name.split()[0] for name in WORKLOADS], help="one workload")
    parser.add_argument("--folder", help="where to put the data (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    results = []
    for name in WORKLOADS:
        if options.only and not name.startswith(options.only):
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results.append(measure(name, options.scale, options.runs, Path(folder)))
        if not options.json:
            row = results[-1]
            print(f"{name} ({row['samples']:,} samples)")
            for label, ratio in row["ratio"].items():
                print(f"  {label:<10} {row['rows_per_second'][label]:>12,.0f} rows/s   {ratio:5.2f}")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
