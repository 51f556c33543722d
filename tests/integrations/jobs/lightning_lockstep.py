"""Two ranks of a Trainer under a watch, the second of which fails; what each raised is in FOLDER/RANK.json."""

import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch._dynamo  # DDP imports it: once here, instead of on each rank
from lightning_module import QUIET, LinearModule

from rankfeed.integrations.lightning import LockstepCheck


class Model(LinearModule):
    def __init__(self, failing: str) -> None:
        super().__init__(4)
        self.failing = failing

    def training_step(self, batch: Any, index: int) -> Any:
        if self.failing == "training" and self.current_epoch == 1 and index == 2:
            raise ValueError("the user's own")
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, index: int) -> None:
        if self.failing == "validation" and not self.trainer.sanity_checking:
            raise ValueError("the user's own")


def work(rank: int, port: int, failing: str, folder: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in place.items()})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        callbacks=[LockstepCheck(limit=30)],
        default_root_dir=folder,
        **QUIET,
    )
    data = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
    try:
        trainer.fit(Model(failing if rank else ""), data, data)
        told = "trained"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps(told))


def main(failing: str, folder: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    jobs = [fork.Process(target=work, args=(rank, port, failing, folder)) for rank in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(90)
        job.kill()


if __name__ == "__main__":
    for each in sys.argv[2:]:
        (Path(sys.argv[1]) / each).mkdir()
        main(each, Path(sys.argv[1]) / each)
