"""Real ranks with real workers of every kind: each sample once, the same bytes in the same order."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import jobs

import rankfeed as rf

SCRIPT = Path(__file__).parent / "jobs" / "cells.py"
SAMPLES = 103
STARTS = ("fork", "spawn", "forkserver")

Cell = dict[str, Any]


def cells(workers: tuple[int, ...], starts: tuple[str, ...]) -> list[Cell]:
    """Every kind with every number of workers, and every start method where processes are started."""
    made = []
    for kind in ("thread", "process", "batch_sampler", "sampler"):
        for count in workers:
            methods = starts if count and kind != "thread" else ("fork",)
            made += [{"kind": kind, "workers": count, "start": method} for method in methods]
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("cells") / "data"
    rows = (
        {"x": rng.standard_normal((int(rng.integers(0, 9)), 3)).astype(np.float32), "y": i, "text": f"row {i}"}
        for i in range(SAMPLES)
    )
    rf.pack(rows, path, shard_bytes=2000, progress=False)
    return path


def check(ranks: int, wanted: list[Cell], data: Path, tmp_path: Path, timeout: float) -> None:
    jobs.run(jobs.torchrun(ranks, SCRIPT, data, tmp_path, json.dumps(wanted)), tmp_path / "log", timeout)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    once = Counter(range(SAMPLES))
    for index, cell in enumerate(wanted):
        steps = [result[index]["steps"] for result in results]
        assert Counter(sample for rank in steps for step in rank for sample in step) == once, cell
        assert len({len(rank) for rank in steps}) == 1, cell
        if cell["kind"] != "sampler":  # a sampler of single ids ends an epoch in its own way
            assert steps == [result[0]["steps"] for result in results], cell
            assert [r[index]["digest"] for r in results] == [r[0]["digest"] for r in results], cell


@pytest.mark.timeout(300)
def test_every_sample_once_with_the_same_bytes_for_every_kind_of_worker_on_two_ranks(
    data: Path, tmp_path: Path
) -> None:
    wanted = [
        *cells((0, 2), ("fork",)),
        {"kind": "process", "workers": 1, "start": "spawn"},
        {"kind": "process", "workers": 2, "start": "forkserver"},
        {"kind": "batch_sampler", "workers": 1, "start": "spawn"},
        {"kind": "batch_sampler", "workers": 2, "start": "fork", "persistent": True},
        {"kind": "sampler", "workers": 2, "start": "forkserver"},
    ]
    check(2, wanted, data, tmp_path, 240)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_sample_once_on_other_numbers_of_ranks(ranks: int, data: Path, tmp_path: Path) -> None:
    wanted = [
        {"kind": "thread", "workers": 0, "start": "fork"},
        {"kind": "thread", "workers": 2, "start": "fork"},
        {"kind": "process", "workers": 1, "start": "fork"},
        {"kind": "batch_sampler", "workers": 2, "start": "fork"},
    ]
    check(ranks, wanted, data, tmp_path, 240)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_cell_of_ranks_workers_kinds_and_start_methods(ranks: int, data: Path, tmp_path: Path) -> None:
    wanted = cells((0, 1, 2), STARTS)
    check(ranks, wanted, data, tmp_path, 1500)
    print(f"\n{len(wanted)} cells on {ranks} ranks: each of {SAMPLES} samples once, the same bytes in each cell")
