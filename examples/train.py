"""Train on utterances of different lengths with DDP, and resume after a kill on any number of ranks.

python examples/train.py --pack examples/data/japanese_vowels.parquet data/
mkdir run && torchrun --nproc-per-node 2 examples/train.py data/ run/
"""

import argparse
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
        self.listen = nn.GRU(12, 48, batch_first=True)
        self.name = nn.Linear(48, 9)

    def forward(self, frames, lengths):
        heard, _ = self.listen(frames)
        return self.name(heard[torch.arange(len(lengths)), lengths - 1])  # the last frame that is no padding


def train(data: Path, run: Path, epochs: int, workers: int) -> None:
    torch.manual_seed(0)
    source = rf.open(data)
    loader = rf.Loader(source, 8, shuffle=True, seed=7, num_workers=workers, id_column="id", audit=True)
    model = DistributedDataParallel(Speaker())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    checkpoint = run / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        for part, name in ((model, "model"), (optimizer, "optimizer"), (loader, "loader")):
            part.load_state_dict(saved[name])
    rank = dist.get_rank()
    ledger = (run / f"delivered-{dist.get_world_size()}-ranks-{rank}.txt").open("w")
    while loader.epoch < epochs:
        for batch in loader:
            logits = model(batch["frames"], batch["frames_lengths"])
            loss = nn.functional.cross_entropy(logits, batch["speaker"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = loader.state_dict()
            print(state["epoch"], state["steps"], f"{loss:.4f}", *batch["id"].tolist(), file=ledger, flush=True)
            if rank == 0 and state["steps"] % 4 == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": state}
                torch.save(saved, run / "new.pt")
                (run / "new.pt").rename(checkpoint)
        if rank == 0:
            print(f"audit: {loader.audit_report}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("paths", nargs=2, type=Path, help="source, data set (--pack); or data set, run")
    parser.add_argument("--pack", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.pack:
        rf.write(rf.open(options.paths[0]), options.paths[1])
    else:
        dist.init_process_group("gloo")
        train(*options.paths, options.epochs, options.workers)
        dist.destroy_process_group()  # the model is gone by now: as long as it lives, so do gloo's threads
