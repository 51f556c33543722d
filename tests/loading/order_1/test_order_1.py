"""What f18391a recorded still means the same: states, orders that did not change, augmentations and ledgers.

It was the last commit that knew only version 1 of the windowed order. The files beside this one are what it wrote;
the functions below are those that it recorded with.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankfeed as rf

HERE = Path(__file__).parent
RECORDED: dict[str, Any] = json.loads((HERE / "recorded.json").read_text())
EPOCHS = (0, 1)
BATCH = 16


def digest(batches: Iterable[Iterable[int]]) -> str:
    """Of batches of sample ids, in their order."""
    text = json.dumps([[int(row) for row in batch] for batch in batches])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def loader_of(state: dict[str, Any], rank: int, ranks: int, **more: Any) -> rf.Loader:
    source = rf.open(HERE / f"{state['file']}.parquet")
    return rf.Loader(source, BATCH, topology=rf.Topology(rank, ranks), **state["options"], **more)


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
            digests += [digest(batch["row"].tolist() for batch in loader) for _ in EPOCHS]
    return digests


def resumed_sampler(case: dict[str, Any]) -> list[str]:
    arguments = (100,) if case["kind"] == "DistributedSampler" else (100, 8)
    topology = rf.Topology(rank=1, world_size=2)
    sampler = getattr(rf, case["kind"])(*arguments, shuffle=case["shuffle"], seed=4, topology=topology)
    sampler.load_state_dict(case["state"])
    return [digest(map(np.atleast_1d, sampler)) for _ in EPOCHS]


def augmentations() -> list[list[int]]:
    """What transforms draw for each sample of two epochs, and batch transforms for each batch, in sorted order."""

    def draw(sample: Any, rng: np.random.Generator) -> Any:
        return {**sample, "drawn": int(rng.integers(1 << 40)), "torch": int(torch.randint(1 << 40, ()))}

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


def test_orders_without_windowed_shuffle_equal_those_recorded_from_the_first_release() -> None:
    for case in RECORDED["orders"]:
        assert order_of(case["arguments"]) == case["digests"], case["arguments"]


@pytest.mark.parametrize("file", ["one", "few", "many"])
def test_a_loader_state_saved_with_order_version_1_resumes_in_the_recorded_order(file: str) -> None:
    cases = [case for case in RECORDED["states"] if case["file"] == file]
    assert cases
    for case in cases:
        assert resumed(case) == case["digests"], case["options"]


def test_a_sampler_state_saved_with_order_version_1_resumes_in_the_recorded_order() -> None:
    for case in RECORDED["samplers"]:
        assert resumed_sampler(case) == case["digests"], case["kind"]


def test_random_augmentations_equal_those_recorded_from_the_first_release() -> None:
    assert augmentations() == RECORDED["augmentations"]


def test_ledgers_written_with_order_version_1_are_verified_in_that_order() -> None:
    command = [sys.executable, "-m", "rankfeed", "verify", "ledgers", "--data", "many.parquet", "--ids", "--json"]
    output = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=100, check=False)
    document = json.loads(output.stdout)
    epochs = [[epoch["delivered"], epoch["missing_ids"]] for epoch in document["loaders"][0]["epochs"]]
    verified = {"exit_code": output.returncode, "verdict": document["verdict"], "epochs": epochs}
    assert verified == RECORDED["ledgers"]
    assert len(epochs[0][1]) == 32
