"""Many epochs of a tiny data set: long_run.py OUT EPOCHS CELL..., run by torchrun.

A CELL is FRAMEWORK:WORKERS. Each epoch ends with a validation, every second one with a checkpoint that takes the
place of the one before. After each epoch a rank notes what it holds: OUT/CELL-RANK.json, a list of dicts.
"""

import gc
import json
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_module import QUIET, LinearModule
from torch.utils.data import DataLoader

import rankfeed as rf
from rankfeed.integrations.accelerate import accelerated
from rankfeed.integrations.lightning import LoaderCheck, log_mean
from rankfeed.loading.engines import process

DATA = [{"id": index, "x": torch.tensor([float(index)])} for index in range(40)]
HELD, MEAN = 13, 6.0  # the first 13 of these are validated with
EVERY = 2

process.INLINE_AFTER = 60.0  # on a busy machine, workers might otherwise start after several of these short epochs


def feed(workers: str, rows: int = len(DATA)) -> Any:
    """A loader that keeps its workers (threads or processes), or torch's with our sampler."""
    trains = rows == len(DATA)
    count = 2 if trains else 1
    if workers in ("threads", "processes"):
        kind: Any = workers.removesuffix("s").removesuffix("e")
        tail: Any = "even" if trains else "pad"
        source = rf.from_dataset(DATA[:rows])
        return rf.Loader(source, 4, shuffle=trains, tail=tail, num_workers=count, worker_kind=kind)
    sampler = rf.DistributedBatchSampler(DATA[:rows], 4, shuffle=trains)
    return DataLoader(DATA, batch_sampler=sampler, num_workers=count, persistent_workers=workers == "persistent")


def holdings() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "memory": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "processes": len(multiprocessing.active_children()),
        # Of this process: in /dev/shm itself are segments of all processes of the machine.
        "shared": sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


def lightning(workers: str, epochs: int, checkpoint: Path, note: Callable[[], None]) -> None:
    class Model(LinearModule):
        def training_step(self, batch: Any) -> torch.Tensor:
            return self.layer(batch["x"]).mean()

        def validation_step(self, batch: Any) -> None:
            log_mean(self, "mean", batch["x"], batch.get("valid"))

        def on_train_epoch_end(self) -> None:
            assert self.trainer.callback_metrics["mean"].item() == MEAN
            note()

    L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=dist.get_world_size(),
        max_epochs=epochs,
        plugins=[TorchElasticEnvironment()],
        use_distributed_sampler=False,
        callbacks=[LoaderCheck(), ModelCheckpoint(checkpoint, every_n_epochs=EVERY)],
        **QUIET,
    ).fit(Model(), feed(workers), feed(workers, HELD))


def accelerate(workers: str, epochs: int, checkpoint: Path, note: Callable[[], None]) -> None:
    accelerator = Accelerator(cpu=True)
    loader, held = feed(workers), feed(workers, HELD)
    ours = isinstance(loader, rf.Loader)
    if ours:
        loader, held = (accelerator.prepare(accelerated(each, accelerator)) for each in (loader, held))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for epoch in range(epochs):
        for batch in loader:
            accelerator.backward(model(batch["x"]).mean())
        total = torch.zeros(())
        for batch in held:
            total += (accelerator.gather_for_metrics(batch["x"]) if ours else batch["x"]).sum()
        total = total if ours else accelerator.reduce(total)
        assert total.item() == MEAN * HELD
        if epoch % EVERY == EVERY - 1:
            accelerator.save_state(str(checkpoint))
        note()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    out, epochs, cells = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    dist.init_process_group("gloo")
    for cell in cells:
        framework, workers = cell.split(":")
        notes: list[dict[str, int]] = []
        folder = out / f"{framework}-{workers}"
        globals()[framework](workers, epochs, folder, lambda notes=notes: notes.append(holdings()))
        assert any(folder.iterdir()), "a checkpoint"
        (out / f"{framework}-{workers}-{dist.get_rank()}.json").write_text(json.dumps(notes))
        gc.collect()
        dist.barrier()
    dist.destroy_process_group()
