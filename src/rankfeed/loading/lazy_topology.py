"""Resolves rank and world size when they are first needed, in the process that iterates."""

import os
from typing import Any

from torch.utils.data import get_worker_info

from rankfeed._util.validate import check_instance, check_optional
from rankfeed.topology import Topology, process_group

#: Distinguishes processes of different hosts, and a process from an earlier one with the same pid.
_PROCESS_TOKEN = os.urandom(8)


class LazyTopology:
    """Resolves the topology lazily, in the process that iterates.

    A given topology is final. A detected one holds for the process that detected it and for its DataLoader
    workers. A process that starts the ranks (``srun --ntasks-per-node=1``, say) pickles the loader for them, but
    its own rank is not theirs.
    """

    def __init__(self, given: Topology | None) -> None:
        expected = "a rankfeed.Topology, such as rankfeed.Topology(rank=0, world_size=2)"
        check_optional(check_instance, "topology", given, kind=Topology, expected=expected)
        self.given = given
        #: The process that detected a topology, and that topology.
        self._detected: tuple[tuple[int, bytes], Topology] | None = None

    def resolve(self) -> Topology:
        """Rank and world size. A process group that was initialised since the detection takes precedence."""
        topology = self.peek()
        # One process alone is not remembered: a length may be asked for before the ranks are started.
        if self.given is None and topology.launcher != "single":
            self._detected = _this_process(), topology
        return topology

    def peek(self) -> Topology:
        """What `resolve` returns, without remembering it."""
        if self.given is not None:
            return self.given
        if self._detected is None:
            return Topology.detect()
        process, detected = self._detected
        group = process_group()
        # A spawned worker cannot ask torch.distributed, nor can another helper of a rank. But processes that were
        # started by one outside a group may be ranks themselves, and detect their own topology if there is one.
        is_helper = get_worker_info() is not None or detected.launcher == "torch.distributed"
        if group == (detected.rank, detected.world_size):
            return detected
        if group is None and (is_helper or process == _this_process()):
            return detected
        current = Topology.detect()
        return detected if current.launcher == "single" else current

    def __getstate__(self) -> dict[str, Any]:
        topology = self.peek()
        is_detected = self.given is None and topology.launcher != "single"
        return {"given": self.given, "_detected": (_this_process(), topology) if is_detected else None}


def _this_process() -> tuple[int, bytes]:
    return os.getpid(), _PROCESS_TOKEN
