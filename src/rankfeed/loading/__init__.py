"""From plan and source to batches: fetch, transform, collate, engines, device."""

from rankfeed.loading.loader import Loader
from rankfeed.loading.samplers import DistributedBatchSampler, DistributedSampler, split
from rankfeed.loading.streams.stream import from_iterable

__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "Loader",
    "from_iterable",
    "split",
]
