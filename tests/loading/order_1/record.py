"""Records what commit f18391a delivered, the last one that knew only version 1 of the windowed order.

Run once, on that commit: `python tests/loading/order_1/record.py FOLDER`. `test_order_1.py` calls the same
functions, so that both read the same data in the same way.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import rankfeed as rf

HERE = Path(__file__).parent
#: Rows and rows of a row group of each file.
FILES = {"one": (600, 600), "few": (600, 90), "many": (800, 10)}
EPOCHS = (0, 1)
#: Orders that do not change: arguments of Plan, and of Schedules over it.
UNCHANGED = [
    {"blocks": blocks, "shuffle": shuffle, "lanes": lanes, "seed": seed}
    for blocks in (1, 7, 1000, [30, 0, 500, 77])
    for shuffle in ("none", "global")
    for lanes in (1, 3, 64, 2000)
    for seed in (0, -5)
]
#: Loaders over a file whose states are resumed: options, steps before the state, world size before it.
STATES: list[dict[str, Any]] = [
    {"file": file, "options": {"shuffle": shuffle, "seed": seed, **more}, "steps": steps, "ranks": ranks}
    for file in FILES
    for shuffle, more in (
        (True, {}),
        ("window", {"window": 50}),
        ("window", {"window": 7, "lanes": 5}),
        ("window", {"window": 200, "lanes": 1}),
        ("global", {}),
        (False, {}),
    )
    for seed, steps, ranks in ((0, 3, 1), (11, 7, 2))
]
BATCH = 16


def write_files(folder: Path) -> None:
    for name, (rows, group) in FILES.items():
        table = pa.table({"row": np.arange(rows, dtype=np.int64)})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=group)


def digest(batches: Iterable[Iterable[int]]) -> str:
    """Of batches of sample ids, in their order."""
    text = json.dumps([[int(row) for row in batch] for batch in batches])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def loader_of(state: dict[str, Any], rank: int, ranks: int, **more: Any) -> rf.Loader:
    source = rf.open(HERE / f"{state['file']}.parquet")
    topology = rf.Topology(rank=rank, world_size=ranks)
    return rf.Loader(source, BATCH, topology=topology, **state["options"], **more)


def rows_of(loader: rf.Loader) -> Iterator[list[int]]:
    for batch in loader:
        yield batch["row"].tolist()


def order_of(arguments: dict[str, Any]) -> list[str]:
    """Digests of the epochs of an order, and of the batches of three ranks."""
    plan = rf.Plan(**arguments)
    digests = [digest([plan.sample_ids(epoch, np.arange(plan.num_samples))]) for epoch in EPOCHS]
    for ranks in (1, 3) if plan.num_samples >= 3 else (1,):
        for rank in range(ranks):
            topology = rf.Topology(rank=rank, world_size=ranks)
            schedule = rf.Schedule(plan, batch_size=BATCH, topology=topology, start=1)
            digests.append(digest(schedule.batch(step) for step in range(len(schedule))))
    return [plan.fingerprint, *digests]


def resumed(recorded: dict[str, Any], **more: Any) -> list[str]:
    """Digests of what a state continues with, on one and on three ranks: the rest of its epoch, and the next."""
    digests = []
    for ranks in (1, 3):
        for rank in range(ranks):
            loader = loader_of(recorded, rank, ranks, **more)
            loader.load_state_dict(recorded["state"])
            digests += [digest(rows_of(loader)) for _ in EPOCHS]
    return digests


def state_of(case: dict[str, Any]) -> dict[str, Any]:
    loader = loader_of(case, 0, case["ranks"])
    batches = iter(loader)
    for _ in range(case["steps"]):
        next(batches)
    return loader.state_dict()


def recorded_samplers() -> list[dict[str, Any]]:
    recorded = []
    for kind in ("DistributedSampler", "DistributedBatchSampler"):
        for shuffle in (False, True):
            sampler = make_sampler(kind, shuffle)
            items = iter(sampler)
            for _ in range(2):
                next(items)
            case = {"kind": kind, "shuffle": shuffle, "state": sampler.state_dict()}
            recorded.append({**case, "digests": resumed_sampler(case)})
    return recorded


def resumed_sampler(case: dict[str, Any]) -> list[str]:
    sampler = make_sampler(case["kind"], case["shuffle"])
    sampler.load_state_dict(case["state"])
    return [digest(map(np.atleast_1d, sampler)) for _ in EPOCHS]


def make_sampler(kind: str, shuffle: bool) -> Any:
    topology = rf.Topology(rank=1, world_size=2)
    arguments = (100,) if kind == "DistributedSampler" else (100, 8)
    return getattr(rf, kind)(*arguments, shuffle=shuffle, seed=4, topology=topology)


def augmentations() -> list[list[int]]:
    """What transforms draw for each sample of two epochs, and batch transforms for each batch, in sorted order."""

    def draw(sample: Any, rng: np.random.Generator) -> Any:
        return {
            **sample,
            "drawn": int(rng.integers(1 << 40)),
            "torch": int(torch.randint(1 << 40, ())),
        }

    def draw_batch(batch: Any, rng: np.random.Generator) -> Any:
        return {**batch, "batch": int(rng.integers(1 << 40))}

    rows = []
    case = {"file": "few", "options": {"seed": 9, "shuffle": "global"}}
    loader = loader_of(case, 0, 1, transform=draw, batch_transform=draw_batch)
    for epoch in EPOCHS:
        for number, batch in enumerate(loader):
            rows.append([epoch, number, batch["batch"]])
            rows += [
                [epoch, *row]
                for row in zip(*(batch[name].tolist() for name in ("row", "drawn", "torch")), strict=True)
                if row[0] < 20
            ]
    return sorted(rows)


def record_ledgers(folder: Path) -> None:
    """A run on two ranks that stops after five steps, and its rest on three ranks: one step of it is missing."""
    case: dict[str, Any] = {"file": "many", "options": {"shuffle": "window", "window": 40, "seed": 2}}
    state: Any = None
    for ranks, steps in ((2, [5]), (3, [None, 4])):
        for rank in range(ranks):
            loader = loader_of(case, rank, ranks, audit=folder)
            if ranks == 3:
                loader.load_state_dict(state)
            for limit in steps:
                for step, _ in enumerate(loader, 1):
                    if step == limit:
                        break
        if ranks == 2:  # one step is lost: 32 samples
            state = loader.state_dict()
            state |= {"position": state["position"] + 2 * BATCH, "steps": state["steps"] + 1}


def judged_ledgers() -> dict[str, Any]:
    """What `rankfeed verify` says of the recorded run."""
    command = [sys.executable, "-m", "rankfeed", "verify", "ledgers", "--data", "many.parquet", "--ids", "--json"]
    output = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=100, check=False)
    document = json.loads(output.stdout)
    epochs = [(epoch["delivered"], epoch["missing_ids"]) for epoch in document["loaders"][0]["epochs"]]
    return {"exit_code": output.returncode, "verdict": document["verdict"], "epochs": epochs}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    recorded = {
        "orders": [{"arguments": arguments, "digests": order_of(arguments)} for arguments in UNCHANGED],
        "states": [],
        "samplers": recorded_samplers(),
        "augmentations": augmentations(),
    }
    for case in STATES:
        case = {**case, "state": state_of(case)}
        recorded["states"].append({**case, "digests": resumed(case)})
    record_ledgers(folder / "ledgers")
    recorded["ledgers"] = judged_ledgers()
    (folder / "recorded.json").write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    if not (HERE / "one.parquet").exists():
        write_files(HERE)
    main(Path(sys.argv[1]))
