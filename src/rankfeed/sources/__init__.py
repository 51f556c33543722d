"""How samples are read from each format, in place; one format, one file."""

from rankfeed.sources.concat import ConcatSource, concat
from rankfeed.sources.open import open
from rankfeed.sources.packed import PackedSource
from rankfeed.sources.select import SelectSource
from rankfeed.sources.source import Source, by_chunk, check_columns, check_ids
from rankfeed.sources.split import train_test_split
from rankfeed.sources.torch_dataset import TorchDatasetSource, from_dataset

__all__ = [
    "ConcatSource",
    "PackedSource",
    "SelectSource",
    "Source",
    "TorchDatasetSource",
    "by_chunk",
    "check_columns",
    "check_ids",
    "concat",
    "from_dataset",
    "open",
    "train_test_split",
]
