"""Samples per second out of WebDataset shards, beside WebDataset's own loader and wids.

W1 ragged float32 rows of 16 to 240 x 64 as `.npy`, batch 64. W2 samples of 512 int32 as `.npy`, batch 256. W3
byte strings of 20 to 100 KB, not decoded, batch 64. Each contestant in the orders it offers: rankfeed in global
shuffle, wids in global shuffle and in its own order of chunks, WebDataset with shuffled shards and a buffer of
1000. All turn the members into arrays of a batch (lists of bytes for W3), in one process, which is the fastest for
the peers on few cores (``--workers`` tries worker processes too).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.loader import WORKLOADS
from bench.peers import of_member
from bench.turns import in_turn, medians

import rankfeed as rf

Array = np.ndarray[Any, Any]

#: Bytes in a shard.
SHARD = 128 << 20


def write(folder: Path, name: str, count: int) -> list[Path]:
    import webdataset

    make = WORKLOADS[name][0]
    extension = "bin" if name == "W3 bytes" else "npy"
    pattern = f"{folder}/shard-%04d.tar"
    with webdataset.ShardWriter(pattern, maxcount=10**9, maxsize=SHARD, verbose=0) as writer:
        for number, row in enumerate(make(count, np.random.default_rng(0))):
            writer.write({"__key__": f"{number:08d}", extension: row["x"]})
    return sorted(folder.glob("*.tar"))


def collated(values: list[Any]) -> Any:
    """A batch: padded, stacked, or a list of bytes."""
    if isinstance(values[0], bytes):
        return values
    if values[0].ndim == 1:
        return torch.from_numpy(np.stack(values))
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(value) for value in values], batch_first=True)


class Wids:
    """wids' data set in its best setting: local files, no copy, all shards open."""

    def __init__(self, shards: list[Path], counts: list[int], folder: Path) -> None:
        import wids

        listing = [{"url": str(path), "nsamples": count} for path, count in zip(shards, counts, strict=True)]
        with contextlib.redirect_stderr(io.StringIO()):
            # Links stand where wids would copy the shards to.
            for path in shards:
                with contextlib.suppress(FileExistsError):
                    os.link(path, folder / path.name)
            self.data = wids.ShardListDataset(
                listing, cache_dir=str(folder), lru_size=200, transformations=[lambda sample: sample], keep=True
            )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        sample = self.data[index]
        return of_member(next(value for name, value in sample.items() if name in (".npy", ".bin")))

    def chunks(self) -> Iterator[int]:
        import wids

        return iter(wids.ChunkedSampler(self.data, chunksize=2000, shuffle=True))


def drain(loader: Any) -> int:
    done = 0
    for batch in loader:
        value = next(iter(batch.values())) if isinstance(batch, dict) else batch
        done += len(value)
    return done


def contestants(name: str, shards: list[Path], folder: Path, workers: int) -> dict[str, Callable[[], int]]:
    import webdataset

    batch = WORKLOADS[name][2]
    extension = "bin" if name == "W3 bytes" else "npy"
    source = rf.open(shards, columns=[extension])
    counts = source._shards.counts.tolist()  # type: ignore[attr-defined]
    one = rf.Topology()
    out: dict[str, Callable[[], int]] = {}
    for label, options in {"rankfeed": {}, "rankfeed, 1 thread": {"num_workers": 1}}.items():
        loader = rf.Loader(source, batch, shuffle="global", seed=1, topology=one, **options)  # type: ignore[arg-type]
        out[label] = lambda loader=loader: drain(loader)  # type: ignore[misc]
    indexed = Wids(shards, counts, folder)
    torch_options: dict[str, Any] = {"batch_size": batch, "collate_fn": collated}

    def by_webdataset(count: int = 0) -> int:
        data: Any = webdataset.WebDataset([str(path) for path in shards], shardshuffle=len(shards))
        data = (
            data.shuffle(1000)
            .map(lambda sample: of_member(sample[extension]))
            .batched(batch, collation_fn=collated)
        )
        return drain(webdataset.WebLoader(data, batch_size=None, num_workers=count))

    def by_wids(chunks: bool, count: int = 0) -> int:
        sampler: Any = list(indexed.chunks()) if chunks else torch.randperm(len(indexed)).tolist()
        return drain(torch.utils.data.DataLoader(indexed, sampler=sampler, num_workers=count, **torch_options))

    out["WebDataset"] = by_webdataset
    out["wids, global"] = lambda: by_wids(False)
    out["wids, chunks"] = lambda: by_wids(True)
    if workers:
        out[f"WebDataset, {workers} workers"] = lambda: by_webdataset(workers)
        out[f"wids, chunks, {workers} workers"] = lambda: by_wids(True, workers)
    return out


def measure(name: str, scale: float, runs: int, workers: int, folder: Path) -> dict[str, Any]:
    count = max(WORKLOADS[name][2], int(WORKLOADS[name][1] * scale))
    (folder / "shards").mkdir()
    (folder / "wids").mkdir()
    shards = write(folder / "shards", name, count)
    rates = medians(in_turn(contestants(name, shards, folder / "wids", workers), runs))
    return {"workload": name, "samples": count, "shards": len(shards), "samples_per_second": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of samples")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (after one to warm up)")
    parser.add_argument("--workers", type=int, default=0, help="number of worker processes that the peers try too")
    parser.add_argument("--only", choices=[name.split()[0] for name in WORKLOADS], help="one workload")
    parser.add_argument("--folder", help="where to put the data (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    results = []
    for name in WORKLOADS:
        if options.only and not name.startswith(options.only):
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results.append(measure(name, options.scale, options.runs, options.workers, Path(folder)))
        if not options.json:
            row = results[-1]
            print(f"{name} ({row['samples']:,} samples in {row['shards']} shards)")
            best = row["samples_per_second"]["rankfeed"]
            for label, got in row["samples_per_second"].items():
                print(f"  {label:<28} {got:>12,.0f} samples/s   {got / best:6.3f} of rankfeed")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
