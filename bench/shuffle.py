"""How well orders mix data that are sorted by label, what ranks read for it, and what a network learns from it.

Of each number of blocks and ranks, batch size and window: windows in version 1 and in the present version, and the
global shuffle. `--network` trains a small network with BatchNorm on the batches of each order.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from typing import Any

import numpy as np
import torch

import rankfeed as rf
from rankfeed.plan import Plan, Schedule, measure_quality, measure_reading

SAMPLES, CLASSES = 1_024_000, 10
BLOCKS, RANKS, BATCHES = (1, 32, 100, 1_000, 10_000), (1, 4, 16, 256), (16, 64)
#: Windows as parts of the data.
WINDOWS = (20_000, 500)


def orders(blocks: int, window: int, seed: int = 0) -> dict[str, Plan]:
    sizes = np.diff(np.linspace(0, SAMPLES, blocks + 1).astype(np.int64))
    windows = Plan(sizes, shuffle="window", window=window, lanes=64, seed=seed)
    return {"version 1": windows.with_order(1), "version 2": windows, "global": Plan(sizes, seed=seed)}


def classes_seen(plan: Plan, batch_size: int, world_size: int, epochs: int) -> int:
    """Classes that rank 0 sees in some epochs."""
    seen = np.zeros(CLASSES, bool)
    for epoch in range(epochs):
        topology = rf.Topology(rank=0, world_size=world_size)
        schedule = Schedule(plan, batch_size=batch_size, topology=topology, epoch=epoch, tail="drop")
        for step in np.unique(np.linspace(0, len(schedule) - 1, 50, dtype=np.int64)).tolist():
            ids, _ = schedule.batches(range(step, step + 1))
            seen[np.unique(ids * CLASSES // SAMPLES)] = True
    return int(seen.sum())


def measure(blocks: int, world_size: int, batch_size: int, window: int, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for name in orders(blocks, window):
        plans = [orders(blocks, window, seed)[name] for seed in range(seeds)]
        qualities = [measure_quality(plan, batch_size=batch_size, world_size=world_size) for plan in plans]
        reading = measure_reading(plans[0], batch_size=batch_size, world_size=world_size, cached_blocks=128)
        row = {
            "data_blocks": blocks,
            "ranks": world_size,
            "batch_size": batch_size,
            "window": window,
            "order": name,
        }
        row |= {
            part: round(float(np.mean([vars(each)[part] for each in qualities])), 3) for part in vars(qualities[0])
        }
        row |= {"share": reading.share, "decoded": reading.decoded}
        row |= {f"seen_in_{epochs}": classes_seen(plans[0], batch_size, world_size, epochs) for epochs in (1, 3)}
        rows.append(row)
    return rows


def network(row_groups: int, world_size: int, options: dict[str, Any], epochs: int = 4) -> float:
    """Accuracy of a network with BatchNorm after some epochs of sorted data, with the gradients of all ranks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, width = 20_000, 16
    random = np.random.default_rng(0)
    centers = random.normal(size=(CLASSES, width)) * 0.9

    def points(labels: np.ndarray) -> np.ndarray:
        return (centers[labels] + random.normal(size=(len(labels), width))).astype(np.float32)

    labels, held_out = np.repeat(np.arange(CLASSES), rows // CLASSES), np.tile(np.arange(CLASSES), 400)
    vectors, test = points(labels), torch.from_numpy(points(held_out))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), width), "y": labels})
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(table, f"{folder}/sorted.parquet", row_group_size=rows // row_groups)
        source = rf.open(f"{folder}/sorted.parquet")
        loaders = [
            rf.Loader(source, 16, topology=rf.Topology(rank=rank, world_size=world_size), **options)
            for rank in range(world_size)
        ]
        torch.manual_seed(0)
        layers = [
            torch.nn.Linear(width, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, CLASSES),
        ]
        models = [torch.nn.Sequential(*layers)]
        optimizer = torch.optim.SGD(models[0].parameters(), 0.05, momentum=0.9)
        for _ in range(epochs):
            for batches in zip(*loaders, strict=True):
                optimizer.zero_grad()
                for batch in batches:  # BatchNorm's statistics are those of each rank
                    loss = torch.nn.functional.cross_entropy(models[0](batch["x"]), batch["y"])
                    (loss / world_size).backward()
                optimizer.step()
        models[0].eval()
        return float((models[0](test).argmax(1).numpy() == held_out).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--network", action="store_true", help="train the network instead")
    arguments = parser.parse_args()
    if arguments.network:
        torch.set_num_threads(1)  # a small network
        for row_groups, world_size in product((1, 100), (1, 4)):
            sizes = [20_000 // row_groups] * row_groups
            accuracies: dict[str, list[float]] = {}
            for seed in range(arguments.seeds):
                windows = Plan(sizes, shuffle="window", window=1, lanes=64, seed=seed)
                kinds: dict[str, dict[str, Any]] = {
                    "version 1": {"plan": windows.with_order(1)},
                    "version 2": {"plan": windows},
                    "shuffle=True": {"shuffle": True, "seed": seed},
                    "global": {"shuffle": "global", "seed": arguments.seeds + seed},
                }
                for name, options in kinds.items():
                    accuracies.setdefault(name, []).append(network(row_groups, world_size, options))
            mean = {name: round(float(np.mean(each)), 3) for name, each in accuracies.items()}
            print(
                json.dumps({"row_groups": row_groups, "ranks": world_size, "mean": mean, **accuracies}), flush=True
            )
        return
    titles = "blocks", "ranks", "batch", "window", "order", "classes", "of a global batch", "blocks in a batch"
    titles += "share of blocks", "decoded", "classes seen in 1, 3 epochs"
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for blocks, world_size, batch_size, part in product(BLOCKS, RANKS, BATCHES, WINDOWS):
        for row in measure(blocks, world_size, batch_size, max(1, SAMPLES // part), arguments.seeds):
            *head, one, three = row.values()
            print("| " + " | ".join(str(cell) for cell in head) + f" | {one}, {three} |", flush=True)


if __name__ == "__main__":
    main()
