"""Graphs per second of the loader, beside PyTorch Geometric's own DataLoader over the same data set.

Workloads: G1 molecules (some 18 nodes of 16 features) in memory, batch 128. G2 the same with a transform. G3 the
same on disk. G4 large graphs (some 600 nodes of 128 features) in memory, batch 16. All shuffled; PyG with the
number of workers that is best for it. Torch keeps to one thread, as it should where ranks share a machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench.turns import in_turn, medians
from torch_geometric.data import Data, InMemoryDataset, OnDiskDataset
from torch_geometric.loader import DataLoader

import rankfeed as rf


def graphs(count: int, nodes: int, features: int) -> list[Data]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        size = int(torch.randint(nodes // 2, nodes * 3 // 2, (1,), generator=draw))
        made.append(
            Data(
                x=torch.randn(size, features, generator=draw),
                edge_index=torch.randint(0, size, (2, 2 * size), generator=draw),
                edge_attr=torch.randn(2 * size, 4, generator=draw),
                y=torch.tensor([number]),
            )
        )
    return made


class Stored(OnDiskDataset):
    """Graphs in a database, with a schema, so that rows are no pickles."""

    def __init__(self, root: str) -> None:
        sizes: dict[str, Any] = {
            "x": {"dtype": torch.float, "size": (-1, 16)},
            "edge_index": {"dtype": torch.long, "size": (2, -1)},
            "edge_attr": {"dtype": torch.float, "size": (-1, 4)},
            "y": int,
        }
        super().__init__(root, schema=sizes)

    def serialize(self, data: Any) -> dict[str, Any]:
        return {**data.to_dict(), "y": int(data.y)}

    def deserialize(self, data: dict[str, Any]) -> Data:
        return Data(**data)


def moved(data: Data) -> Data:
    data.x = data.x + 1
    return data


def in_memory(made: list[Data], transform: Callable[[Data], Data] | None = None) -> InMemoryDataset:
    dataset = InMemoryDataset(transform=transform)
    dataset.data, dataset.slices = InMemoryDataset.collate(made)
    return dataset


def on_disk(made: list[Data], folder: str) -> Stored:
    dataset = Stored(folder)
    dataset.extend(made)
    return dataset


#: Name -> graphs, batch size, (graphs, folder) -> data set.
WORKLOADS: dict[str, tuple[tuple[int, int, int], int, Callable[[list[Data], str], Any]]] = {
    "G1 in memory": ((20_000, 18, 16), 128, lambda made, _: in_memory(made)),
    "G2 transform": ((20_000, 18, 16), 128, lambda made, _: in_memory(made, moved)),
    "G3 on disk": ((10_000, 18, 16), 128, on_disk),
    "G4 large": ((600, 600, 128), 16, lambda made, _: in_memory(made)),
}


def drain(loader: Any) -> int:
    return sum(batch.num_graphs for batch in loader)


def measure(name: str, scale: float, runs: int) -> dict[str, Any]:
    (count, nodes, features), batch, make = WORKLOADS[name]
    count = max(2 * batch, int(count * scale))
    with tempfile.TemporaryDirectory() as folder:
        dataset = make(graphs(count, nodes, features), folder)
        contestants: dict[str, Any] = {
            "PyG": DataLoader(dataset, batch, shuffle=True),
            "PyG, 2 workers": DataLoader(dataset, batch, shuffle=True, num_workers=2, persistent_workers=True),
        }
        for label, options in (("rankfeed", {}), ("rankfeed, 2 threads", {"num_workers": 2})):
            source = rf.from_dataset(dataset)
            contestants[label] = rf.Loader(source, batch, shuffle=True, topology=rf.Topology(), **options)
        rates = in_turn({label: partial(drain, loader) for label, loader in contestants.items()}, runs)
    best = [max(pair) for pair in zip(rates["PyG"], rates["PyG, 2 workers"], strict=True)]
    return {
        "workload": name,
        "graphs": count,
        "graphs_per_second": medians(rates),
        "ratio_to_best_of_pyg": {
            label: statistics.median(a / b for a, b in zip(values, best, strict=True))
            for label, values in rates.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of graphs")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (after one to warm up)")
    parser.add_argument("--only", choices=[name.split()[0] for name in WORKLOADS], help="one workload")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name in WORKLOADS:
        if options.only and not name.startswith(options.only):
            continue
        results.append(measure(name, options.scale, options.runs))
        if not options.json:
            row = results[-1]
            print(f"{name} ({row['graphs']:,} graphs)")
            for label, ratio in row["ratio_to_best_of_pyg"].items():
                print(f"  {label:<20} {row['graphs_per_second'][label]:>10,.0f} graphs/s   {ratio:5.2f}")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
