"""What the four reports that this project began with asked for: reports.py OUT CELL..., a rank of a launch.

Each rank writes what it got to OUT/CELL-RANK.json, the data being under OUT.
"""

import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import rankfeed as rf

OUT = Path(sys.argv[1])
HERE = rf.Topology.detect()
#: Rows of each recording: a 2-D array [rows, 4].
ROWS = [3 + 7 * number % 11 for number in range(22)]


def rows() -> Any:
    """A table of Lance, in workers that are spawned as Lance asks for."""
    from lance.torch.data import LanceDataset

    from rankfeed.integrations.lance import ShardedSampler

    data = LanceDataset(str(OUT / "rows.lance"), batch_size=16, columns=["id"], sampler=ShardedSampler())
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    return [batch.tolist() for batch in loader]


def shards() -> Any:
    """Three shards on two ranks, with nothing configured."""
    import webdataset as wds

    from rankfeed.integrations.webdataset import ShardedSamples

    urls = sorted(map(str, OUT.glob("*.tar")))
    stages = wds.DataPipeline(ShardedSamples(urls, 2), wds.decode(), wds.to_tuple("__key__"), wds.batched(2))
    return [[int(key) for key in keys] for (keys,) in DataLoader(stages, batch_size=None)]


def graphs() -> Any:
    """All ranks begin at once: one that came late would find what the others have made."""
    from report_graphs import Graphs

    from rankfeed.integrations.pyg import prepare

    (OUT / f"at-{HERE.rank}").touch()
    while len([*OUT.glob("at-*")]) < HERE.world_size:
        time.sleep(0.01)
    return [int(graph.y) for graph in prepare(Graphs, OUT / "fed")]


def trainer() -> Any:
    """Recordings of different lengths, prepared once, in a Trainer; steps, and the mean of a validation."""
    import lightning as L
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning_module import QUIET, LinearModule

    from rankfeed.integrations.lightning import LoaderCheck, log_mean

    def recordings() -> Iterator[dict[str, Any]]:
        for number, rows in enumerate(ROWS):
            yield {"x": np.full((rows, 4), number, np.float32)}

    steps = {"train": 0, "val": 0}

    class Model(LinearModule):
        def training_step(self, batch: Any) -> torch.Tensor:
            steps["train"] += 1
            return self.layer(batch["x"]).mean()

        def validation_step(self, batch: Any) -> None:
            steps["val"] += 1
            log_mean(self, "rows", batch["x_lengths"].double(), batch["valid"])

    data = rf.prepare_once(OUT / "packed", lambda folder: rf.write(recordings(), folder / "data", progress=False))
    source = rf.open(data / "data")
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=HERE.world_size,
        plugins=[TorchElasticEnvironment()],
        max_epochs=1,
        num_sanity_val_steps=0,
        callbacks=[LoaderCheck()],
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(Model(4), rf.Loader(source, 2, shuffle=True), rf.Loader(source, 2, tail="pad"))
    return {**steps, "mean": trainer.callback_metrics["rows"].item()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "graphs" not in sys.argv:
        dist.init_process_group("gloo")
    for cell in sys.argv[2:]:
        (OUT / f"{cell}-{HERE.rank}.json").write_text(json.dumps(globals()[cell]()))
    if dist.is_initialized():
        dist.destroy_process_group()
