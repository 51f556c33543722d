"""Graphs of PyTorch Geometric, of a dataset or a file, which the loader joins to a PyG ``Batch``.

The file of an `InMemoryDataset` (``processed/data.pt``) is memory-mapped and checked. It is a zip archive of a
pickle and the bytes of the tensors. The pickle is read by torch's restricted unpickler, which builds tensors,
plain containers and the classes that PyG registers, and refuses everything else.
"""

import errno
import os
import pickle
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rankfeed._util.imports import need
from rankfeed._util.validate import check_names, check_optional
from rankfeed.columns.buffers import retain_heap
from rankfeed.columns.columns import Column, Columns, Objects
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, CorruptError, SourceError, UnsafeError, safe_str
from rankfeed.sources.formats import graph_files, processed_folder
from rankfeed.sources.paths import check_utf8
from rankfeed.sources.pyg.batch import join_graphs
from rankfeed.sources.pyg.readers import GraphReader, Graphs, check_types, compose, reader_of, stored_slices
from rankfeed.sources.source import Int64, Source
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import DataFiles

#: In older versions the restricted unpickler could be made to run code (CVE-2025-32434).
_SAFE_SINCE = (2, 6)


class PyGSource(Source):
    """Graphs; `from_dataset` makes it from a dataset of graphs.

    A batch equals that of ``torch_geometric.loader.DataLoader``. Graphs of an ``InMemoryDataset`` without a
    ``transform`` are gathered directly from its tensors. The database of an ``OnDiskDataset`` is opened in each
    process and thread that reads. A ``transform`` of the dataset is applied at every access.

    Args:
        dataset: a PyG ``Dataset`` (or a part of one, ``dataset[ids]``), a list of ``Data`` or ``HeteroData``, a
            torch ``Subset`` of these, or any map-style Dataset whose samples are graphs, or tuples of graphs.
        follow_batch: attributes for which a batch gets ``<name>_batch`` and ``<name>_ptr``.
        exclude_keys: attributes that batches leave out.

    Raises:
        SourceError: the dataset is empty, or has no length.
        MissingExtraError: PyTorch Geometric is not installed.

    Examples:
        >>> import torch, rankfeed as rf
        >>> from torch_geometric.data import Data
        >>> source = PyGSource([Data(x=torch.ones(nodes, 8)) for nodes in (1, 2, 3)])
        >>> source[2]
        Data(x=[3, 8])
        >>> source.collate(source[0:2])
        DataBatch(x=[3, 8], batch=[3], ptr=[3])
    """

    as_dicts: bool = False

    def __init__(
        self, dataset: Any, *, follow_batch: Sequence[str] | None = None, exclude_keys: Sequence[str] | None = None
    ) -> None:
        need("torch_geometric", extra="pyg")
        self._follow = tuple(check_optional(check_names, "follow_batch", follow_batch) or ())
        self._exclude = tuple(check_optional(check_names, "exclude_keys", exclude_keys) or ())
        dataset, subset = _without_subsets(dataset)
        try:
            self._reader: GraphReader = reader_of(dataset)
            length = len(self._reader)
        except TypeError as error:
            raise SourceError(
                "the dataset has no length",
                found=type(dataset).__name__,
                remedy="give a map-style Dataset; for a stream, use rf.split",
            ) from error
        self.runs_user_code = self._reader.runs_user_code
        self.supports_batched_getitem = self._reader.supports_batched_getitem
        if self._reader.path is not None:
            self.files = DataFiles([self._reader.path])
        #: Numbers of the graphs in the dataset; None for all in order.
        self._indices = compose(self._reader.indices, subset, length)
        blocks = np.array([length if self._indices is None else len(self._indices)], np.int64)
        self._init_samples(type(dataset).__name__, {"": Field("object")}, blocks)

    @cached_property
    def _identity(self) -> list[bytes] | None:
        return self._reader.identity()

    @property
    def identified(self) -> bool:
        return self._identity is not None

    @cached_property
    def fingerprint(self) -> str:
        files = [] if self.files is None else [self.files.fingerprint.encode()]
        kind = type(self._reader.dataset).__qualname__
        indices = b"" if self._indices is None else self._indices.tobytes()
        return digest_of(kind.encode(), str(len(self)).encode(), indices, *(self._identity or ()), *files)

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """Graphs in the given order; graphs in memory are cut out when they are used. ``columns`` must be None."""
        check_no_columns(columns)
        return super().fetch(sample_ids)

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        graphs = self._reader.read(ids if self._indices is None else self._indices[ids])
        if self.files is not None and self._reader.path is not None:  # a database, opened when it is first read
            self.files.check(0)
        return {"": Objects(graphs)}

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.fetch(range(*index.indices(len(self))))[""].rows()
        return super().__getitem__(index)

    def collate(self, samples: Sequence[Any]) -> Any:
        """Join graphs to a ``Batch``, as ``torch_geometric.loader.DataLoader`` does."""
        retain_heap()
        if isinstance(samples, Graphs):
            return samples.layout.collate(samples.numbers, self._follow, self._exclude)
        from torch_geometric.data.data import BaseData
        from torch_geometric.loader.dataloader import Collater

        batch = join_graphs(samples, self._follow, self._exclude) if isinstance(samples[0], BaseData) else None
        return batch if batch is not None else Collater(None, self._follow, self._exclude)(list(samples))

    def annotate(self, batch: Any, name: str, values: Any) -> None:
        setattr(batch, name, values)


