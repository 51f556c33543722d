"""WebDataset pipelines: checked shard splitters, and stages that shard samples instead of files.

A splitter replaces WebDataset's own and divides whole shards. A stage (:class:`ShardedSamples`,
:class:`Resampled`) replaces the shard list and the tar reader, and divides the samples. Both resolve the rank in
the process that creates the DataLoader, so that workers have it with any start method.
"""

from rankfeed.integrations.webdataset.samples import Resampled, ShardedSamples
from rankfeed.integrations.webdataset.splitters import NodeSplitter, WorkerSplitter, nodesplitter, workersplitter

__all__ = ["NodeSplitter", "Resampled", "ShardedSamples", "WorkerSplitter", "nodesplitter", "workersplitter"]
