"""Run by torchrun: every rank reads other people's map-style datasets through a stock DataLoader, in many cells.

`rf.DistributedBatchSampler` gives each rank its share. A cell writes down the ids of every step of its epochs.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

import rankfeed as rf

BATCH = 4


def in_place(url: str) -> str:
    """For wids, which copies local shards into a cache folder otherwise."""
    return url


def id_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": int(sample[".cls"].read())}


def dataset_of(name: str, folder: Path) -> Any:
    if name == "wids":
        import wids

        return wids.ShardListDataset(str(folder / "wids.json"), localname=in_place, transformations=[id_of])
    if name == "lance":
        from lance.torch.data import SafeLanceDataset

        return SafeLanceDataset(str(folder / "rows.lance"))
    import datasets

    return datasets.load_from_disk(str(folder / "hf"))


def main(folder: Path, out: Path, cells: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo")
    results = []
    for cell in cells:
        multiprocessing.set_start_method(cell["start"], force=True)
        dataset = dataset_of(cell["dataset"], folder)
        batches = rf.DistributedBatchSampler(dataset, BATCH, shuffle=True, seed=2)
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=cell["workers"])
        epochs = []
        for epoch in range(cell["epochs"]):
            batches.set_epoch(epoch)
            epochs.append([batch["id"].tolist() for batch in loader])
        results.append(epochs)
        dist.barrier()
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
