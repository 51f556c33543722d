"""What knows its rank late: at the first need, in the process that has the need."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import get_worker_info

from rankfeed.topology import Topology, process_group

#: Tells processes of different machines apart, and those that have taken over the number of one that ended.
_BORN = os.urandom(8)


class Placed:
    """Has a topology, given or found when it is first asked for.

    What was given stands. What was found is true of the process that found it and of its DataLoader workers; a
    process that starts ranks (under ``srun --ntasks-per-node=1``, say) hands them itself, but not its own rank.

    Examples:
        >>> class Reader(Placed):
        ...     def __init__(self, topology=None):
        ...         self._topology = topology
        >>> Reader(Topology(rank=1, world_size=2)).topology.rank
        1
    """

    #: Given; None if it is to be found.
    _topology: Topology | None
    #: Found, and in which process.
    _found: tuple[tuple[int, bytes], Topology] | None = None

    @property
    def topology(self) -> Topology:
        """Rank and world size, found when first asked for; asked anew where there was none to be found yet.

        A process group initialised since then is believed before all else that was found.
        """
        topology = self._place()
        # Who asks before the ranks are started, for a length say, must not stand alone for ever.
        if self._topology is None and topology.launcher != "single":
            self._found = _here(), topology
        return topology

    def _place(self) -> Topology:
        """What ``topology`` is, without a note of it."""
        if self._topology is not None:
            return self._topology
        if self._found is None:
            return Topology.detect()
        process, found = self._found
        group = process_group()
        # Under spawn a worker cannot ask torch.distributed, nor can any other helper of a rank. But those whom a
        # process starts that was in no group itself may be ranks, and find their own: if there is one to be found.
        helps = get_worker_info() is not None or found.launcher == "torch.distributed"
        if group == (found.rank, found.world_size) or (group is None and (helps or process == _here())):
            return found
        here = Topology.detect()
        return found if here.launcher == "single" else here

    def __getstate__(self) -> dict[str, Any]:
        topology = self._place()
        alone = self._topology is not None or topology.launcher == "single"
        return {**self.__dict__, "_found": None if alone else (_here(), topology)}


def _here() -> tuple[int, bytes]:
    """This process, which a fork of it is not."""
    return os.getpid(), _BORN
