"""Reads which collectives this process has entered, from private counters of torch (tried with torch 2.13).

Each backend counts the collectives that were entered, those of DDP included. gloo counts point-to-point calls too.
torch's flight recorder (torch 2.8 and newer) has the last 2,000 collectives of gloo, and which of them have ended.
"""

import json
import sys
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import Any
from zlib import crc32

from rankfeed.diagnostics.lockstep.status import GroupCalls

#: Collectives of each process group that are published, to compare them with those of other ranks.
_CALLS = 8


class FlightRecorder:
    """The last collectives of gloo's process groups; read again only after a change, since that takes 60 ms."""

    def __init__(self) -> None:
        self._states = ("", "")
        self._groups: dict[str, GroupCalls] = {}

    def calls(self, keys: list[str]) -> dict[str, GroupCalls]:
        """Calls of process groups, given the keys of their numbers; empty if there is no recorder."""
        with suppress(Exception):
            dump: Any = sys.modules["torch"]._C._distributed_c10d._dump_fr_trace_json
            states = (self._states[1], dump(False, False))
            if states != self._states:  # twice after a change: torch notes the state a little before the entry
                self._groups, self._states = _groups(json.loads(dump(True, False))["entries"]), states
        names = {key: key.rsplit("/", 2)[0] for key in keys if key.endswith("/gloo")}
        return {key: self._groups[name] for key, name in names.items() if name in self._groups}


def _groups(entries: list[dict[str, Any]]) -> dict[str, GroupCalls]:
    groups: dict[str, GroupCalls] = {}
    entries = [entry for entry in entries if entry["profiling_name"].startswith("gloo:")]
    # By instance: a group that is created again has the same name, and begins to count again.
    by_instance = itemgetter("pg_id")
    for _, group in groupby(sorted(entries, key=by_instance), key=by_instance):
        calls = {entry["collective_seq_id"]: entry for entry in group}
        kinds = {call: calls[call]["profiling_name"].removeprefix("gloo:") for call in [*calls][-_CALLS:]}
        name = next(iter(calls.values()))["process_group"][0]
        groups[name] = GroupCalls(max(calls), max((n for n in calls if not calls[n]["retired"]), default=0), kinds)
    return groups


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
