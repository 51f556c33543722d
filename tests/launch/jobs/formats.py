"""Run by torchrun: every rank goes through many cells (format, kind of worker, number, order) in one launch.

formats.py PLAN OUT: PLAN is JSON, {"folders": {format: folder}, "cells": [...]}. A cell reads an epoch or a part
of one, from a state that an earlier launch left or from the start. It tells the samples of each step, and a digest
of each sample.
"""

import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.sources import writers
from tests.sources.compare import digest, unbatched

import rankfeed as rf
from rankfeed.columns.columns import Columns
from rankfeed.loading.collate import collate

#: Of all ranks together, whatever their number.
GLOBAL_BATCH = 12
EPOCH, SEED = 1, 5


class WithIds(Dataset[Any]):
    """A source as torch's DataLoader sees it, each sample with its id."""

    def __init__(self, source: rf.Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        samples = self.source.__getitems__(indices)
        return [{**sample, "id": index} for sample, index in zip(samples, indices, strict=True)]


class Collate:
    """A stock DataLoader's batches in the loader's own shape (the columns' kinds are the source's)."""

    def __init__(self, fields: Any) -> None:
        self.fields = dict(fields)

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return collate(Columns.from_samples(samples, self.fields), "pad")[0]


def ids_and_samples(batch: Any) -> tuple[list[int], dict[int, Any]]:
    """Ids of a batch in order, and its samples by id."""
    if hasattr(batch, "to_data_list"):  # a batch of graphs; each knows its id
        return batch.y.tolist(), {int(graph.y): graph for graph in batch.to_data_list()}
    return batch["id"].tolist(), unbatched(batch)


def steps(source: Any, cell: dict[str, Any], state: Any) -> Iterator[tuple[Any, Any]]:
    """Each batch, and the state after it."""
    batch_size = GLOBAL_BATCH // dist.get_world_size()
    if cell["kind"] in ("thread", "process"):
        options: dict[str, Any] = {"num_workers": cell["workers"], "worker_kind": cell["kind"], "audit": not state}
        shuffle = cell["shuffle"]
        loader = rf.Loader(source, batch_size, shuffle=shuffle, window=16, seed=SEED, id_column="id", **options)
        loader.load_state_dict(state) if state else loader.set_epoch(EPOCH)
        length = len(loader)
        for number, batch in enumerate(loader):
            assert number < length
            yield batch, loader.state_dict()
        return
    assert cell["kind"] == "stock"
    sampler = rf.DistributedBatchSampler(source, batch_size, shuffle=True, seed=SEED)
    sampler.load_state_dict(state) if state else sampler.set_epoch(EPOCH)
    of_graphs = "" in source.fields
    stock = DataLoader(
        source if of_graphs else WithIds(source),
        batch_sampler=sampler,
        num_workers=cell["workers"],
        collate_fn=source.collate if of_graphs else Collate(source.fields),
    )
    for number, batch in enumerate(stock):
        yield batch, sampler.state_dict(delivered_steps=number + 1)


def run(cell: dict[str, Any], folder: str, out: Path) -> dict[str, Any]:
    source = writers.open_as(cell["format"], Path(folder))
    state = json.loads((out / cell["load"]).read_text()) if cell.get("load") else None
    found: list[list[int]] = []
    said: dict[int, str] = {}
    for batch, after in steps(source, cell, state):
        last = after
        ids, samples = ids_and_samples(batch)
        found.append(ids)
        said.update({number: digest(sample) for number, sample in samples.items()})
        if len(found) == cell.get("stop"):
            break
    if cell.get("save") and dist.get_rank() == 0:
        (out / cell["save"]).write_text(json.dumps(last))
    return {"steps": found, "digests": said, "state": last}


def main(plan: dict[str, Any], out: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = []
    for cell in plan["cells"]:
        multiprocessing.set_start_method(cell.get("start", "fork"), force=True)
        try:
            results.append(run(cell, plan["folders"][cell["format"]], out))
        except Exception as error:
            raise RuntimeError(f"in {cell}") from error
        dist.barrier()
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
