"""Train on the graphs of a PyG dataset under MPI: one rank processes it, and each graph is read once per epoch.

mpirun -np 2 python examples/pyg_mpi.py run/
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.nn import GCNConv, global_mean_pool

import rankfeed as rf
from rankfeed.integrations.pyg import prepare


class Rings(InMemoryDataset):
    """An ordinary PyG dataset: process() writes the file and needs no code for ranks. It may have a download()."""

    processed_file_names = "data.pt"

    def __init__(self, root, transform=None):
        super().__init__(root, transform)
        self.load(self.processed_paths[0])

    def process(self):
        draw = torch.Generator().manual_seed(0)
        graphs = []
        for number in range(1003):
            nodes, label = 4 + number % 9, number % 2
            ring = torch.arange(nodes)
            edges = torch.stack([ring, ring.roll(-1)])
            features = torch.randn(nodes, 8, generator=draw) + label
            graphs.append(Data(x=features, edge_index=torch.cat([edges, edges.flip(0)], 1), y=label, id=number))
        self.save(graphs, self.processed_paths[0])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = GCNConv(8, 16), nn.Linear(16, 2)

    def forward(self, batch):
        return self.head(global_mean_pool(self.layer(batch.x, batch.edge_index).relu(), batch.batch))


def train(run: Path, epochs: int, workers: int) -> None:
    here = rf.Topology.detect()
    dataset = prepare(Rings, run / "rings")
    loader = rf.Loader(rf.from_dataset(dataset), batch_size=32, shuffle=True, num_workers=workers, audit=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with (run / f"read-{here.rank}-of-{here.world_size}.txt").open("w") as ledger:
        for epoch in range(epochs):
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch), batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(epoch, *batch.id.tolist(), file=ledger, flush=True)
            if here.rank == 0:
                print(f"{loader.audit_report}; loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="folder that all ranks see")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    # For one host; on several, export the address of the first one (with Open MPI: -x MASTER_ADDR).
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    world = rf.Topology.detect()
    dist.init_process_group("gloo", rank=world.rank, world_size=world.world_size)
    train(options.run, options.epochs, options.workers)
    dist.destroy_process_group()  # after train() returned: a DDP model keeps gloo's threads alive
