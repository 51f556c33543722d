"""Reading samples in place: the Source contract, `open`, and one subpackage per format."""

from typing import TYPE_CHECKING, Any

from rankfeed.columns.chunk_groups import by_chunk
from rankfeed.sources.concat import ConcatSource, concat
from rankfeed.sources.open import open
from rankfeed.sources.source import SelectSource, Source, check_columns, check_ids
from rankfeed.sources.split import train_test_split
from rankfeed.sources.torch_dataset import TorchDatasetSource, from_dataset

if TYPE_CHECKING:
    from rankfeed.sources.packed import PackedSource

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


def __getattr__(name: str) -> Any:
    if name == "PackedSource":  # a reader of one format: not imported with the others' base
        from rankfeed.sources.packed import PackedSource

        return PackedSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
