"""Train from a Lance table under torchrun, and resume after the last finished epoch.

torchrun --standalone --nproc-per-node 2 examples/lance_torchrun.py run/
"""

import argparse
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.distributed.nn  # import before init_process_group: imported later, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankfeed as rf


def build(folder: Path) -> None:
    """Called once, on one rank. To use your own table, pass its path to rf.open instead."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((3001, 16)).astype(np.float32)
    columns = {
        "id": pa.array(range(len(vectors))),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 16),
        "label": pa.array((vectors[:, 0] > vectors[:, 1]).astype(np.int64)),
    }
    lance.write_dataset(pa.table(columns), str(folder / "rows.lance"), max_rows_per_file=1000)


def train(run: Path, epochs: int, workers: int) -> None:
    here = rf.Topology.detect()
    data = rf.prepare_once(run / "data", build, key="v1")
    # shuffle=True is "window" for Lance: ranges of rows are read together, mostly by one rank each.
    loader = rf.Loader(
        rf.open(data / "rows.lance", columns=["id", "vector", "label"]),
        batch_size=32,
        shuffle=True,
        num_workers=workers,
        audit=True,
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint = run / "checkpoint.pt"
    if checkpoint.exists():
        for name, state in torch.load(checkpoint).items():
            parts[name].load_state_dict(state)
    with (run / f"read-{here.rank}-of-{here.world_size}.txt").open("w") as ledger:
        while (epoch := loader.epoch) < epochs:
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch["vector"]), batch["label"])
                print(epoch, *batch["id"].tolist(), file=ledger, flush=True)
                optimizer.zero_grad()
                loss.backward()  # ranks wait for each other: no checkpoint is ahead of a rank's file
                optimizer.step()
            if here.rank == 0:
                print(f"{loader.audit_report}; loss {loss:.3f}", flush=True)
                torch.save({name: part.state_dict() for name, part in parts.items()}, run / "new.pt")
                (run / "new.pt").replace(checkpoint)  # atomic: a kill leaves the old file or the new one


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="folder that all ranks see, for data and checkpoint")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(options.run, options.epochs, options.workers)
    dist.destroy_process_group()  # after train() returned: a DDP model keeps gloo's threads alive
