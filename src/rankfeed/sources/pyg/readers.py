"""Reading graphs from datasets of PyTorch Geometric: from memory, from a database, or one by one."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch

from rankfeed.errors import RankfeedError, SourceError
from rankfeed.sources.pyg.layout import GraphLayout
from rankfeed.sources.source import Int64
from rankfeed.storage import digest_of

#: Cached graphs that are compared with the stored ones.
_COMPARED = 1024
#: Graphs and list items in a fingerprint, and pieces of a tensor with their bytes.
_SAMPLES, _PIECES, _PIECE_BYTES = 256, 16, 4096


class Graphs(Sequence[Any]):
    """Graphs of a batch that are cut out of the stored tensors when they are used."""

    def __init__(self, layout: GraphLayout, numbers: Int64) -> None:
        self.layout = layout
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Graphs: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Graphs(self.layout, self.numbers[index])
        return self.layout.graph(int(self.numbers[index]))


class GraphReader:
    """Reads any map-style Dataset of graphs, or a list, one graph after the other.

    Attributes:
        indices: the stored graphs that the dataset offers; None for all.
        path: the file that is read while graphs are; None if they are in memory, or the file is unknown.
    """

    indices: Int64 | None = None
    path: str | None = None

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.runs_user_code = not isinstance(dataset, (list, tuple))
        self.supports_batched_getitem = hasattr(dataset, "__getitems__")

    def __len__(self) -> int:
        size: int = len(self.dataset)
        return size

    def read(self, numbers: Int64) -> Sequence[Any]:
        """Graphs by their number in the dataset."""
        wanted = numbers.tolist()
        if not self.supports_batched_getitem:
            return [_call(self.dataset.__getitem__, number, number) for number in wanted]
        graphs = list(_call(self.dataset.__getitems__, wanted, wanted))
        return _check_count(graphs, wanted, type(self.dataset).__name__)

    def identity(self) -> list[bytes] | None:
        """Pieces of a fingerprint; None if the content is unknown."""
        from torch_geometric.data.data import BaseData

        if not isinstance(self.dataset, (list, tuple)):
            return None
        pieces: list[bytes] = []
        for number in np.unique(np.linspace(0, len(self) - 1, _SAMPLES, dtype=np.int64)).tolist():
            graph = self.dataset[number]
            if not isinstance(graph, BaseData):
                return None
            pieces += _digests(graph)
        return pieces

    def picklable_dataset(self) -> Any:
        """The dataset without what another process cannot use."""
        return self.dataset


class InMemoryReader(GraphReader):
    """Reads an ``InMemoryDataset``, which stores all graphs in one tensor per attribute."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.indices = _dataset_indices(dataset)
        self.runs_user_code = dataset.transform is not None
        self.supports_batched_getitem = False
        layout = GraphLayout.of(dataset._data, dataset.slices, dataset.len())
        self._layout = layout if layout is not None and _cache_is_unchanged(dataset, layout) else None

    @staticmethod
    def fits(dataset: Any) -> bool:
        """Whether it is one and reads graphs as that class does."""
        from torch_geometric.data import InMemoryDataset

        kind = type(dataset)
        return (
            isinstance(dataset, InMemoryDataset)
            and dataset._data is not None
            and all(
                getattr(kind, name) is getattr(InMemoryDataset, name)
                for name in ("get", "len", "indices", "__getitem__", "__len__")
            )
            and not hasattr(dataset, "__getitems__")
        )

    def read(self, numbers: Int64) -> Sequence[Any]:
        transform = self.dataset.transform
        if self._layout is not None and transform is None:
            return Graphs(self._layout, numbers)
        # Not dataset.get(), which keeps every graph that it cuts out.
        graphs = [_call(self._cut_out, number, number) for number in numbers.tolist()]
        if transform is None:
            return graphs
        return [_call(transform, graph, number) for graph, number in zip(graphs, numbers.tolist(), strict=True)]

    def _cut_out(self, number: int) -> Any:
        stored = self.dataset
        if self._layout is not None:
            return self._layout.graph(number)
        cached = stored._data_list
        if stored.len() == 1 or (cached is not None and cached[number] is not None):
            return stored.get(number)
        from torch_geometric.data.separate import separate

        return separate(type(stored._data), stored._data, number, stored.slices, decrement=False)

    def identity(self) -> list[bytes] | None:
        stored = self.dataset
        return [str(stored.len()).encode(), *_digests(stored._data, stored.slices)]

    def picklable_dataset(self) -> Any:
        if self.dataset._data_list is None or self._layout is None:
            return self.dataset
        dataset = copy.copy(self.dataset)
        dataset._data_list = None
        return dataset


