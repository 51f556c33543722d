"""MosaicML Streaming's own MDS writer and reader, without the rest of it.

``import streaming`` imports torchvision, transformers and clients for several clouds, none of which MDS needs. Its
packages are therefore entered without running their ``__init__``; the modules below are its own, as they are.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def _enter(name: str) -> None:
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        package = ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules[name] = package


_enter("streaming")
_enter("streaming.base")
MDSWriter: Any = importlib.import_module("streaming.base.format").MDSWriter
LocalDataset: Any = importlib.import_module("streaming.base.local").LocalDataset
merge_index: Any = importlib.import_module("streaming.base.util").merge_index


def streaming_dataset() -> Any:
    """The StreamingDataset class, which brings torch.distributed along."""
    return importlib.import_module("streaming.base.dataset").StreamingDataset


def write(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]], **options: Any) -> Path:
    with MDSWriter(columns=columns, out=str(folder), **options) as writer:
        for sample in samples:
            writer.write(sample)
    return folder
