"""From plan and source to batches: fetch, transform, collate, engines, device."""

from rankfeed.loading.audit import EpochAudit
from rankfeed.loading.collate import Batch
from rankfeed.loading.loader import Loader
from rankfeed.loading.samplers import DistributedBatchSampler, DistributedSampler, split
from rankfeed.loading.streams.stream import Stream, from_iterable

__all__ = [
    "Batch",
    "DistributedBatchSampler",
    "DistributedSampler",
    "EpochAudit",
    "Loader",
    "Stream",
    "from_iterable",
    "split",
]
