"""Rows per second from a Lance table: our loader beside Lance's own, over the same rows.

Two tables: 400,000 x 128 float32 in ten fragments, batch 256; 20,000 byte strings of 2 to 20 KB, batch 64. Lance's
map-style loader is `SafeLanceDataset` in a stock DataLoader with a shuffling sampler (with and without worker
processes, the better of which counts), its iterable one `LanceDataset` with batches shuffled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import rankfeed as rf


def vectors(count: int, rng: np.random.Generator) -> Any:
    import pyarrow as pa

    values = pa.array(rng.standard_normal(count * 128, dtype=np.float32))
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(values, 128)})


def texts(count: int, rng: np.random.Generator) -> Any:
    import pyarrow as pa

    noise = rng.bytes(1 << 20)
    sizes, starts = rng.integers(2000, 20_001, count).tolist(), rng.integers(0, 1 << 19, count).tolist()
    rows = [noise[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    # Lance compresses binary columns unless it is told not to.
    field = pa.field("x", pa.binary(), metadata={"lance-encoding:compression": "none"})
    return pa.table([pa.array(rows, pa.binary())], schema=pa.schema([field]))


WORKLOADS: dict[str, tuple[Callable[[int, np.random.Generator], Any], int, int]] = {
    "vectors": (vectors, 400_000, 256),
    "bytes": (texts, 20_000, 64),
}


def write(make: Callable[..., Any], count: int, path: str) -> None:
    import lance

    rng = np.random.default_rng(0)
    for number in range(10):
        lance.write_dataset(make(count // 10, rng), path, mode="append" if number else "create")


def drained(batches: Iterable[Any]) -> int:
    return sum(len(batch["x"] if isinstance(batch, dict) else batch) for batch in batches)


def plain(batch: Any, **_: Any) -> Any:
    """What becomes of a batch of bytes, for which Lance has no tensor."""
    return batch.column(0).to_pylist()


def lance_loaders(path: str, batch: int, kind: str) -> dict[str, Iterable[Any]]:
    from lance.sampler import ShardedBatchSampler
    from lance.torch.data import LanceDataset, SafeLanceDataset, get_safe_loader
    from torch.utils.data import DataLoader

    safe = SafeLanceDataset(path)
    options: dict[str, Any] = {} if kind == "vectors" else {"to_tensor_fn": plain}
    if kind == "bytes":
        options["columns"] = ["x"]

    def iterable() -> Any:
        return LanceDataset(path, batch, sampler=ShardedBatchSampler(0, 1, randomize=True), **options)

    def joined(rows: list[dict[str, Any]]) -> Any:
        values = [row["x"] for row in rows]
        return np.asarray(values, np.float32) if kind == "vectors" else values

    return {
        "Lance map-style": DataLoader(safe, batch, shuffle=True, collate_fn=joined),  # type: ignore[arg-type]
        "Lance map-style, 2 workers": get_safe_loader(safe, batch, num_workers=2, shuffle=True, collate_fn=list),
        "Lance iterable": DataLoader(iterable(), batch_size=None),
    }


def measure(kind: str, scale: float, runs: int, folder: Path) -> dict[str, Any]:
    make, count, batch = WORKLOADS[kind]
    count = max(10 * batch, int(count * scale))
    path = str(folder / "rows.lance")
    write(make, count, path)
    loaders: dict[str, Iterable[Any]] = lance_loaders(path, batch, kind)
    size = sum(file.stat().st_size for file in Path(path, "data").iterdir())
    # The whole table fits in the cache, or an eighth of it does: then ranges are read again each epoch.
    caches = {"all cached": 1 << 30, "an eighth cached": size // 8}
    for cached, cache_bytes in caches.items():
        for shuffle, workers in (("window", 0), ("window", 2), ("global", 0), ("global", 2)):
            loaders[f"rankfeed {shuffle}, {workers} threads, {cached}"] = rf.Loader(
                rf.open(path, cache_bytes=cache_bytes),
                batch,
                shuffle=shuffle,  # type: ignore[arg-type]
                window=min(65536, count // 16 // 64) if cache_bytes < size else 65536,
                num_workers=workers,
                topology=rf.Topology(),
            )
    rates: dict[str, list[float]] = {label: [] for label in loaders}
    for turn in range(runs + 1):  # in turn, but not apart: Lance does not survive a fork
        for label, loader in loaders.items():
            began = time.perf_counter()
            done = drained(loader)
            if turn:
                rates[label].append(done / (time.perf_counter() - began))
    medians = {label: statistics.median(values) for label, values in rates.items()}
    best = max((label for label in medians if label.startswith("Lance map")), key=lambda label: medians[label])
    ratios = {
        label: statistics.median(a / b for a, b in zip(values, rates[best], strict=True))
        for label, values in rates.items()
    }
    return {"workload": kind, "rows": count, "beside": best, "rows_per_second": medians, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of rows")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (after one to warm up)")
    parser.add_argument("--only", choices=list(WORKLOADS), help="one workload")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = []
    for kind in WORKLOADS:
        if options.only in (None, kind):
            with tempfile.TemporaryDirectory() as folder:
                results.append(measure(kind, options.scale, options.runs, Path(folder)))
    if options.json:
        print(json.dumps(results))
        return
    for row in results:
        print(f"{row['workload']} ({row['rows']:,} rows; ratio to {row['beside']})")
        for label, ratio in row["ratio"].items():
            print(f"  {label:<44} {row['rows_per_second'][label]:>12,.0f} rows/s   {ratio:6.2f}")


if __name__ == "__main__":
    main()
