"""Rank, world size and node of this process, detected from its launcher."""

from rankfeed.topology.topology import Topology, process_group

__all__ = ["Topology", "process_group"]
