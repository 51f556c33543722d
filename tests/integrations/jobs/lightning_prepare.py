"""A Trainer on two processes, which Lightning starts by running this script again.

lightning_prepare.py FOLDER OUT FAILS: builds write OUT/built-NAME@TIME, ranks write OUT/PLACE-NAME-RANK.outcome.
The folder `both` is asked for in prepare_data and in setup, `late` in setup alone, `before` outside the Trainer.
FAILS names one whose build raises, and the others are left out; none if it is empty.
"""

import logging
import os
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning_module import QUIET, LinearModule
from torch.utils.data import DataLoader, TensorDataset

import rankfeed as rf

FOLDER: Path
OUT: Path
FAILS: str


def prepare(place: str, name: str) -> None:
    """Have a folder prepared, and tell what came of it."""
    if FAILS not in ("", name):
        return
    rank = os.environ.get("LOCAL_RANK", "0")

    def build(staging: Path) -> None:
        (OUT / f"built-{name}@{time.monotonic_ns()}").touch()
        if FAILS:
            raise KeyError("no such column")
        time.sleep(0.2)
        (staging / "data.txt").write_text(name)

    if FAILS == "late" and rank != "0":  # it comes when all is over
        while not (OUT / f"{place}-{name}-0.outcome").exists():
            time.sleep(0.01)
    outcome = OUT / f"{place}-{name}-{rank}.outcome"
    try:
        folder = rf.prepare_once(FOLDER / name, build)
    except rf.errors.PrepareError as error:
        outcome.write_text(str(error).splitlines()[0])
        raise
    outcome.write_text((folder / "data.txt").read_text())


class Data(L.LightningDataModule):
    def prepare_data(self) -> None:
        prepare("prepare_data", "both")

    def setup(self, stage: str) -> None:
        prepare("setup", "both")
        prepare("setup", "late")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)


class Model(LinearModule):
    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layer(batch[0]).sum()


if __name__ == "__main__":
    FOLDER, OUT, FAILS = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    prepare("outside", "before")
    place = {"accelerator": "cpu", "strategy": "ddp", "devices": 2}
    trainer = L.Trainer(max_epochs=1, enable_checkpointing=False, **place, **QUIET)
    trainer.fit(Model(), datamodule=Data())
    (OUT / f"done-{trainer.global_rank}").touch()
