"""What is a rank's share already must not be shared out again.

Accelerate's ``prepare`` shards every torch DataLoader that it is given, and says nothing to the sampler or data
set inside; WebDataset's own splitters take each n-th of whatever a pipeline brings them. Of a share they would
deliver a share, and the rest of the data would never be seen. It can be told by who iterates: they stand among
the callers.
"""

from __future__ import annotations

import sys
from types import FrameType

from rankfeed.errors import ArgumentError
from rankfeed.topology import Topology

_ACCELERATE = "accelerate.data_loader"
_SHARDING = ("BatchSamplerShard", "IterableDatasetShard", "DataLoaderDispatcher")
_WEBDATASET = "webdataset.shardlists"


def refuse_second_sharding(topology: Topology) -> None:
    """Called where iteration of a rank's share begins.

    Raises:
        ArgumentError: something that shards over ranks or workers is iterating.

    Examples:
        >>> refuse_second_sharding(Topology(rank=1, world_size=2))
    """
    if topology.world_size == topology.worker()[1] == 1:
        return
    if _ACCELERATE not in sys.modules and _WEBDATASET not in sys.modules:
        return
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if (who := _sharding(frame, topology)) is not None:
            name, what, expected, remedy = who
            raise ArgumentError(
                f"this is one {what}'s share already, and {name} is about to share it out again",
                expected=expected,
                found=f"{name}'s {_kind(frame)}",
                where=f"rank {topology.rank} of {topology.world_size}",
                remedy=remedy,
            )


def _sharding(frame: FrameType, topology: Topology) -> tuple[str, str, str, str] | None:
    """Who shards in this frame (name, of what, what to give it, what to do instead), if anybody does."""
    module = frame.f_globals.get("__name__")
    if module == _ACCELERATE and topology.world_size > 1 and _kind(frame) in _SHARDING:
        return (
            "Accelerate",
            "rank",
            "a DataLoader that accelerator.prepare has not been given",
            "give rankfeed.Loader(rankfeed.from_dataset(dataset), ...) to "
            "rankfeed.integrations.accelerate.accelerated, or leave this DataLoader out of prepare",
        )
    if module == _WEBDATASET:
        for splitter, what, shares in (
            ("split_by_node", "rank", topology.world_size),
            ("split_by_worker", "worker", topology.worker()[1]),
        ):
            if _kind(frame) == splitter and shares > 1:
                return ("WebDataset", what, "a pipeline without it: what comes in here is split", "leave it out")
    return None


def _kind(frame: FrameType) -> str:
    """Class of the method that runs there, or name of the function."""
    owner = frame.f_locals.get("self")
    # not __class__, which Accelerate's loaders lie about
    return frame.f_code.co_name if owner is None else type(owner).__name__
