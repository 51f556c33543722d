"""What torch knows of the collectives of this process, read from another thread (private, tried with torch 2.13).

Each backend counts the collectives that were entered, those of DDP included. gloo counts point-to-point calls too.
torch's flight recorder (torch 2.8 and newer) has the last 2,000 collectives of gloo, and which of them have ended.
"""

import sys
from contextlib import suppress
from typing import Any
from zlib import crc32

import msgspec

from rankfeed.diagnostics.lockstep.status import GroupCalls

#: Collectives of each process group that are published, to compare them with those of other ranks.
_CALLS = 8


class _Entry(msgspec.Struct, frozen=True):
    process_group: tuple[str, str]
    pg_id: int  # of an instance: a group that is created again has another one
    profiling_name: str
    collective_seq_id: int
    retired: bool


class _Trace(msgspec.Struct, frozen=True):
    entries: list[_Entry]


class FlightRecorder:
    """The last collectives of gloo's process groups; read again only after a change, since that takes 60 ms."""

    def __init__(self) -> None:
        self._state = ""
        self._calls: dict[str, GroupCalls] = {}

    def calls(self, keys: list[str]) -> dict[str, GroupCalls]:
        """Calls of process groups, given the keys of their numbers; empty if there is no recorder."""
        with suppress(Exception):
            from torch._C import _distributed_c10d as c10d

            dump: Any = c10d._dump_fr_trace_json  # type: ignore[attr-defined]
            state = dump(False, False)
            if state != self._state:
                self._calls = group_calls(msgspec.json.decode(dump(True, False), type=_Trace).entries)
                self._state = state
        names = {key: key.rsplit("/", 2)[0] for key in keys if key.endswith("/gloo")}
        return {key: self._calls[name] for key, name in names.items() if name in self._calls}


def group_calls(entries: list[_Entry]) -> dict[str, GroupCalls]:
    """Calls by the name of the process group."""
    groups: dict[tuple[str, int], list[_Entry]] = {}
    for each in entries:
        if each.profiling_name.startswith("gloo:"):
            groups.setdefault((each.process_group[0], each.pg_id), []).append(each)
    found: dict[str, GroupCalls] = {}
    for (name, _), calls in groups.items():
        open_calls = [each.collective_seq_id for each in calls if not each.retired]
        kinds = {each.collective_seq_id: each.profiling_name.partition(":")[2] for each in calls[-_CALLS:]}
        found[name] = GroupCalls(max(kinds), max(open_calls, default=0), kinds)
    return found


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
