"""Rows per second out of other people's formats: rankfeed's loader beside each format's own, on the same files.

Each workload is read once by each contestant in turn, globally shuffled where it can be, in batches that end as
tensors. The format's own loader is given the best of a few configurations: no workers (which wins on small
machines), and two.

Workloads: W1 ragged float32 rows of 16 to 240 x 64, padded, batch 64. W2 samples of 512 int32, batch 256. W3 byte
strings of 20 to 100 KB, batch 64.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from bench.loader import WORKLOADS, drain
from bench.peers import of_arrow
from bench.turns import in_turn, medians
from datasets import Dataset, Features, List, Value
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import rankfeed as rf

Contestants = dict[str, Callable[[], int]]

FEATURES = {
    "W1 ragged": Features({"x": List(List(Value("float32"), length=64))}),
    "W2 tokens": Features({"x": List(Value("int32"), length=512)}),
    "W3 bytes": Features({"x": Value("binary")}),
}
ENCODINGS = {"W1 ragged": "ndarray:float32", "W2 tokens": "ndarray:int32:512", "W3 bytes": "bytes"}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What a user would write for these samples."""
    rows = [sample["x"] for sample in samples]
    if isinstance(rows[0], bytes):
        return {"x": rows}
    tensors = [torch.as_tensor(row) if row.flags.writeable else torch.tensor(row) for row in rows]
    return {"x": pad_sequence(tensors, batch_first=True)}


def drain_other(loader: Iterable[dict[str, Any]]) -> int:
    return sum(len(batch["x"]) for batch in loader)


def ours(source: rf.Source, batch: int) -> Contestants:
    found: Contestants = {}
    for workers in (0, 2):
        loader = rf.Loader(source, batch, shuffle=True, seed=1, topology=rf.Topology(), num_workers=workers)
        found[f"rankfeed, {workers} threads"] = lambda loader=loader: drain(loader)  # type: ignore[misc]
    return found


def collate_table(table: Any) -> dict[str, Any]:
    """What a user would write for a batch that `datasets` gives as an Arrow table: its fastest way."""
    return {"x": of_arrow(table)}


def hugging_face(
    name: str, samples: Iterable[dict[str, Any]], folder: Path, batch: int
) -> tuple[rf.Source, Contestants]:
    rows = list(samples)
    Dataset.from_list(rows, features=FEATURES[name]).save_to_disk(folder / "hf")
    dataset = datasets.load_from_disk(str(folder / "hf")).with_format("numpy")
    tables: Any = dataset.with_format("arrow")
    theirs: Contestants = {}
    for workers in (0, 2):
        options = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
        loader: Any = DataLoader(dataset, batch, shuffle=True, num_workers=workers, collate_fn=collate, **options)  # type: ignore[arg-type]
        theirs[f"datasets + DataLoader, {workers} workers"] = lambda loader=loader: drain_other(loader)  # type: ignore[misc]
        sampler = BatchSampler(RandomSampler(tables), batch, drop_last=False)
        quick: Any = DataLoader(
            tables, batch_size=None, sampler=sampler, num_workers=workers, collate_fn=collate_table, **options
        )
        theirs[f"datasets as Arrow + DataLoader, {workers}"] = lambda loader=quick: drain_other(loader)  # type: ignore[misc]
    return rf.open(folder / "hf", format="huggingface"), theirs


def mds(name: str, samples: Iterable[dict[str, Any]], folder: Path, batch: int) -> tuple[rf.Source, Contestants]:
    from tests.sources.mds.streaming_mds import LocalDataset, streaming_dataset, write

    write(folder / "mds", {"x": ENCODINGS[name]}, list(samples))
    local = LocalDataset(str(folder / "mds"))
    theirs: Contestants = {}
    for workers in (0, 2):
        options = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
        loader: Any = DataLoader(local, batch, shuffle=True, num_workers=workers, collate_fn=collate, **options)  # type: ignore[arg-type]
        theirs[f"LocalDataset + DataLoader, {workers} workers"] = lambda loader=loader: drain_other(loader)  # type: ignore[misc]
    stream = streaming_dataset()(local=str(folder / "mds"), batch_size=batch, shuffle=True)
    streamed: Any = DataLoader(stream, batch, collate_fn=collate)
    theirs["StreamingDataset, 0 workers"] = lambda: drain_other(streamed)
    return rf.open(folder / "mds", format="mds"), theirs


FORMATS = {"huggingface": hugging_face, "mds": mds}


def measure(form: str, name: str, scale: float, runs: int, folder: Path) -> dict[str, Any]:
    make, count, batch = WORKLOADS[name]
    count = max(batch, int(count * scale))
    source, contestants = FORMATS[form](name, make(count, np.random.default_rng(0)), folder, batch)
    contestants |= ours(source, batch)
    rates = medians(in_turn(contestants, runs))
    best = max(value for label, value in rates.items() if not label.startswith("rankfeed"))
    own = max(value for label, value in rates.items() if label.startswith("rankfeed"))
    return {"format": form, "workload": name, "samples": count, "rows_per_second": rates, "ratio": own / best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of samples")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each (after one to warm up)")
    parser.add_argument("--only", choices=list(FORMATS), help="one format")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    results = []
    for form in FORMATS:
        for name in WORKLOADS:
            if options.only not in (None, form):
                continue
            with tempfile.TemporaryDirectory() as folder:
                results.append(measure(form, name, options.scale, options.runs, Path(folder)))
            if not options.json:
                row = results[-1]
                print(f"{form}, {name} ({row['samples']:,} samples): {row['ratio']:.1f} x")
                for label, value in row["rows_per_second"].items():
                    print(f"  {label:<36} {value:>12,.0f} rows/s")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
