"""Print what this process takes itself to be, a line of JSON, as a rank of whatever launched it.

print_topology.py [--group]
"""

import json
import os
import sys
from dataclasses import asdict

from rankfeed.topology import Topology


def of_group() -> Topology:
    """By the process group alone: the variables that led to it are taken away."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    found = Topology.detect()
    dist.barrier()  # a rank that leaves while another still connects makes that one fail
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    found = of_group() if sys.argv[1:] == ["--group"] else Topology.detect()
    # One write, so that lines of several ranks do not run into each other.
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
    sys.stdout.flush()
