"""What knows its rank late: at the first need, in the process that has the need."""

from __future__ import annotations

from typing import Any

from rankfeed.topology import Topology


class Placed:
    """Has a topology, given or found when it is first asked for.

    Examples:
        >>> class Reader(Placed):
        ...     def __init__(self, topology=None):
        ...         self._topology = topology
        >>> Reader(Topology(rank=1, world_size=2)).topology.rank
        1
    """

    _topology: Topology | None

    @property
    def topology(self) -> Topology:
        """Rank and world size, found when first asked for."""
        if self._topology is None:
            self._topology = Topology.detect()
        return self._topology

    def __getstate__(self) -> dict[str, Any]:
        # Under spawn a worker cannot ask torch.distributed: a rank that can be found here travels. Where there is
        # none, this may be the process that starts the ranks, and each of them has to find its own.
        found = self._topology or Topology.detect()
        alone = self._topology is None and found.launcher == "single"
        return {**self.__dict__, "_topology": None if alone else found}
