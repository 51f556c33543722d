"""Run by torchrun: every rank goes through many cells (kind of worker, number, start method) in one launch.

Each cell reads one epoch and writes down the ids of every step and a digest of all tensors' bytes. At the end the
ranks take means, as an evaluation does, of data of the sizes that they are told.
"""

import hashlib
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import rankfeed as rf
from rankfeed.columns.columns import Columns
from rankfeed.loading.collate import collate

BATCH = 4
#: Random numbers of float32, whose sums in float64 are exact.
VALUES = torch.randn(40, generator=torch.Generator().manual_seed(0))


class WithIds(torch.utils.data.Dataset[Any]):
    """A source as torch's DataLoader sees it, each sample with its id."""

    def __init__(self, source: rf.Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.source[index], "id": index}


class Collate:
    """A stock DataLoader's batches in the loader's own shape (the columns' kinds are the source's)."""

    def __init__(self, fields: Any) -> None:
        self.fields = fields

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return collate(Columns.from_samples(samples, self.fields), "pad")[0]


def epochs(data: str, cell: dict[str, Any]) -> Any:
    """An iterable over one epoch (index 1, so that set_epoch is needed) for a cell."""
    source = rf.open(data)
    kind, workers = cell["kind"], cell["workers"]
    if kind in ("thread", "process"):
        options: dict[str, Any] = {"num_workers": workers, "worker_kind": kind}
        loader = rf.Loader(source, BATCH, shuffle=True, seed=5, id_column="id", audit=True, **options)
        loader.set_epoch(1)
        return loader
    persistent = bool(cell.get("persistent"))
    options = {"num_workers": workers, "collate_fn": Collate(source.fields), "persistent_workers": persistent}
    if kind == "batch_sampler":
        batches = rf.DistributedBatchSampler(source, BATCH, shuffle=True, seed=5)
        batches.set_epoch(1)
        return DataLoader(WithIds(source), batch_sampler=batches, **options)
    sampler = rf.DistributedSampler(source, BATCH, shuffle=True, seed=5)
    sampler.set_epoch(1)
    return DataLoader(WithIds(source), batch_size=BATCH, sampler=sampler, **options)


def means(samples: int) -> dict[str, float]:
    """The mean of this many values, by each way to feed a plain loop: all ranks add up, and divide once."""
    rows: Any = [{"x": value} for value in VALUES[:samples]]
    found = {}
    for tail in ("even", "pad"):
        if samples < dist.get_world_size() and tail == "even":
            continue  # refused
        for batch in (1, 3):
            sampler = rf.DistributedBatchSampler(rows, batch, tail=tail)
            stock = enumerate(DataLoader(rows, batch_sampler=sampler))
            loader = rf.Loader(rf.from_dataset(rows), batch, tail=tail)
            feeds = {
                "loader": (each["x"][each["valid"]] if "valid" in each else each["x"] for each in loader),
                "sampler": (each["x"][torch.tensor(sampler.valid(step))] for step, each in stock),
            }
            for name, feed in feeds.items():
                total = torch.zeros(2, dtype=torch.float64)
                for values in feed:
                    total += torch.stack([values.sum(dtype=torch.float64), torch.tensor(len(values))])
                dist.all_reduce(total)
                found[f"{name}, {tail}, {batch}"] = (total[0] / total[1]).item()
    return found


def main(data: str, out: Path, cells: list[dict[str, Any]], sizes: list[int]) -> None:
    dist.init_process_group("gloo")
    results = []
    for cell in cells:
        multiprocessing.set_start_method(cell["start"], force=True)
        steps, digest = [], hashlib.sha256()
        loader = epochs(data, cell)
        assert len(loader) > 0
        for batch in loader:
            steps.append(batch["id"].tolist())
            for name in sorted(batch):
                value = batch[name]
                digest.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
        results.append({"steps": steps, "digest": digest.hexdigest()})
        del loader
        dist.barrier()
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    (out / f"means{dist.get_rank()}.json").write_text(json.dumps([means(samples) for samples in sizes]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
