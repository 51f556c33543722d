"""What four projects were told, by their own means and by ours: reports.py OUT CELL, a rank of a launch.

Each rank writes what it got to OUT/CELL-RANK.json, the data being under OUT.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import rankfeed as rf

OUT = Path(sys.argv[1])
HERE = rf.Topology.detect()
#: Rows of each recording: a 2-D array [rows, 4].
ROWS = [3 + 7 * number % 11 for number in range(22)]


def lance_alone() -> Any:
    """A sampler that knows the ranks and not the workers, which are spawned as Lance asks for."""
    from lance.torch.data import LanceDataset, ShardedBatchSampler

    sampler = ShardedBatchSampler(rank=HERE.rank, world_size=HERE.world_size)
    data = LanceDataset(str(OUT / "rows.lance"), batch_size=16, columns=["id"], sampler=sampler)
    return _ids(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="spawn"))


def lance_fed() -> Any:
    from lance.torch.data import LanceDataset

    from rankfeed.integrations.lance import ShardedSampler

    data = LanceDataset(str(OUT / "rows.lance"), batch_size=16, columns=["id"], sampler=ShardedSampler())
    return _ids(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="spawn"))


def _ids(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def shards_alone() -> Any:
    """Three shards on two ranks, with nothing configured, and with the splitter that the error asks for."""
    import webdataset as wds

    urls = sorted(map(str, OUT.glob("*.tar")))
    told = {}
    for name, options in {"plain": {}, "split": {"nodesplitter": wds.split_by_node}}.items():
        try:
            loader = DataLoader(
                wds.WebDataset(urls, shardshuffle=False, **options).to_tuple("__key__").batched(2), batch_size=None
            )
            told[name] = [[int(key) for key in keys] for (keys,) in loader]
        except Exception as error:
            told[name] = str(error)
    return told


def shards_fed() -> Any:
    import webdataset as wds

    from rankfeed.integrations.webdataset import ShardedSamples

    urls = sorted(map(str, OUT.glob("*.tar")))
    stages = wds.DataPipeline(ShardedSamples(urls, 2), wds.decode(), wds.to_tuple("__key__"), wds.batched(2))
    return [[int(key) for key in keys] for (keys,) in DataLoader(stages, batch_size=None)]


def graphs_alone() -> Any:
    from report_graphs import Graphs

    return _graphs(lambda: Graphs(str(OUT / "alone")))


def graphs_fed() -> Any:
    from report_graphs import Graphs

    from rankfeed.integrations.pyg import prepare

    return _graphs(lambda: prepare(Graphs, OUT / "fed"))


def _graphs(make: Any) -> Any:
    """All ranks begin at once: one that came late would find what the others have made."""
    (OUT / f"{sys.argv[2]}-at-{HERE.rank}").touch()
    while len([*OUT.glob(f"{sys.argv[2]}-at-*")]) < HERE.world_size:
        time.sleep(0.01)
    try:
        return {"numbers": [int(graph.y) for graph in make()]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


class Recordings(IterableDataset[Any]):
    """This rank's recordings, dealt out as is usual: not the same number of batches on each rank."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(HERE.rank, len(ROWS) - 1, HERE.world_size):
            yield torch.full((ROWS[number], 4), float(number))


def trainer_alone() -> Any:
    loader = DataLoader(
        Recordings(), 2, collate_fn=lambda rows: {"x": torch.nn.utils.rnn.pad_sequence(rows, True)}
    )
    return _fitted(loader, loader)


def trainer_fed() -> Any:
    from rankfeed.integrations.lightning import LoaderCheck

    def recordings() -> Iterator[dict[str, Any]]:
        for number, rows in enumerate(ROWS):
            yield {"x": np.full((rows, 4), number, np.float32)}

    data = rf.prepare_once(OUT / "packed", lambda folder: rf.write(recordings(), folder / "data", progress=False))
    source = rf.open(data / "data")
    return _fitted(rf.Loader(source, 2, shuffle=True), rf.Loader(source, 2, tail="pad"), LoaderCheck())


def _fitted(train: Any, val: Any, *callbacks: Any) -> Any:
    import lightning as L
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from rankfeed.integrations.lightning import log_mean

    told = {"train": 0, "val": 0}

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any) -> torch.Tensor:
            told["train"] += 1
            return self.layer(batch["x"]).mean()

        def validation_step(self, batch: Any) -> None:
            told["val"] += 1
            if "valid" in batch:
                log_mean(self, "rows", batch["x_lengths"].double(), batch["valid"])
            else:
                self.log("rows", float(batch["x"].size(1)), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    trainer = L.Trainer(
        accelerator="cpu",
        strategy=DDPStrategy(timeout=timedelta(seconds=20)),
        devices=HERE.world_size,
        plugins=[TorchElasticEnvironment()],
        max_epochs=1,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Model(), train, val)
    except RuntimeError as error:  # a collective that the others never come to
        return {**told, "error": str(error)[:300]}
    return {**told, "mean": trainer.callback_metrics["rows"].item()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    cell = sys.argv[2]
    if not cell.startswith("graphs"):
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    result = globals()[cell]()
    (OUT / f"{cell}-{HERE.rank}.json").write_text(json.dumps(result))
    os._exit(0)  # do not wait for ranks that hang in a collective
