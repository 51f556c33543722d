"""The file of an `InMemoryDataset` (``processed/data.pt``), memory-mapped and checked.

It is a zip archive of a pickle and the bytes of the tensors. The pickle is read by torch's restricted unpickler,
which builds tensors, plain containers and the classes that PyG registers, and refuses everything else.
"""

import errno
import os
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rankfeed.errors import CorruptError, SourceError, UnsafeError, safe_str
from rankfeed.sources.extras import need
from rankfeed.sources.formats import graph_files, processed_folder
from rankfeed.sources.paths import check_utf8
from rankfeed.sources.pyg.pyg_source import PyGSource, check_no_columns
from rankfeed.sources.pyg.readers import check_types
from rankfeed.storage.data_files import DataFiles

#: In older versions the restricted unpickler could be made to run code (CVE-2025-32434).
_SAFE_SINCE = (2, 6)


class PyGFileSource(PyGSource):
    """Graphs in a file that ``InMemoryDataset.save`` wrote; pickles as its path. Options as of `PyGSource`."""

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        check_no_columns(columns)
        self.__setstate__((DataFiles([_graph_file(Path(where))]), allow_pickle, follow_batch, exclude_keys))

    def __getstate__(self) -> tuple[Any, ...]:
        return self.files, self._allow_pickle, self._follow, self._exclude

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        files, self._allow_pickle, follow_batch, exclude_keys = state
        need("torch_geometric", extra="pyg")
        self.path = files.path(0)
        files.check(0)
        dataset = _saved_dataset(self.path, self._allow_pickle)
        files.opened(0)
        super().__init__(dataset, follow_batch=follow_batch, exclude_keys=exclude_keys)
        self.files, self._label = files, self.path


def _graph_file(path: Path) -> str:
    """The file with the graphs, which must be the only one."""
    if path.is_file():
        return os.path.abspath(path)
    folder = processed_folder(path)
    files = graph_files(folder) if folder is not None else []
    if len(files) == 1:
        return os.path.abspath(files[0])
    if not files:
        raise SourceError(
            "graphs in a database can be read only by their own class",
            where=path,
            remedy="create the OnDiskDataset yourself and pass it to rankfeed.from_dataset()",
        )
    raise SourceError(
        "the folder holds several files of graphs",
        expected="one",
        found=", ".join(map(os.path.basename, files[:8])),
        where=folder,
        remedy="open one of them by its own path",
    )


def _saved_dataset(path: str, allow_pickle: bool) -> Any:
    from torch_geometric.data import Data, InMemoryDataset

    saved = _load(path, allow_pickle)
    if not (isinstance(saved, tuple) and len(saved) in (2, 3) and isinstance(saved[1], (dict, type(None)))):
        raise SourceError(
            "the file has no graphs that PyTorch Geometric saved",
            expected="(attributes, slices, class), as InMemoryDataset.save writes them",
            found=type(saved).__name__,
            where=path,
        )
    data, slices, kind = saved if len(saved) == 3 else (*saved, Data)
    dataset = InMemoryDataset()
    try:
        dataset._data = kind.from_dict(data) if isinstance(data, dict) else data
        dataset.slices = slices
        _check_slices(dataset._data, slices)
    except Exception as error:
        raise CorruptError(
            "the file's graphs do not fit together", found=f"{type(error).__name__}: {safe_str(error)}", where=path
        ) from error
    check_types(dataset._data, slices, path)
    return dataset


def _load(path: str, allow_pickle: bool) -> Any:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not allow_pickle and version < _SAFE_SINCE:
        raise UnsafeError(
            "this version of torch cannot read a pickle safely",
            expected=">= 2.6",
            found=torch.__version__,
            where=path,
            remedy="install a newer torch; or, if you trust the file, open(..., allow_pickle=True)",
        )
    check_utf8(path, path, "the path of a file that torch maps into memory")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=not allow_pickle, mmap=True)
    except Exception as error:
        # EINVAL: torch seeks the end of an archive that is not complete.
        if isinstance(error, OSError) and not (os.path.isfile(path) and error.errno == errno.EINVAL):
            raise SourceError("the file cannot be read", found=error.strerror or error, where=path) from error
        message = " ".join(str(error).split())
        is_refused = isinstance(error, pickle.UnpicklingError) and not allow_pickle
        if is_refused and ("Unsupported" in message or "GLOBAL" in message):
            start = max(0, message.find("Unsupported"))
            raise UnsafeError(
                "the file has objects whose reading could run code",
                expected="tensors, plain containers, and PyG's own classes",
                found=message[start : start + 160],
                where=path,
                remedy="if you trust it: open(..., allow_pickle=True), or rankfeed.from_dataset(your_dataset)",
            ) from None
        problem = f"{type(error).__name__}: {message[:160]}"
        raise CorruptError("the file is damaged", found=problem, where=path) from error


def _check_slices(data: Any, slices: dict[Any, Any] | None) -> None:
    """Raise a ValueError unless slices agree in number, rise, and end inside their attribute."""
    if slices is None:
        return
    for store in data.stores:
        counts: dict[int, str] = {}
        own_slices = slices if store._key is None else slices.get(store._key, {})
        for name, cuts in own_slices.items():
            if not isinstance(cuts, torch.Tensor) or name not in store:
                continue
            value = store[name]
            size = len(value)
            if isinstance(value, torch.Tensor) and not value.is_sparse:
                size = value.size(data.__cat_dim__(name, value, store) or 0)
            if cuts.dim() != 1:
                continue  # adjacency matrices are cut along two dimensions
            if len(cuts) < 2 or int(cuts[0]) < 0 or bool((cuts.diff() < 0).any()) or int(cuts[-1]) > size:
                raise ValueError(f"slices of {name!r} do not rise from 0 to {size}")
            counts.setdefault(len(cuts) - 1, name)
        if len(counts) > 1:
            raise ValueError(f"attributes are of different numbers of graphs: {counts}")
