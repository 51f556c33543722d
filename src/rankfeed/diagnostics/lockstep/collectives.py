"""Numbers of the collectives that this process has entered, read from torch without the training thread.

torch counts them in each process group when they are entered, those of DDP included, and point-to-point calls too
(``_get_sequence_number_for_group``, private: tried with torch 2.13). Backends without such a number are left out.
"""

import sys
from contextlib import suppress
from typing import Any
from zlib import crc32


def collective_numbers() -> dict[str, int]:
    """How many collectives this process has entered, by process group and backend; groups of one are left out."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    numbers: dict[str, int] = {}
    for group in list(c10d._world.pg_map) if c10d is not None else []:
        ranks = sorted(c10d._world.pg_group_ranks.get(group, ()))
        for device in group._device_types if len(ranks) > 1 else ():
            with suppress(Exception):  # destroyed meanwhile, or a backend without numbers
                backend = group._get_backend(device)
                name = f"{c10d._world.pg_names[group]}/{crc32(str(ranks).encode()):x}/{backend.name()}"
                numbers[name] = backend._get_sequence_number_for_group()
    return numbers


def abort_nccl() -> None:
    """Abort NCCL's communicators, so that a thread that waits for one raises."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        for group in list(torch.distributed.distributed_c10d._world.pg_map):
            with suppress(Exception):  # of another backend, or destroyed
                if torch.distributed.get_backend(group) == "nccl":
                    group._get_backend(torch.device("cuda")).abort()
