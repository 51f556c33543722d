"""Trainers on several processes, which Lightning starts by running this script again; each rank tells what it saw.

lightning_train.py PACKAGE RANKS OUT CELL...: each CELL is a function below, run one after another in the same
processes. A line of OUT/CELL-RANK.jsonl is a step ([fit, epoch, sample ids]), or a dict that the cell tells.
"""

import gc
import json
import logging
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

import rankfeed as rf
from rankfeed.loading.engines import process

PACKAGE, RANKS, OUT, CELLS = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
L = import_module(PACKAGE)
from rankfeed.integrations.lightning import LoaderCheck, log_mean  # noqa: E402  (after the package it is to go with)

SAMPLES, ROWS, STEPS = 22, 3, 4
NUMBERS = [{"id": index, "value": float(index) / 7} for index in range(SAMPLES)]


class Model(L.LightningModule):
    """Trains on anything, and writes down which samples came."""

    def __init__(self, cell: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.cell = cell
        self.fit = 0
        self.fail_after = 0

    def tell(self, line: Any) -> None:
        with (OUT / f"{self.cell}-{self.trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fail_after and self.global_step == self.fail_after:
            raise RuntimeError("the job fails")
        ids = {name: each["id"].tolist() for name, each in batch.items()} if "long" in batch else ids_of(batch)
        self.tell([self.fit, self.current_epoch, ids])
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.tell({"validated": batch["id"][batch["valid"]].tolist() if "valid" in batch else ids_of(batch)})
        log_mean(self, "mean", batch["value"], batch.get("valid"))

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ids_of(batch: Any) -> list[int]:
    return (batch["id"] if isinstance(batch, dict) else batch[0]).tolist()


def trainer(epochs: int, checkpoints: Any = None, **options: Any) -> Any:
    callbacks = [LoaderCheck(), *([checkpoints] if checkpoints else [])]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    place = {"accelerator": "cpu", "devices": RANKS, "strategy": "ddp" if RANKS > 1 else "auto"}
    saving = {"callbacks": callbacks, "enable_checkpointing": bool(checkpoints)}
    return L.Trainer(max_epochs=epochs, **place, **saving, **quiet, **options)


def loader(samples: int = SAMPLES, **options: Any) -> rf.Loader:
    source = rf.from_dataset(NUMBERS[:samples])
    return rf.Loader(source, ROWS, **{"shuffle": True, "num_workers": 2, **options})


def saver(cell: str, **options: Any) -> Any:
    callbacks = import_module(f"{PACKAGE}.callbacks")
    return callbacks.ModelCheckpoint(dirpath=OUT / cell, filename="{step}", save_top_k=-1, **options)


def told(model: Model, run: Any) -> None:
    """Run what is to be refused, and tell by what."""
    try:
        run()
    except Exception as error:
        model.tell({"error": type(error).__name__, "says": str(error)})


def whole(cell: str) -> None:
    """Epochs with a validation in the middle and at the end, audited."""
    feed, val = loader(audit=True), loader(13, shuffle=False, tail="pad")
    model = Model(cell)
    run = trainer(3, val_check_interval=0.5)
    run.fit(model, feed, val)
    is_same = run.train_dataloader is feed and run.val_dataloaders is val
    mean = run.callback_metrics["mean"].item()
    model.tell({"same": is_same, "audit": str(feed.audit_report), "mean": mean})


def processes(cell: str) -> None:
    """Worker processes stay from one epoch to the next."""
    process.INLINE_AFTER = 60.0
    feed = loader(worker_kind="process")
    workers = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            server = next(each for each in psutil.Process().children() if "workers.server" in str(each.cmdline()))
            workers.append(sorted(worker.pid for worker in server.children()))

    run = trainer(3)
    run.callbacks.append(Watch())
    model = Model(cell)
    run.fit(model, feed)
    model.tell({"workers": workers})


def limited(cell: str) -> None:
    trainer(3, limit_train_batches=2).fit(Model(cell), loader())


def stopped(cell: str) -> None:
    """Stopped by a mean that gets no better, in the middle of an epoch; then trained on by another Trainer."""
    feed, model = loader(), Model(cell)
    run = trainer(9, val_check_interval=0.5, limit_val_batches=2)
    run.callbacks.append(import_module(f"{PACKAGE}.callbacks").EarlyStopping("mean", patience=2))
    run.fit(model, feed, loader(13, shuffle=False, tail="pad"))
    model.fit = 1
    trainer(1).fit(model, feed)


def again(cell: str) -> None:
    """Another Trainer takes the loader that one has used; and one Trainer continues."""
    feed, model = loader(), Model(cell)
    trainer(2, limit_train_batches=3).fit(model, feed)
    model.fit = 1
    run = trainer(1)
    run.fit(model, feed)
    model.fit = 2
    run.fit_loop.max_epochs = 3
    run.fit(model, feed)


def several(cell: str) -> None:
    trainer(2).fit(Model(cell), {"long": loader(), "short": loader(8)})


def overfit(cell: str) -> None:
    trainer(2, overfit_batches=2).fit(Model(cell), loader(shuffle=False))
    model = Model(cell)
    told(model, lambda: trainer(2, overfit_batches=2).fit(model, loader()))


def last_batch(cell: str) -> None:
    """A checkpoint of the last step of an epoch, taken before the epoch has ended."""
    trainer(1, saver(cell, every_n_train_steps=STEPS)).fit(Model(cell), loader())


def after_last_batch(cell: str) -> None:
    trainer(3).fit(Model(cell), loader(), ckpt_path=OUT / "last_batch" / f"step={STEPS}.ckpt")


def failed(cell: str) -> None:
    """Ends by an exception in a step, and leaves a checkpoint."""
    model = Model(cell)
    model.fail_after = 2
    keep = import_module(f"{PACKAGE}.callbacks").OnExceptionCheckpoint(OUT / cell, "step=2")
    told(model, lambda: trainer(3, keep).fit(model, loader()))


def after_failed(cell: str) -> None:
    trainer(3).fit(Model(cell), loader(), ckpt_path=OUT / "failed" / "step=2.ckpt")


def validated(cell: str) -> None:
    """A checkpoint of the validation in the middle of an epoch."""
    options = {"val_check_interval": 0.5, "num_sanity_val_steps": 0}
    keep = saver(cell, save_on_train_epoch_end=False)
    trainer(1, keep, **options).fit(Model(cell), loader(), loader(13, shuffle=False))
    model = Model(cell)
    model.fit = 1
    trainer(2, **options).fit(model, loader(), loader(13, shuffle=False), ckpt_path=OUT / cell / "step=2.ckpt")


def stock(cell: str) -> None:
    """torch's DataLoader with our samplers."""
    data = TensorDataset(torch.arange(SAMPLES))
    model = Model(cell)
    sampler = rf.DistributedSampler(data, ROWS, shuffle=True)
    trainer(2).fit(model, DataLoader(data, ROWS, sampler=sampler))
    model.fit = 1
    batches = rf.DistributedBatchSampler(data, ROWS, shuffle=True)
    feed = DataLoader(data, batch_sampler=batches)
    trainer(2, use_distributed_sampler=False).fit(model, feed)
    told(model, lambda: trainer(2).fit(model, feed))
    told(model, lambda: trainer(2, use_distributed_sampler=False).predict(model, feed))


def uneven(cell: str) -> None:
    """DataLoaders without rankfeed, of 8 and 6 batches; then a validation on all ranks, which never comes."""
    model = Model(cell)
    ours = {"use_distributed_sampler": False}
    run = trainer(1, **ours)
    batches = DataLoader([{"id": index, "value": 1.0} for index in range(16 - 4 * (run.global_rank % 2))], 2)
    told(model, lambda: run.fit(model, batches, loader(shuffle=False)))
    told(model, lambda: trainer(1, **ours).validate(model, batches, verbose=False))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    for name in CELLS:
        globals()[name](name)
    gc.collect()  # the model: as long as it lives, so do gloo's threads
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
