"""Where this process stands: which launcher started it, which rank of how many it is, on which node."""

from rankfeed.topology.topology import Topology, process_group

__all__ = ["Topology", "process_group"]
