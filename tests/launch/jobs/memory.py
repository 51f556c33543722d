"""Run by torchrun: reads an epoch in a shuffled order and writes down the memory of each rank.

memory.py DATA FOLDER MOST_STEPS
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

import rankfeed as rf


def own_memory() -> int:
    """Bytes of anonymous and shared memory; pages of mapped files belong to the page cache."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def main(data: str, folder: Path, most_steps: int) -> None:
    dist.init_process_group("gloo")
    loader = rf.Loader(rf.open(data), 8, shuffle=True, num_workers=2)
    seen = []
    steps = min(len(loader), most_steps)
    for step, _ in enumerate(loader):
        if step % max(1, steps // 40) == 0:
            seen.append(own_memory())
        if step >= steps:
            break
    # The second half: what there is to grow has grown by then.
    half = sorted(seen[len(seen) // 2 :])
    figures = {"median": half[len(half) // 2], "most": max(seen)}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
