"""Real ranks with real workers of every kind: each sample once, the same bytes in the same order."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.launch.jobs.cells import VALUES
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
    rf.write(rows, path, shard_bytes=2000, progress=False)
    return path


def launch(ranks: int, wanted: list[Cell], sizes: Sequence[int], data: Path, out: Path, timeout: float) -> None:
    words = [SCRIPT, data, out, json.dumps(wanted), json.dumps(list(sizes))]
    jobs.run(jobs.torchrun(ranks, *words), out / "log", timeout)


def check_cells(ranks: int, wanted: list[Cell], out: Path) -> None:
    results = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    once = Counter(range(SAMPLES))
    for index, cell in enumerate(wanted):
        steps = [result[index]["steps"] for result in results]
        assert Counter(sample for rank in steps for step in rank for sample in step) == once, cell
        assert len({len(rank) for rank in steps}) == 1, cell
        if cell["kind"] != "sampler":  # a sampler of single ids ends an epoch in its own way
            assert steps == [result[0]["steps"] for result in results], cell
            assert [r[index]["digest"] for r in results] == [r[0]["digest"] for r in results], cell


def check_means(ranks: int, sizes: Sequence[int], out: Path) -> None:
    for rank in range(ranks):
        means = json.loads((out / f"means{rank}.json").read_text())
        for size, ways in zip(sizes, means, strict=True):
            assert ways == dict.fromkeys(ways, math.fsum(VALUES[:size].tolist()) / size), size
            assert len(ways) == (8 if size >= ranks else 4)  # fewer samples than ranks: tail="pad" alone


@pytest.mark.soak
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
    launch(2, wanted, [], data, tmp_path, 240)
    check_cells(2, wanted, tmp_path)


FEW: list[Cell] = [
    {"kind": "thread", "workers": 0, "start": "fork"},
    {"kind": "thread", "workers": 2, "start": "fork"},
    {"kind": "process", "workers": 1, "start": "fork"},
    {"kind": "batch_sampler", "workers": 2, "start": "fork"},
]
SIZES = range(1, 41, 3)


@pytest.fixture(scope="module", params=[2, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (1, 3))])
def other_ranks(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path]:
    """How many ranks there were in a launch, and where they wrote."""
    out = tmp_path_factory.mktemp(f"ranks{request.param}")
    launch(request.param, FEW, SIZES, data, out, 240)
    return request.param, out


@pytest.mark.timeout(300)
def test_every_sample_once_on_other_numbers_of_ranks(other_ranks: tuple[int, Path]) -> None:
    ranks, out = other_ranks
    check_cells(ranks, FEW, out)


@pytest.mark.timeout(300)
def test_means_of_a_plain_loop_are_exact_for_sizes_that_do_not_divide(other_ranks: tuple[int, Path]) -> None:
    ranks, out = other_ranks
    check_means(ranks, SIZES, out)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_cell_of_ranks_workers_kinds_and_start_methods(ranks: int, data: Path, tmp_path: Path) -> None:
    wanted, sizes = cells((0, 1, 2), STARTS), range(1, 41)
    launch(ranks, wanted, sizes, data, tmp_path, 1500)
    check_cells(ranks, wanted, tmp_path)
    check_means(ranks, sizes, tmp_path)
    print(f"\n{len(wanted)} cells on {ranks} ranks: each of {SAMPLES} samples once, the same bytes in each cell")
