"""Run by torchrun: PyG's own loader samples around this rank's seed nodes, with each number of workers.

Writes down the seeds of every step of two epochs, and, given a state, of the rest of the epoch it was taken in.
The loader is PyG's NeighborLoader where the package is installed that this samples with, and else a NodeLoader
that looks at seeds alone.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.typing import WITH_TORCH_SPARSE

from rankfeed.integrations.pyg import NodeSeeds

sys.path.append(str(Path(__file__).parents[3]))
from tests.support.alone import Alone

NODES, BATCH = 101, 4


def loader_of(data: Data, mask: torch.Tensor, seeds: NodeSeeds, workers: int) -> Iterable[Data]:
    if not WITH_TORCH_SPARSE:
        return NodeLoader(data, Alone(), input_nodes=mask, batch_sampler=seeds, num_workers=workers)
    return NeighborLoader(data, [2, 2], input_nodes=mask, batch_sampler=seeds, num_workers=workers)


def seeds_of(batch: Data) -> list[int]:
    """The seeds of a batch; where neighbours are drawn, each seed has the two that point to it."""
    seeds = batch.n_id[: batch.batch_size]
    if WITH_TORCH_SPARSE:
        heads, tails = batch.n_id[batch.edge_index]
        assert torch.all(((tails - heads) % NODES == 1) | ((tails - heads) % NODES == 7)), "edges of the graph"
        assert torch.equal(torch.bincount(batch.edge_index[1])[: len(seeds)], torch.full((len(seeds),), 2))
        assert torch.equal(batch.x[:, 0].long(), batch.n_id)
    return [int(seed) for seed in seeds]


def main(out: str, state: str) -> None:
    dist.init_process_group("gloo")
    nodes = torch.arange(NODES)
    ring = torch.cat([torch.stack([nodes, (nodes + step) % NODES]) for step in (1, 7)], 1)
    data = Data(x=nodes[:, None].float(), edge_index=ring)
    mask = nodes % 3 != 0
    results: dict[str, Any] = {"neighbours": WITH_TORCH_SPARSE}
    for workers in (0, 2):
        seeds = NodeSeeds(mask, BATCH, seed=5)
        loader = loader_of(data, mask, seeds, workers)
        if state:
            seeds.load_state_dict(json.loads(state))
            results[f"{workers}"] = [seeds_of(batch) for batch in loader]
            continue
        results[f"{workers}"] = []
        for epoch in range(2):
            seeds.set_epoch(epoch)
            results[f"{workers}"].append([seeds_of(batch) for batch in loader])
        seeds.set_epoch(7)
        steps = iter(loader)
        next(steps), next(steps)
        results["state"] = seeds.state_dict(delivered_steps=2)
        results["before"] = [seeds.nodes[seeds.schedule().batch(step)].tolist() for step in range(2)]
        del steps
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
