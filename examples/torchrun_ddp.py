"""Train with DDP under torchrun, srun or mpirun; when restarted, resume on the same or another number of ranks.

For restarts by torchrun, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (docs/tasks/launchers.md says why).

torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/torchrun_ddp.py run/
sbatch examples/slurm_train.sbatch python examples/torchrun_ddp.py run/
mpirun -np 2 python examples/torchrun_ddp.py run/
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # import before init_process_group: imported later, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankfeed as rf

GLOBAL_BATCH = 24  # over all ranks: each step has the same samples on any number of ranks that divides it


def build(folder: Path) -> None:
    """Called once, on one rank. Write your own data here."""
    rng = np.random.default_rng(0)
    points = rng.standard_normal((6000, 8)).astype(np.float32)
    rf.write(({"x": x, "y": float(x.sum() > 0)} for x in points), folder / "points", progress=False)


def train(run: Path, epochs: int, every: int, workers: int) -> None:
    here = rf.Topology.detect()
    device = torch.device("cuda", here.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    data = rf.prepare_once(run / "data", build, key="v1")
    loader = rf.Loader(
        rf.open(data / "points"),
        GLOBAL_BATCH // here.world_size,
        shuffle=True,
        seed=7,
        num_workers=workers,
        id_column="id",
        device=device,
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint = run / "checkpoint.pt"
    if checkpoint.exists():  # the same file on all ranks: rank 0 replaces it after a common step
        saved = torch.load(checkpoint, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    begun = loader.state_dict()
    with (run / f"read-{here.rank}-of-{here.world_size}-{os.getpid()}.txt").open("w") as ledger:
        print(begun["epoch"], begun["position"], file=ledger, flush=True)
        while loader.epoch < epochs:
            loss = None  # stays None if the checkpoint is of the last step of an epoch
            for batch in loader:
                logits = model(batch["x"]).squeeze(1)
                loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["y"].float())
                state = loader.state_dict()
                # Before backward, where the ranks wait for each other: no checkpoint is ahead of a rank's file.
                print(state["epoch"], state["position"], *batch["id"].tolist(), file=ledger, flush=True)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if here.rank == 0 and state["steps"] % every == 0:
                    torch.save({name: part.state_dict() for name, part in parts.items()}, run / "new.pt")
                    (run / "new.pt").replace(checkpoint)  # atomic: a kill leaves the old file or the new one
            if here.rank == 0 and loss is not None:
                print(f"epoch {loader.epoch - 1}: loss {loss:.4f} on {here.world_size} ranks", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="folder that all ranks see, for data and checkpoint")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    # torchrun sets both; for srun and mpirun over several nodes, export them as slurm_train.sbatch does.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    world = rf.Topology.detect()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=world.rank, world_size=world.world_size)
    train(options.run, options.epochs, options.every, options.workers)
    dist.destroy_process_group()  # after train() returned: a DDP model keeps gloo's threads alive
