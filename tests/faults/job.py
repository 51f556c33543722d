"""Run by torchrun: reads, keeps step with the other ranks, writes down what it got, and checkpoints.

job.py DATA FOLDER RUN EPOCHS WORKERS KIND
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import rankfeed as rf

EVERY = 3


def main(data: str, folder: Path, run: str, epochs: int, workers: int, kind: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = rf.Loader(
        rf.open(data),
        4,
        shuffle=True,
        seed=11,
        num_workers=workers,
        worker_kind=kind,  # type: ignore[arg-type]
        id_column="id",
        audit=folder / "ledger",
    )
    checkpoint = folder / "checkpoint.json"
    if checkpoint.exists():
        loader.load_state_dict(json.loads(checkpoint.read_text()))
    began = loader.state_dict()
    if rank == 0:
        (folder / f"run{run}.begin").write_text(json.dumps(began))
    with (folder / f"run{run}.rank{rank}").open("w") as ledger:
        while loader.epoch < epochs:
            for batch in loader:
                # Written down before the others go on, and rank 0 takes a checkpoint: what a rank was given
                # counts, though it is killed right after.
                state = loader.state_dict()
                # Resumed on more ranks than samples are left, some have a row that only fills.
                ids = batch["id"][batch["valid"]] if "valid" in batch else batch["id"]
                ledger.write(json.dumps([state["epoch"], state["steps"], ids.tolist()]) + "\n")
                ledger.flush()
                dist.all_reduce(torch.ones(1))  # a model's ranks are never far apart
                time.sleep(0.005)
                if rank == 0 and state["steps"] % EVERY == 0:
                    new = folder / "checkpoint.new"
                    new.write_text(json.dumps(state))
                    os.replace(new, checkpoint)
    if rank == 0:
        (folder / "done").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
