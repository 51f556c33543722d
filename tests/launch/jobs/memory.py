"""Run by torchrun: reads an epoch in a shuffled order and writes down the private memory of each rank.

memory.py DATA FOLDER RESIDENT_BYTES MOST_STEPS
"""

import json
import sys
from pathlib import Path

import psutil
import torch.distributed as dist

import rankfeed as rf
from rankfeed.storage import mapped


def main(data: str, folder: Path, resident: int, most_steps: int) -> None:
    dist.init_process_group("gloo")
    if resident:
        mapped.RESIDENT_BYTES = mapped.KEPT_BYTES = resident
    loader = rf.Loader(rf.open(data), 8, shuffle=True, num_workers=2)
    process = psutil.Process()
    seen = []
    steps = min(len(loader), most_steps)
    for step, _ in enumerate(loader):
        if step % max(1, steps // 40) == 0:
            seen.append(process.memory_full_info().uss)
        if step >= steps:
            break
    # The second half: what there is to grow has grown by then.
    half = sorted(seen[len(seen) // 2 :])
    figures = {"median": half[len(half) // 2], "most": max(seen)}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
