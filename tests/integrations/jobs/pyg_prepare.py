"""One rank of a job that wants PyG data sets, one after the other; as a module their classes.

pyg_prepare.py OUT COUNT KIND ROOT [KIND ROOT]...: each rank says OUT/PID.started, and in the end, in
OUT/PID.done, of each data set whether it was right.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, InMemoryDataset, OnDiskDataset

from rankfeed.integrations.pyg import prepare

RAW = 5


def graph(number: int) -> Data:
    size = number % 7 + 2
    return Data(x=torch.full((size, 3), float(number)), edge_index=torch.tensor([[0], [size - 1]]), y=number)


class Downloads:
    """Raw files that come slowly, piece by piece, as over a network."""

    count: int
    raw_dir: str

    @property
    def raw_file_names(self) -> list[str]:
        return [f"{number}.txt" for number in range(RAW)]

    def download(self) -> None:
        (Path(self.raw_dir).parent / "downloaded-by").write_text(str(os.getpid()))
        for name in self.raw_file_names:
            with open(Path(self.raw_dir) / name, "w") as file:
                for number in range(self.count):
                    file.write(f"{number}\n")
                    file.flush()
                    time.sleep(0.002)

    def graphs(self) -> list[Data]:
        lines = [(Path(self.raw_dir) / name).read_text().splitlines() for name in self.raw_file_names]
        assert all(each == [str(number) for number in range(self.count)] for each in lines), "half a download"
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
        sizes: Any = {
            "x": {"dtype": torch.float, "size": (-1, 3)},
            "edge_index": {"dtype": torch.long, "size": (2, -1)},
            "y": int,
        }
        super().__init__(root, transform, schema=sizes)

    def process(self) -> None:
        for data in self.graphs():
            self.append(data)
            time.sleep(0.001)

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


if __name__ == "__main__":
    out, count, wanted = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    (out / f"{os.getpid()}.started").touch()
    pairs = zip(wanted[::2], wanted[1::2], strict=True)
    told = [right(prepare(KINDS[kind], root, count), count) for kind, root in pairs]
    (out / f"{os.getpid()}.done").write_text(json.dumps(told))
