"""Two ranks of a process group read an epoch, and keep ledgers. grouped.py FOLDER"""

import sys

import torch.distributed as dist

import rankfeed as rf

if __name__ == "__main__":
    dist.init_process_group("gloo")
    source = rf.from_dataset([{"x": index} for index in range(100)])
    for _ in rf.Loader(source, 8, audit=sys.argv[1]):
        dist.barrier()
    dist.destroy_process_group()
