"""Loaders and samplers: batches of one rank by a plan, from a source or a stream, built ahead by engines."""

from rankfeed.loading.loader import Loader
from rankfeed.loading.samplers import DistributedBatchSampler, DistributedSampler, split
from rankfeed.loading.streams.stream import from_iterable

__all__ = ["DistributedBatchSampler", "DistributedSampler", "Loader", "from_iterable", "split"]
