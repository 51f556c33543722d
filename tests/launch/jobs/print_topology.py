"""Print what this process takes itself to be, a line of JSON for each answer, as a rank of whatever launched it.

print_topology.py [--group | --mesh DIM[,DIM] ...]
"""

import json
import os
import sys
from dataclasses import asdict

from rankfeed.topology import Topology


def of_group() -> list[Topology]:
    """By the process group alone: the variables that led to it are taken away."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    found = Topology.detect()
    dist.destroy_process_group()
    return [found]


def of_mesh(asked: list[str]) -> list[Topology]:
    """By coordinates of a mesh of 2 x 2, once for each set of dimensions asked for."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = [Topology.from_mesh(mesh, dims.split(",") if "," in dims else dims) for dims in asked]
    found.append(Topology.from_mesh(mesh["dp"], "dp"))
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    how, asked = sys.argv[1:2], sys.argv[2:]
    if how == ["--group"]:
        found = of_group()
    elif how == ["--mesh"]:
        found = of_mesh(asked)
    else:
        found = [Topology.detect()]
    # One write, so that lines of several ranks do not run into each other.
    sys.stdout.write("".join(json.dumps(asdict(topology)) + "\n" for topology in found))
    sys.stdout.flush()