def check_no_columns(columns: Sequence[str] | None) -> None:
    """Refuse ``columns=``, which graphs do not have."""
    if columns is not None and list(columns) != [""]:
        remedy = "leave columns out; exclude_keys= leaves attributes out of the batches"
        raise ArgumentError("graphs have no columns", found=columns, remedy=remedy)


def is_graphs(dataset: Any) -> bool:
    """Whether a dataset has graphs."""
    from torch.utils.data import ConcatDataset, Subset
    from torch_geometric.data import Dataset
    from torch_geometric.data.data import BaseData

    if isinstance(dataset, Subset):
        return is_graphs(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(is_graphs, dataset.datasets))
    if type(dataset) in (list, tuple):  # not a subclass, which may do anything when it is read
        return len(dataset) > 0 and isinstance(dataset[0], BaseData)
    return isinstance(dataset, Dataset)


def _without_subsets(dataset: Any) -> tuple[Any, Int64 | None]:
    """The dataset in torch's ``Subset``, and the selected indices."""
    from torch.utils.data import Subset

    if type(dataset) is not Subset:
        return dataset, None
    inner, indices = _without_subsets(dataset.dataset)
    return inner, compose(indices, dataset.indices, len(dataset.dataset))  # type: ignore[arg-type]


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
        folder = None if os.path.isfile(where) else processed_folder(Path(where))
        paths = [where] if os.path.isfile(where) else graph_files(folder) if folder is not None else []
        if not paths:
            raise SourceError(
                "graphs in a database can be read only by their own class",
                where=where,
                remedy="create the OnDiskDataset yourself and pass it to rankfeed.from_dataset()",
            )
        if len(paths) > 1:
            raise SourceError(
                "the folder holds several files of graphs",
                expected="one",
                found=", ".join(map(os.path.basename, paths[:8])),
                where=folder,
                remedy="open one of them by its own path",
            )
        self.__setstate__((DataFiles([os.path.abspath(paths[0])]), allow_pickle, follow_batch, exclude_keys))

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
    counts: dict[Any, dict[int, str]] = {}
    for store, name, cuts in stored_slices(data, slices):
        value = store[name]
        size = len(value)
        if isinstance(value, torch.Tensor) and not value.is_sparse:
            size = value.size(data.__cat_dim__(name, value, store) or 0)
        if len(cuts) < 2 or int(cuts[0]) < 0 or bool((cuts.diff() < 0).any()) or int(cuts[-1]) > size:
            raise ValueError(f"slices of {name!r} do not rise from 0 to {size}")
        own_counts = counts.setdefault(store._key, {})
        own_counts.setdefault(len(cuts) - 1, name)
        if len(own_counts) > 1:
            raise ValueError(f"attributes are of different numbers of graphs: {own_counts}")
