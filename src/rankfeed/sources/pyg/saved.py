"""The file that an `InMemoryDataset` saves (``processed/data.pt``), memory-mapped and checked.

It is a zip archive of a pickle and the tensors' bytes. The pickle is read by torch's own restricted reader, which
builds tensors, plain containers and the few classes that PyG registers, and refuses everything else.
"""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from rankfeed.errors import CorruptError, RankfeedError, SourceError, UnsafeError, safe_str
from rankfeed.sources.extras import need
from rankfeed.sources.paths import check_utf8
from rankfeed.sources.pyg.source import PyGSource
from rankfeed.storage import DataFiles

#: Before this version the restricted reader could be led to run code (CVE-2025-32434).
_SAFE_SINCE = (2, 6)
_REMEDY = "process the data set again, or fetch the file anew"


class PyGFileSource(PyGSource):
    """Graphs in a file that ``InMemoryDataset.save`` wrote; `open` makes it.

    The tensors are mapped, so that all ranks and workers of a node share them in the page cache.

    Args:
        path: of the file.
        allow_pickle: whether it may hold objects of any class. Reading them runs code that they bring.
        follow_batch: attributes for which a batch gets ``<name>_batch`` and ``<name>_ptr``.
        exclude_keys: attributes that batches leave out.
        files: what another process of the job saw first; None for the process that opens.

    Raises:
        SourceError: it cannot be read, or holds no graphs.
        UnsafeError: it holds objects of other classes than PyG's own.
        CorruptError: it is damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        allow_pickle: bool = False,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        files: DataFiles | None = None,
    ) -> None:
        self.path = os.path.abspath(path)
        self._allow_pickle = allow_pickle
        need("torch_geometric", extra="pyg")
        files = DataFiles([self.path]) if files is None else files.reopened([self.path])
        dataset = _dataset(self.path, allow_pickle)
        files.opened(0)
        super().__init__(dataset, follow_batch=follow_batch, exclude_keys=exclude_keys)
        self.files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._allow_pickle, self._follow, self._exclude, self.fingerprint, self.files)

    def __repr__(self) -> str:
        return f"PyGFileSource({self.path!r}, {len(self)} graphs)"


def _reopen(
    path: str, allow_pickle: bool, follow: Sequence[str], exclude: Sequence[str], was: str, files: DataFiles
) -> PyGFileSource:
    source = PyGFileSource(path, allow_pickle=allow_pickle, follow_batch=follow, exclude_keys=exclude, files=files)
    if source.fingerprint != was:
        raise SourceError(
            "the data changed while a job reads them",
            expected=f"fingerprint {was}",
            found=source.fingerprint,
            where=path,
            remedy="start the job again, on data that stay as they are",
        )
    return source


def _dataset(path: str, allow_pickle: bool) -> Any:
    """What was saved, as the data set that it was."""
    from torch_geometric.data import Data, InMemoryDataset

    saved = _load(path, allow_pickle)
    if not (isinstance(saved, tuple) and len(saved) in (2, 3) and isinstance(saved[1], (dict, type(None)))):
        raise SourceError(
            "the file holds no graphs that PyTorch Geometric saved",
            expected="(attributes, slices, class), as InMemoryDataset.save writes them",
            found=type(saved).__name__,
            where=path,
        )
    data, slices, kind = saved if len(saved) == 3 else (*saved, Data)
    dataset = InMemoryDataset()
    try:
        dataset._data = kind.from_dict(data) if isinstance(data, dict) else data
        dataset.slices = slices
        _check(dataset._data, slices)
    except RankfeedError:
        raise
    except Exception as error:
        raise CorruptError(
            "the file's graphs do not fit together",
            found=f"{type(error).__name__}: {safe_str(error)}",
            where=path,
            remedy=_REMEDY,
        ) from error
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
    except pickle.UnpicklingError as error:
        said = " ".join(str(error).split())
        if allow_pickle or ("Unsupported" not in said and "GLOBAL" not in said):
            raise CorruptError("the file is damaged", found=said[:200], where=path, remedy=_REMEDY) from None
        start = max(0, said.find("Unsupported"))
        raise UnsafeError(
            "the file holds objects whose reading could run code",
            expected="tensors, plain containers, and PyG's own classes",
            found=said[start : start + 160],
            where=path,
            remedy="if you trust it: open(..., allow_pickle=True), or rankfeed.from_dataset() of your own Dataset",
        ) from None
    except OSError as error:
        if (
            os.path.isfile(path) and error.errno == errno.EINVAL
        ):  # torch looks for the archive's end before its start
            raise CorruptError("the file is damaged", found="it ends early", where=path, remedy=_REMEDY) from error
        raise SourceError("the file cannot be read", found=error.strerror or error, where=path) from error
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise CorruptError("the file is damaged", found=said, where=path, remedy=_REMEDY) from error


def _check(data: Any, slices: dict[Any, Any] | None) -> None:
    """That each attribute's slices agree in number, rise, and end inside the attribute."""
    if slices is None:
        return
    counts: dict[int, str] = {}
    for store in data.stores:
        mine = slices if store._key is None else slices.get(store._key, {})
        for name, cuts in mine.items():
            if not isinstance(cuts, torch.Tensor) or name not in store:
                continue
            value = store[name]
            room = len(value)
            if isinstance(value, torch.Tensor) and not value.is_sparse:
                room = value.size(data.__cat_dim__(name, value, store) or 0)
            if cuts.dim() != 1:
                continue  # adjacency matrices are cut along two dimensions
            if len(cuts) < 2 or int(cuts[0]) < 0 or bool((cuts.diff() < 0).any()) or int(cuts[-1]) > room:
                raise ValueError(f"slices of {name!r} do not rise from 0 to {room}")
            counts.setdefault(len(cuts) - 1, name)
    if len(counts) > 1:
        raise ValueError(f"attributes are of different numbers of graphs: {counts}")
