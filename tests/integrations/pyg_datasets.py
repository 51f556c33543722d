"""PyG data sets in memory and on disk that download their raw files."""

import os
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, InMemoryDataset, OnDiskDataset

RAW = 5


def graph(number: int) -> Data:
    size = number % 7 + 2
    return Data(x=torch.full((size, 3), float(number)), edge_index=torch.tensor([[0], [size - 1]]), y=number)


class Downloads:
    """Raw files, which the data set is made from."""

    count: int
    raw_dir: str

    @property
    def raw_file_names(self) -> list[str]:
        return [f"{number}.txt" for number in range(RAW)]

    def download(self) -> None:
        (Path(self.raw_dir).parent / "downloaded-by").write_text(str(os.getpid()))
        for name in self.raw_file_names:
            (Path(self.raw_dir) / name).write_text("".join(f"{number}\n" for number in range(self.count)))

    def graphs(self) -> list[Data]:
        lines = [(Path(self.raw_dir) / name).read_text().splitlines() for name in self.raw_file_names]
        assert all(line == [str(number) for number in range(self.count)] for line in lines), "half a download"
        return [graph(int(number)) for number in lines[0]]


class InMemory(Downloads, InMemoryDataset):
    processed_file_names = "data.pt"

    def __init__(self, root: str, count: int = 40, transform: Any = None) -> None:
        self.count = count
        super().__init__(root, transform)
        self.load(self.processed_paths[0])

    def process(self) -> None:
        self.save(self.graphs(), self.processed_paths[0])


class OnDisk(Downloads, OnDiskDataset):
    def __init__(self, root: str, count: int = 40, transform: Any = None) -> None:
        self.count = count
        x, edges = {"dtype": torch.float, "size": (-1, 3)}, {"dtype": torch.long, "size": (2, -1)}
        super().__init__(root, transform, schema={"x": x, "edge_index": edges, "y": int})

    def process(self) -> None:
        for data in self.graphs():
            self.append(data)

    def serialize(self, data: Any) -> Any:
        return {"x": data.x, "edge_index": data.edge_index, "y": int(data.y)}

    def deserialize(self, data: Any) -> Data:
        return Data(**data)


KINDS = {"memory": InMemory, "disk": OnDisk}


def right(dataset: Any, count: int) -> bool:
    """Whether these are the graphs, all of them."""
    return len(dataset) == count and all(
        torch.equal(dataset[number].x, graph(number).x) and int(dataset[number].y) == number
        for number in range(count)
    )
