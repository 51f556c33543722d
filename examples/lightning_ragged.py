"""Train with Lightning on arrays of different lengths, written once, with an exact validation mean.

    python examples/lightning_ragged.py data/ --devices 2
    python examples/lightning_ragged.py data/ --devices 1 --epochs 3 --resume data/checkpoints/last.ckpt

The second command trains one more epoch on one device. After a killed job it first finishes the epoch.
"""

import argparse
import gc
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

import rankfeed as rf
from rankfeed.integrations.lightning import LoaderCheck, log_mean


def recordings(count: int):
    """Replace this by reading your files: each sample is an array [rows, 8], and rows differs."""
    for each in range(count):
        rng = np.random.default_rng(each)
        frames = rng.normal(each % 3, 1, (int(rng.integers(4, 60)), 8)).astype(np.float32)
        yield {"frames": frames, "label": each % 3}


class Recordings(L.LightningDataModule):
    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def setup(self, stage: str) -> None:
        # Runs in all processes: one writes, the others wait. All map the same files, which may exceed memory.
        data = rf.prepare_once(self.folder / "packed", lambda staging: rf.write(recordings(203), staging / "data"))
        self.train, self.val = rf.train_test_split(rf.open(data / "data"), 0.2)

    def train_dataloader(self):
        return rf.Loader(self.train, 8, shuffle=True, num_workers=2)

    def val_dataloader(self):
        return rf.Loader(self.val, 8, tail="pad", num_workers=2)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, batch):
        rows = torch.arange(batch["frames"].size(1), device=self.device) < batch["frames_lengths"][:, None]
        heard = self.layers(batch["frames"]) * rows[:, :, None]  # zero at padding
        return heard.sum(1) / batch["frames_lengths"][:, None]

    def training_step(self, batch):
        return nn.functional.cross_entropy(self(batch), batch["label"])

    def validation_step(self, batch):
        losses = nn.functional.cross_entropy(self(batch), batch["label"], reduction="none")
        log_mean(self, "val_loss", losses, batch["valid"], prog_bar=True)
        log_mean(self, "val_length", batch["frames_lengths"].double(), batch["valid"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(options: argparse.Namespace) -> None:
    checkpoints = L.pytorch.callbacks.ModelCheckpoint(
        options.folder / "checkpoints", every_n_train_steps=5, save_last=True
    )
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp" if options.devices > 1 else "auto",
        devices=options.devices,
        max_epochs=options.epochs,
        callbacks=[LoaderCheck(), checkpoints],
        logger=False,
        enable_progress_bar=False,
    )
    data = Recordings(options.folder)
    model = Classifier()
    trainer.fit(model, data, ckpt_path=options.resume)
    if "val_loss" not in trainer.callback_metrics:  # the checkpoint is the end of the last epoch
        rank_zero_info(f"nothing left of {options.epochs} epochs; --epochs {options.epochs + 1} trains one more")
        trainer.validate(model, data, verbose=False)
    if trainer.is_global_zero:
        seen = trainer.callback_metrics
        print(f"rows {len(data.val)}, mean length {seen['val_length'].item()}")
        print(f"val_loss {seen['val_loss'].item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2, help="of the whole run, those before a resume included")
    parser.add_argument("--resume", help="a checkpoint of any number of devices")
    options = parser.parse_args()
    main(options)
    gc.collect()  # frees the model, which keeps gloo's threads alive
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