class OnDiskReader(GraphReader):
    """Reads an ``OnDiskDataset``, whose database is opened in each thread of each process."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.indices = _dataset_indices(dataset)
        self.runs_user_code = True
        self.supports_batched_getitem = True
        self._open = threading.local()
        #: Inherited by a fork: closing one would affect the database of the parent.
        self._inherited: list[Any] = []
        self._length = int(dataset.len())
        if dataset.backend == "sqlite":
            self.path = os.path.abspath(dataset.processed_paths[0])

    def __len__(self) -> int:
        return self._length

    @staticmethod
    def fits(dataset: Any) -> bool:
        """Whether it is one."""
        from torch_geometric.data import OnDiskDataset

        kind = type(dataset)
        return isinstance(dataset, OnDiskDataset) and all(
            getattr(kind, name) is getattr(OnDiskDataset, name) for name in ("indices", "__getitem__", "__len__")
        )

    def read(self, numbers: Int64) -> Sequence[Any]:
        from torch_geometric.data import OnDiskDataset

        wanted, kind = numbers.tolist(), type(self.dataset)
        dataset = self._of_this_thread()
        own_get = kind.get is not OnDiskDataset.get and kind.multi_get is OnDiskDataset.multi_get
        try:
            if not own_get and len(wanted) != 1:
                # Not __getitems__, which ignores the indices of a part of a dataset.
                graphs = _call(dataset.multi_get, wanted, wanted)
                return _check_count(graphs, wanted, dataset.processed_paths[0])
            graphs = [_call(dataset.get, number, number) for number in wanted]
            if dataset.transform is None:
                return graphs
            return [_call(dataset.transform, graph, number) for graph, number in zip(graphs, wanted, strict=True)]
        except BaseException:
            self._open.__dict__.clear()  # an interrupted query leaves a temporary table
            raise

    def _of_this_thread(self) -> Any:
        """The dataset with a database handle of this process and thread."""
        mine = self._open.__dict__
        if mine.get("process") != os.getpid():
            if "dataset" in mine:
                self._inherited.append(mine["dataset"])
            mine.update(process=os.getpid(), dataset=self.picklable_dataset())
        return mine["dataset"]

    def identity(self) -> list[bytes] | None:
        path = self.dataset.processed_paths[0]
        if self.dataset.backend != "sqlite":
            return None
        try:
            with open(path, "rb") as file:
                # SQLite's header has the number of pages and a change counter.
                return [str(len(self)).encode(), repr(self.dataset.schema).encode(), file.read(100)]
        except OSError as error:
            raise SourceError("the database cannot be read", found=error, where=path) from error

    def picklable_dataset(self) -> Any:
        dataset = copy.copy(self.dataset)
        dataset._db, dataset._numel = None, self._length
        return dataset


def reader_of(dataset: Any) -> GraphReader:
    """The reader for a dataset."""
    for kind in (InMemoryReader, OnDiskReader):
        if kind.fits(dataset):
            return kind(dataset)
    return GraphReader(dataset)


def check_indices(indices: Int64, length: int) -> Int64:
    """Indices into a dataset; negative ones count from its end."""
    indices = np.where(indices < 0, indices + length, indices)
    if len(indices) and not 0 <= indices.min() <= indices.max() < length:
        raise SourceError(
            "a part of a dataset has indices that the dataset does not have",
            expected=f"0 to {length - 1}",
            found=f"{indices.min()} to {indices.max()}",
        )
    return indices


def _dataset_indices(dataset: Any) -> Int64 | None:
    if dataset._indices is None:
        return None
    return check_indices(np.array(dataset._indices, np.int64).reshape(-1), dataset.len())


def _cache_is_unchanged(dataset: Any, layout: GraphLayout) -> bool:
    """Whether the graphs that the dataset caches as objects still equal the stored ones."""
    cached = dataset._data_list or ()
    numbers = [number for number, graph in enumerate(cached) if graph is not None]
    for number in numbers[:: max(1, len(numbers) // _COMPARED)]:
        stored, found = layout.graph(number).to_dict(), cached[number].to_dict()
        if stored.keys() != found.keys() or not all(_is_same(stored[name], found[name]) for name in stored):
            return False
    return True


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
        )
    if hasattr(one, "data_ptr"):
        return hasattr(other, "data_ptr") and (one.shape, one.data_ptr()) == (other.shape, other.data_ptr())
    return bool(one == other)


def _call(function: Any, argument: Any, which: int | list[int]) -> Any:
    """Call a function of the dataset; its errors name the graph."""
    try:
        return function(argument)
    except (Exception, SystemExit) as error:
        message = error.summary if isinstance(error, RankfeedError) else str(error)
        shown = f"graph {which}" if isinstance(which, int) else f"one of graphs {str(which)[:80]}"
        found = f"{type(error).__name__}: {message}"
        raise SourceError("the dataset raised", found=found, where=shown) from error


def _check_count(graphs: list[Any], wanted: list[int], where: str) -> list[Any]:
    if len(graphs) != len(wanted):
        raise SourceError(
            "the dataset returned another number of graphs than requested",
            expected=len(wanted),
            found=len(graphs),
            where=f"{where}, one of graphs {str(wanted)[:80]}",
            remedy="rows are missing: process the dataset again, in one process (rf.prepare_once)",
        )
    return graphs


def _digests(data: Any, slices: Any = None) -> list[bytes]:
    """Names, types, shapes and samples of the content of graphs; complete slices."""
    pieces = []
    for name, value in _named_values(data, slices):
        facts = f"{name} {type(value).__name__}"
        if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested:
            content = _tensor_digest(value.detach(), complete=name.startswith("slices"))
            facts += f" {value.dtype} {tuple(value.shape)} {content}"
        elif isinstance(value, (list, tuple)):
            some = [each for each in value[:: max(1, len(value) // _SAMPLES)] if type(each) is str]
            facts += f" {len(value)} {some}"
        elif isinstance(value, (int, float, str)):
            facts += f" {value!r}"
        pieces.append(facts.encode())
    return pieces


def _tensor_digest(tensor: Any, *, complete: bool) -> str:
    flat = tensor.reshape(-1).cpu().view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    if complete or flat.nbytes <= _PIECES * _PIECE_BYTES:
        return digest_of(flat.data)
    starts = np.linspace(0, flat.nbytes - _PIECE_BYTES, _PIECES, dtype=np.int64).tolist()
    return digest_of(*(flat[start : start + _PIECE_BYTES].data for start in starts))


def _named_values(data: Any, slices: Any) -> Iterator[tuple[str, Any]]:
    for store in data.stores:
        for name, value in store.items():
            yield f"{store._key}.{name}", value
    pending: list[tuple[str, Any]] = [("slices", slices)]
    while pending:
        name, node = pending.pop()
        if isinstance(node, dict):
            pending += [(f"{name}.{key}", value) for key, value in node.items()]
        elif isinstance(node, Sequence) and not isinstance(node, str):
            pending += [(f"{name}.{number}", value) for number, value in enumerate(node)]
        else:
            yield name, node
