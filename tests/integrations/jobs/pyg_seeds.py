"""Run by torchrun: PyG's own loader samples around this rank's seed nodes, with each number of workers.

Writes down the seeds of every step of two epochs, and, given a state, of the rest of the epoch it was taken in.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from rankfeed.integrations.pyg import NodeSeeds

sys.path.append(str(Path(__file__).parents[3]))
from tests.support.alone import Alone

NODES, BATCH = 101, 4


def main(out: str, state: str) -> None:
    dist.init_process_group("gloo")
    data = Data(x=torch.arange(NODES)[:, None].float(), edge_index=torch.empty(2, 0, dtype=torch.long))
    mask = torch.arange(NODES) % 3 != 0
    results: dict[str, Any] = {}
    for workers in (0, 2):
        seeds = NodeSeeds(mask, BATCH, seed=5)
        loader = NodeLoader(data, Alone(), input_nodes=mask, batch_sampler=seeds, num_workers=workers)
        if state:
            seeds.load_state_dict(json.loads(state))
            results[f"{workers}"] = [batch.n_id[: batch.batch_size].tolist() for batch in loader]
            continue
        results[f"{workers}"] = []
        for epoch in range(2):
            seeds.set_epoch(epoch)
            results[f"{workers}"].append([batch.n_id[: batch.batch_size].tolist() for batch in loader])
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
