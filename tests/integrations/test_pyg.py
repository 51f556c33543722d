"""Seed nodes: each once an epoch over all ranks, in equal steps, in a new order each epoch, resumable."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import jobs
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.loader import DataLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

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
@pytest.mark.parametrize(
    "sampler", [pytest.param(None, id="none"), pytest.param("torch-sparse", marks=pytest.mark.soak)], indirect=True
)
def test_every_seed_once_in_equal_steps_and_resumed_on_another_number_of_ranks(
    sampler: Path | None, tmp_path: Path
) -> None:
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


class OneHop(BaseSampler):
    """Samples all nodes that the seeds point to, in plain torch: pyg-lib is not on PyPI."""

    def __init__(self, edge_index: torch.Tensor, nodes: int) -> None:
        self.edges = edge_index[:, edge_index[0].argsort(stable=True)]
        self.starts = torch.zeros(nodes + 1, dtype=torch.long)
        self.starts[1:] = torch.bincount(edge_index[0], minlength=nodes).cumsum(0)

    @property
    def edge_permutation(self) -> None:
        return None

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        runs = [torch.arange(int(self.starts[seed]), int(self.starts[seed + 1])) for seed in index.node]
        targets = self.edges[1, torch.cat(runs)]
        others = targets.unique()
        nodes = torch.cat([index.node, others[~torch.isin(others, index.node)]])
        place = torch.full((len(self.starts),), -1)
        place[nodes] = torch.arange(len(nodes))
        col = torch.arange(len(runs)).repeat_interleave(torch.tensor([len(run) for run in runs]))
        metadata = (index.input_id, index.time)
        return SamplerOutput(node=nodes, row=place[targets], col=col, edge=None, metadata=metadata)

    def sample_from_edges(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


@pytest.mark.soak
def test_the_debian_dependency_graph_is_sampled_around_each_package_once() -> None:
    names, edge_index = dependencies()
    graph = Data(x=torch.arange(len(names)).float()[:, None], edge_index=edge_index)
    hops = OneHop(edge_index, len(names))
    print(f"\n{len(names):,} packages, {edge_index.size(1):,} dependencies")
    epochs = []
    for epoch in range(2):
        seen: Counter[int] = Counter()
        edges, steps = 0, []
        for rank in range(3):
            seeds = NodeSeeds(None, 256, data=graph, topology=rf.Topology(rank, 3))
            seeds.set_epoch(epoch)
            steps.append(len(seeds))
            for batch in NodeLoader(graph, hops, batch_sampler=seeds):
                own = batch.n_id[: batch.batch_size]
                seen.update(own.tolist())
                edges += batch.edge_index.size(1)
                assert torch.equal(batch.x[:, 0].long(), batch.n_id)
            epochs.append(own.tolist())
        assert seen == Counter(range(len(names)))
        assert edges == edge_index.size(1), "the edges of each seed come with it, once"
        assert len(Counter(steps)) == 1
    assert epochs[:3] != epochs[3:]


@pytest.mark.soak
def test_graphs_around_debian_packages_are_joined_as_by_pyg() -> None:
    names, edge_index = dependencies()
    targets = edge_index[:, edge_index[0].argsort(stable=True)]
    graphs = []
    for package in range(0, len(names), 4):
        first, last = torch.searchsorted(targets[0], torch.tensor([package, package + 1])).tolist()
        others = targets[1, first:last].unique()
        nodes = torch.cat([torch.tensor([package]), others])
        star = torch.stack([torch.zeros(len(others), dtype=torch.long), torch.arange(1, len(nodes))])
        graphs.append(
            Data(x=nodes[:, None].float(), edge_index=star, y=torch.tensor([package]), name=names[package])
        )
    dataset = InMemoryDataset()
    dataset.data, dataset.slices = InMemoryDataset.collate(graphs)
    loader = rf.Loader(rf.from_dataset(dataset), 128, topology=ONE, tail="drop")
    rates = []
    for contestant in (loader, DataLoader(dataset, 128, drop_last=True), loader, DataLoader(dataset, 128)):
        began = time.perf_counter()
        steps = sum(1 for _ in contestant)
        rates.append(steps * 128 / (time.perf_counter() - began))
    print(f"\n{len(graphs):,} graphs: rankfeed {rates[2]:,.0f}, PyG {rates[3]:,.0f} graphs a second")
    for ours, theirs in zip(loader, DataLoader(dataset, 128, drop_last=True), strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs.keys():  # noqa: SIM118  (a graph is no dict)
            mine, other = ours[name], theirs[name]
            assert torch.equal(mine, other) if isinstance(other, torch.Tensor) else mine == other


def dependencies() -> tuple[list[str], torch.Tensor]:
    """Debian's packages, and which depends on which: int64 [2, dependencies]."""
    said = subprocess.run(
        ["apt-cache", "dumpavail"], capture_output=True, text=True, check=True, timeout=600
    ).stdout
    needs: dict[str, list[str]] = {}
    name = ""
    for line in said.splitlines():
        key, _, value = line.partition(": ")
        if key == "Package":
            name = value
            needs.setdefault(name, [])
        elif key in ("Depends", "Pre-Depends"):
            needs[name] += [
                one.split()[0].split(":")[0] for any_of in value.split(",") for one in any_of.split("|")
            ]
    number = {name: place for place, name in enumerate(needs)}
    pairs = {(number[name], number[each]) for name, others in needs.items() for each in others if each in number}
    return list(needs), torch.tensor(sorted(pairs)).T.contiguous()
