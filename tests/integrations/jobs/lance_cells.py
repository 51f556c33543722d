"""A rank that iterates Lance's own loader with our sampler: ``lance_cells.py TABLE OUT CELL...``.

A cell is ``workers:method:kept``: the number of workers, how they start, and whether they live on (1) or not (0).
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lance.torch.data import LanceDataset
from torch.utils.data import DataLoader

from rankfeed.integrations.lance import ShardedSampler

BATCH = 16


def main(table: str, out: Path, cells: list[str]) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    delivered = {}
    for cell in cells:
        workers, method, kept = cell.split(":")
        options = {"multiprocessing_context": method, "persistent_workers": kept == "1"} if workers != "0" else {}
        sampler = ShardedSampler(shuffle=True, seed=3)
        dataset = LanceDataset(table, batch_size=BATCH, columns=["id"], sampler=sampler)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=int(workers), timeout=60 * bool(options), **options
        )
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
        sampler.set_epoch(0)
        epochs.append([batch.tolist() for batch in loader])
        delivered[cell] = epochs
        del loader
        dist.barrier()
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(delivered))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
