"""Train on WebDataset shards with Accelerate, evaluate exactly, and resume on any number of processes.

torchrun --nproc-per-node 2 examples/accelerate_webdataset.py run/
"""

import argparse
import gc
from pathlib import Path

import numpy as np
import torch
import torch.distributed.nn  # import before init_process_group: imported later, it keeps the group alive
import webdataset
from accelerate import Accelerator, PartialState
from torch import nn

import rankfeed as rf
from rankfeed.integrations.accelerate import accelerated


def write_shards(folder: Path) -> None:
    """Random points in the plane; the class is the side of a line."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 300), ("test", 90)):
        with webdataset.ShardWriter(f"{folder}/{name}-%03d.tar", maxcount=64, verbose=0) as shards:
            for i in range(count):
                point = rng.standard_normal(2).astype(np.float32)
                shards.write({"__key__": f"{i:06d}", "point.npy": point, "cls": int(point.sum() > 0)})


def main(run: Path, epochs: int, stop_after: int | None) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    data = rf.prepare_once(run / "shards", write_shards)
    train = rf.Loader(rf.open(f"{data}/train-*.tar"), 8, shuffle=True, seed=7, num_workers=2)
    test = rf.Loader(rf.open(f"{data}/test-*.tar"), 8)
    train, test = accelerated(train, accelerator), accelerated(test, accelerator)

    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    checkpoint = run / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
        accelerator.print(f"resumed at epoch {train.epoch}, step {train.state_dict()['steps']} of {len(train)}")

    ledger = (run / f"delivered-{accelerator.process_index}.txt").open("a")
    while train.epoch < epochs:
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["point.npy"]), batch["cls"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            state = train.state_dict()
            print(*(f"{state['epoch']} {key}" for key in batch["__key__"]), sep="\n", file=ledger, flush=True)
            if state["steps"] == stop_after:
                accelerator.save_state(str(checkpoint))
                return

        model.eval()
        right = []
        for batch in test:
            with torch.no_grad():
                guess = model(batch["point.npy"]).argmax(1)
            right.append(accelerator.gather_for_metrics(guess == batch["cls"]))
        right = torch.cat(right)
        accelerator.print(f"epoch {train.epoch}: {right.sum()} of {len(right)} samples right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="folder for shards, checkpoint and lists of delivered samples")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop-after", type=int, help="save a checkpoint after this step, and stop")
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    main(options.run, options.epochs, options.stop_after)
    gc.collect()  # frees the model, which keeps gloo's threads alive
    PartialState().destroy_process_group()
