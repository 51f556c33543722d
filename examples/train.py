"""Train on utterances of different lengths with DDP; after a kill, resume on any number of ranks.

rankfeed write examples/data/japanese_vowels.parquet data
mkdir run && torchrun --nproc-per-node 2 examples/train.py data run
rankfeed verify run/ledger --data data
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: once there is a group, this keeps it, and gloo's threads, to the end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankfeed as rf


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(12, 48, batch_first=True)
        self.classifier = nn.Linear(48, 9)

    def forward(self, frames, lengths):
        states, _ = self.encoder(frames)
        return self.classifier(
            states[torch.arange(len(lengths)), lengths - 1]
        )  # the last frame before the padding


def train(data: Path, run: Path, epochs: int, workers: int) -> None:
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loader = rf.Loader(
        rf.open(data),
        batch_size=8,  # per rank
        shuffle=True,
        seed=7,
        num_workers=workers,
        id_column="id",  # only to write down which samples were delivered
        audit=run / "ledger",  # read by `rankfeed verify`
    )
    model = DistributedDataParallel(Speaker())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    checkpoint = run / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    delivered = (run / f"delivered-{ranks}-ranks-{rank}.jsonl").open("w")
    while loader.epoch < epochs:
        for batch in loader:
            logits = model(batch["frames"], batch["frames_lengths"])
            loss = nn.functional.cross_entropy(logits, batch["speaker"])
            state = loader.state_dict()
            line = {
                "epoch": state["epoch"],
                "step": state["steps"],
                "loss": loss.item(),
                "ids": batch["id"].tolist(),
            }
            # Before backward, where the ranks wait for each other: no checkpoint is ahead of a rank's file.
            print(json.dumps(line), file=delivered, flush=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and state["steps"] % 4 == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": state}
                torch.save(saved, run / "new.pt")
                (run / "new.pt").rename(checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path, help="folder of the checkpoint and the ledgers")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(**vars(options))
    dist.destroy_process_group()  # the model is gone by now: it would keep the group and gloo's threads
