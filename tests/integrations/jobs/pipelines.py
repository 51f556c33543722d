"""Run by torchrun: every rank reads tar shards through many WebDataset and HF pipelines in one launch.

Each cell writes down the keys of every batch of every epoch, or what the pipeline raised.
"""

import json
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import webdataset as wds
from torch.utils.data import DataLoader

from rankfeed.integrations.webdataset import NodeSplitter, Resampled, ShardedSamples, WorkerSplitter

BATCH = 4


def keys_of(batch: Any) -> list[str]:
    return [str(key) for key in batch[0]]


def named(sample: dict[str, Any]) -> tuple[str, int]:
    """What HF's reader gives of a sample, as the pipelines of WebDataset give it."""
    return sample["__key__"], int(sample["cls"])


def unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def as_list(batch: Any) -> Any:
    return list(zip(*batch, strict=True))


def pipeline(cell: dict[str, Any], urls: list[str]) -> Any:
    """The stage under test, and behind it the same stages for each; and what has a ``set_epoch``."""
    kind, strategy = cell["kind"], cell.get("strategy")
    if kind in ("sharded", "resampled"):
        options: dict[str, Any] = {"seed": 3, "tail": cell.get("tail", "even")}
        if kind == "sharded":
            stage = ShardedSamples(urls, BATCH, shuffle=cell.get("shuffle", "global"), **options)
        else:
            stage = Resampled(urls, BATCH, epoch_size=cell["draws"], replacement=cell["replacement"], **options)
        return wds.DataPipeline(stage, wds.decode(), wds.to_tuple("__key__", "cls"), wds.batched(BATCH)), stage
    if kind == "splitter":
        splitters = {"nodesplitter": NodeSplitter(strategy), "workersplitter": WorkerSplitter(cell["by_worker"])}
    else:  # WebDataset's own
        splitters = {"nodesplitter": wds.split_by_node}
    dataset = wds.WebDataset(urls, shardshuffle=False, empty_check=cell.get("by_worker") != "idle", **splitters)
    return dataset.decode().to_tuple("__key__", "cls").batched(BATCH), None


def loader_of(cell: dict[str, Any], urls: list[str]) -> tuple[DataLoader[Any], Any]:
    workers = cell["workers"]
    if cell["kind"] == "huggingface":
        import datasets
        from datasets.distributed import split_dataset_by_node

        stream = datasets.load_dataset("webdataset", data_files={"train": urls}, split="train", streaming=True)
        mine = split_dataset_by_node(stream, dist.get_rank(), dist.get_world_size())
        return DataLoader(mine.map(unchanged), batch_size=BATCH, num_workers=workers, collate_fn=HF()), mine
    dataset, stage = pipeline(cell, urls)
    persistent = bool(cell.get("persistent"))
    return DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=persistent), stage


class HF:
    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        return as_list(map(named, samples))


def main(folder: str, out: Path, cells: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo")
    results = []
    for cell in cells:
        urls = sorted(str(path) for path in Path(folder, str(cell["shards"])).glob("*.tar"))
        multiprocessing.set_start_method(cell["start"], force=True)
        result: dict[str, Any] = {"epochs": [], "error": ""}
        try:
            loader, stage = loader_of(cell, urls)
            for epoch in range(cell.get("epochs", 1)):
                if hasattr(stage, "set_epoch"):
                    stage.set_epoch(epoch)
                result["epochs"].append([])
                for batch in loader:
                    result["epochs"][-1].append(keys_of(batch))
            del loader
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        results.append(result)
        dist.barrier()
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
