"""Seed nodes: each once an epoch over all ranks, in equal steps, in a new order each epoch, resumable."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import jobs
from tests.support.marks import soak
from torch_geometric.data import Data, HeteroData

import rankfeed as rf
from rankfeed.errors import ArgumentError, PlanError, StateError
from rankfeed.integrations.pyg import NodeSeeds

SCRIPT = Path(__file__).parent / "jobs" / "pyg_seeds.py"
SEEDS = [node for node in range(101) if node % 3]
ONE = rf.Topology()


def launch(ranks: int, folder: Path, state: Any = None, sampler: Path | None = None) -> list[dict[str, Any]]:
    folder.mkdir()
    text = json.dumps(state) if state else ""
    path = os.pathsep.join(filter(None, [str(sampler or ""), os.environ.get("PYTHONPATH")]))
    jobs.run(["env", f"PYTHONPATH={path}", *jobs.torchrun(ranks, SCRIPT, folder, text)], folder / "log", 400)
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert all(result["neighbours"] == (sampler is not None) for result in results)
    return results


def count(ranks: list[list[list[int]]]) -> Counter[int]:
    return Counter(node for steps in ranks for step in steps for node in step)


@pytest.fixture
def sampler(request: pytest.FixtureRequest) -> Path | None:
    """Where the package lies that NeighborLoader samples with: built from its source, once on a machine.

    PyPI has it and what it scatters with as sources alone, and they take long to compile.
    """
    if request.param is None:
        return None
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path.home() / ".cache" / "rankfeed-tests" / f"{request.param}-python{python}-torch{torch.__version__}"

    def build(staging: Path) -> None:
        sources = [request.param, "torch-scatter"]
        how = ["--no-deps", "--no-build-isolation", "--no-binary", ",".join(sources), "--target", staging]
        subprocess.run([sys.executable, "-m", "pip", "install", *how, *sources, "scipy"], check=True)

    return rf.prepare_once(folder, build)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sampler", [pytest.param(None, id="none"), soak("torch-sparse")], indirect=True)
def test_every_seed_once_in_equal_steps_and_resumed_on_other_ranks(sampler: Path | None, tmp_path: Path) -> None:
    on_three = launch(3, tmp_path / "three", sampler=sampler)
    for workers in ("0", "2"):
        epochs = [[result[workers][epoch] for result in on_three] for epoch in range(2)]
        for ranks in epochs:
            assert count(ranks) == Counter(SEEDS)
            assert len({len(steps) for steps in ranks}) == 1
        assert epochs[0] != epochs[1], "a new order"
        assert epochs == [[result["0"][epoch] for result in on_three] for epoch in range(2)]
    assert all(result["state"] == on_three[0]["state"] for result in on_three)
    on_two = launch(2, tmp_path / "two", on_three[0]["state"], sampler)
    before = [result["before"] for result in on_three]
    for workers in ("0", "2"):
        after = [result[workers] for result in on_two]
        assert count(before) + count(after) == Counter(SEEDS)
        assert len({len(steps) for steps in after}) == 1


def test_seeds_are_given_in_every_way_that_pyg_takes() -> None:
    data = Data(num_nodes=6)
    typed = HeteroData()
    typed["user"].num_nodes = 4
    mask = torch.tensor([False, True, True, False])
    for given, graph, nodes in (
        (torch.tensor([5, 2, 9]), None, [5, 2, 9]),
        ([5, 2, 9], None, [5, 2, 9]),
        (np.array([5, 2, 9]), None, [5, 2, 9]),
        (mask, None, [1, 2]),
        (("user", mask), None, [1, 2]),
        (("user", torch.tensor([3])), None, [3]),
        (None, data, list(range(6))),
        ("user", typed, list(range(4))),
        (("user", None), typed, list(range(4))),
    ):
        seeds = NodeSeeds(given, 2, data=graph, shuffle=False, topology=ONE)
        assert seeds.nodes.tolist() == nodes
        assert [place for batch in seeds for place in batch] == list(range(len(nodes)))


def test_a_checkpoint_of_other_seeds_is_refused() -> None:
    state = NodeSeeds([1, 2, 3], topology=ONE).state_dict()
    NodeSeeds(torch.tensor([1, 2, 3]), topology=ONE).load_state_dict(state)
    for other in ([1, 2, 4], ("user", [1, 2, 3])):
        with pytest.raises(StateError, match="other data"):
            NodeSeeds(other, topology=ONE).load_state_dict(state)


def test_what_are_no_seeds_is_refused() -> None:
    with pytest.raises(ArgumentError, match="pass data="):
        NodeSeeds(None)
    with pytest.raises(ArgumentError, match="no such nodes"):
        NodeSeeds("item", data=HeteroData())
    for wrong in (torch.zeros(2, 2, dtype=torch.long), torch.rand(3)):
        with pytest.raises(ArgumentError, match="not a selection of nodes"):
            NodeSeeds(wrong)
    with pytest.raises(PlanError):
        len(NodeSeeds(torch.zeros(4, dtype=torch.bool), topology=ONE))
