"""How samples are read from each format, in place; one format, one file."""

from rankfeed.sources.open import open
from rankfeed.sources.packed import PackedSource
from rankfeed.sources.source import Source, by_chunk, check_columns, check_ids
from rankfeed.sources.torch_dataset import TorchDatasetSource, from_dataset

__all__ = [
    "PackedSource",
    "Source",
    "TorchDatasetSource",
    "by_chunk",
    "check_columns",
    "check_ids",
    "from_dataset",
    "open",
]
