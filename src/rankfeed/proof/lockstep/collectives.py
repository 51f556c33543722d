"""Numbers of the collectives that this process has entered, read from torch without the training thread.

torch counts them in each process group when they are entered, those of DDP included, and point-to-point calls too
(``_get_sequence_number_for_group``, private: tried with torch 2.13). Backends without such a number are left out.
"""

import sys
import threading
from contextlib import suppress
from zlib import crc32


def collective_numbers() -> dict[str, int]:
    """How many collectives this process has entered, by process group and backend; groups of one are left out."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    numbers: dict[str, int] = {}
    for group in list(getattr(world, "pg_map", ())):
        with suppress(Exception):  # destroyed meanwhile, or of a backend without numbers
            ranks = sorted(world.pg_group_ranks[group])  # type: ignore[union-attr]
            for device in group._device_types if len(ranks) > 1 else ():
                backend = group._get_backend(device)
                key = f"{world.pg_names[group]}/{crc32(str(ranks).encode()):x}/{backend.name()}"  # type: ignore[union-attr]
                numbers[key] = backend._get_sequence_number_for_group()
    return numbers


def abort_nccl() -> None:
    """Abort NCCL's communicators, so that a thread that waits for one raises; in a thread, since it may hang."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.distributed.is_nccl_available():
        threading.Thread(target=_abort, args=(torch,), daemon=True).start()


def _abort(torch: object) -> None:
    from torch import device
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        with suppress(Exception):  # of another backend, or destroyed
            if distributed_c10d.get_backend(group) == "nccl":
                group._get_backend(device("cuda")).abort()
