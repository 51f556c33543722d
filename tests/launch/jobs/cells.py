"""Run by torchrun: every rank goes through many cells (kind of worker, number, start method) in one launch.

Each cell reads one epoch and writes down the ids of every step and a digest of all tensors' bytes.
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
from rankfeed.columns import Columns
from rankfeed.loading.collate import collate

BATCH = 4


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
        return collate(Columns.from_samples(samples, self.fields), "pad")


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


def main(data: str, out: Path, cells: list[dict[str, Any]]) -> None:
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
