"""From plan and source to batches: fetch, transform, collate, engines, device."""

from rankfeed.loading.audit import EpochAudit
from rankfeed.loading.collate import Batch
from rankfeed.loading.loader import Loader
from rankfeed.loading.samplers import DistributedBatchSampler, DistributedSampler
from rankfeed.loading.split import split
from rankfeed.loading.stream import Stream, from_iterable
from rankfeed.loading.stream_loader import StreamLoader

__all__ = [
    "Batch",
    "DistributedBatchSampler",
    "DistributedSampler",
    "EpochAudit",
    "Loader",
    "Stream",
    "StreamLoader",
    "from_iterable",
    "split",
]
