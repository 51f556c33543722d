"""Reading samples in place: the Source contract, `open`, and a reader of each format."""

from rankfeed.sources.concat import ConcatSource, concat
from rankfeed.sources.open import open
from rankfeed.sources.source import SelectSource, Source
from rankfeed.sources.split import train_test_split
from rankfeed.sources.torch_dataset import from_dataset

__all__ = ["ConcatSource", "SelectSource", "Source", "concat", "from_dataset", "open", "train_test_split"]
