"""Train from a Lance table where it lies, under torchrun, and go on from the last epoch if there is one.

torchrun --standalone --nproc-per-node 2 examples/lance_torchrun.py run/
"""

import argparse
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.distributed.nn  # now: once there is a group, this keeps it, and gloo's threads, to the end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankfeed as rf


def build(folder: Path) -> None:
    """Called once, on one rank. Leave it out and open your own table, on disk or in a bucket that is mounted."""
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
    # "window" for Lance: neighbouring rows are read together, and each rank keeps off the others' fragments.
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
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(epoch, *batch["id"].tolist(), file=ledger, flush=True)
            if here.rank == 0:
                print(f"{loader.audit_report}; loss {loss:.3f}", flush=True)
                torch.save({name: part.state_dict() for name, part in parts.items()}, run / "new.pt")
                (run / "new.pt").replace(checkpoint)  # at once: a kill leaves the old one or the new one


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="folder that all ranks see, for data and checkpoint")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(options.run, options.epochs, options.workers)
    dist.destroy_process_group()  # the model is gone by now: as long as it lives, so do gloo's threads
