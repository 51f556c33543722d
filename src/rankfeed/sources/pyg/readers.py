"""Reading graphs from datasets of PyTorch Geometric: from memory, from a database, or one by one."""

import copy
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rankfeed.errors import SourceError, describe_error
from rankfeed.sources.pyg.batch import GraphLayout
from rankfeed.sources.source import Int64
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.file_errors import file_errors

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

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Graphs(self.layout, self.numbers[index])
        return self.layout.graph(int(self.numbers[index]))


class GraphReader:
    """Reads any map-style Dataset of graphs, or a list, one graph after the other."""

    #: The stored graphs that the dataset offers; None for all.
    indices: Int64 | None = None
    #: The file that is read while graphs are; None if they are in memory, or the file is unknown.
    path: str | None = None

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.runs_user_code = not isinstance(dataset, (list, tuple))
        self.supports_batched_getitem = hasattr(dataset, "__getitems__")

    def __reduce__(self) -> tuple[Any, ...]:
        return reader_of, (self.picklable_dataset(),)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, numbers: Int64) -> Sequence[Any]:
        """Graphs by their number in the dataset."""
        if not self.supports_batched_getitem:
            return _call_each(self.dataset.__getitem__, numbers, numbers.tolist())
        return _call_batch(self.dataset.__getitems__, numbers, type(self.dataset).__name__)

    def identity(self) -> list[bytes] | None:
        """Pieces of a fingerprint; None if the content is unknown."""
        from torch_geometric.data.data import BaseData

        if not isinstance(self.dataset, (list, tuple)):
            return None
        numbers = np.unique(np.linspace(0, len(self) - 1, _SAMPLES, dtype=np.int64))
        graphs = [self.dataset[index] for index in numbers.tolist()]
        if not all(isinstance(graph, BaseData) for graph in graphs):
            return None
        return [piece for graph in graphs for piece in _describe_graphs(graph)]

    def picklable_dataset(self) -> Any:
        """The dataset without what another process cannot use."""
        return self.dataset


class InMemoryReader(GraphReader):
    """Reads an ``InMemoryDataset``, which stores all graphs in one tensor per attribute."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.indices = compose(None, dataset._indices, dataset.len())
        self.runs_user_code = dataset.transform is not None
        self.supports_batched_getitem = False
        check_types(dataset._data, dataset.slices, type(dataset).__name__)
        layout = GraphLayout.of(dataset._data, dataset.slices, dataset.len())
        cached = dataset._data_list or ()
        indices = [index for index, graph in enumerate(cached) if graph is not None]
        for index in indices[:: max(1, len(indices) // _COMPARED)]:
            if layout is not None and not _is_same(layout.graph(index).to_dict(), cached[index].to_dict()):
                layout = None  # the dataset returns the objects, which its user changed
        self._layout = layout

    def read(self, numbers: Int64) -> Sequence[Any]:
        transform = self.dataset.transform
        if self._layout is not None and transform is None:
            return Graphs(self._layout, numbers)
        cut_out = self._cut_out if self._layout is None else self._layout.graph
        graphs = []
        for index in numbers.tolist():
            graph = _call(cut_out, index, index)
            graphs.append(graph if transform is None else _call(transform, graph, index))
        return graphs

    def _cut_out(self, index: int) -> Any:
        # Not dataset.get(), which keeps every graph that it cuts out.
        stored = self.dataset
        cached = stored._data_list
        if stored.len() == 1 or (cached is not None and cached[index] is not None):
            return stored.get(index)
        from torch_geometric.data.separate import separate

        return separate(type(stored._data), stored._data, index, stored.slices, decrement=False)

    def identity(self) -> list[bytes] | None:
        stored = self.dataset
        slices = _describe("slices", stored.slices, complete=True)
        return [str(stored.len()).encode(), *_describe_graphs(stored._data), *slices]

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
        self._length = int(dataset.len())
        self.indices = compose(None, dataset._indices, self._length)
        self.runs_user_code = True
        self.supports_batched_getitem = True
        #: The dataset by process; a fork keeps its parent's, since closing it would affect the parent's database.
        self._open = threading.local()
        if dataset.backend == "sqlite":
            self.path = os.path.abspath(dataset.processed_paths[0])

    def read(self, numbers: Int64) -> Sequence[Any]:
        from torch_geometric.data import OnDiskDataset

        kind, opened, process = type(self.dataset), self._open.__dict__, str(os.getpid())
        if process not in opened:
            opened[process] = self.picklable_dataset()
        dataset = opened[process]
        own_get = kind.get is not OnDiskDataset.get and kind.multi_get is OnDiskDataset.multi_get
        try:
            if not own_get and len(numbers) != 1:
                # Not __getitems__, which ignores the indices of a part of a dataset.
                return _call_batch(dataset.multi_get, numbers, dataset.processed_paths[0])
            graphs = _call_each(dataset.get, numbers, numbers.tolist())
            return graphs if dataset.transform is None else _call_each(dataset.transform, numbers, graphs)
        except BaseException:
            opened.pop(process, None)  # an interrupted query leaves a temporary table
            raise

    def identity(self) -> list[bytes] | None:
        path = self.dataset.processed_paths[0]
        if self.dataset.backend != "sqlite":
            return None
        with file_errors(path), open(path, "rb") as file:
            # SQLite's header has the number of pages and a change counter.
            return [str(self._length).encode(), repr(self.dataset.schema).encode(), file.read(100)]

    def picklable_dataset(self) -> Any:
        dataset = copy.copy(self.dataset)
        dataset._db, dataset._numel = None, self._length
        return dataset


def reader_of(dataset: Any) -> GraphReader:
    """The reader for a dataset: that of a class of PyG if the dataset reads graphs as the class does."""
    from torch_geometric.data import InMemoryDataset, OnDiskDataset

    def inherits(base: type, *methods: str) -> bool:
        own = type(dataset)
        return isinstance(dataset, base) and all(getattr(own, name) is getattr(base, name) for name in methods)

    if inherits(InMemoryDataset, "get", "len", "indices", "__getitem__", "__len__"):
        if dataset._data is not None and not hasattr(dataset, "__getitems__"):
            return InMemoryReader(dataset)
    elif inherits(OnDiskDataset, "indices", "__getitem__", "__len__"):
        return OnDiskReader(dataset)
    return GraphReader(dataset)


def stored_slices(data: Any, slices: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Store, name and slices of each attribute; adjacency matrices, cut along two dimensions, are left out."""
    if not isinstance(slices, dict):
        return
    for store in data.stores:
        own_slices = slices if store._key is None else slices.get(store._key)
        if not isinstance(own_slices, dict):
            continue
        for name, cuts in own_slices.items():
            if isinstance(cuts, torch.Tensor) and cuts.dim() == 1 and name in store:
                yield store, name, cuts


def check_types(data: Any, slices: Any, where: str) -> None:
    """Refuse stored graphs of which some lack a node or edge type: PyG separates them wrongly.

    The slices of a type begin with the first graph that has it, and do not say which graphs these are.
    """
    counts = {store._key: len(cuts) - 1 for store, _, cuts in stored_slices(data, slices)}
    total = max(counts.values(), default=0)
    if lacking := {key: count for key, count in counts.items() if count != total}:
        raise SourceError(
            "some graphs lack a node or edge type, and PyTorch Geometric did not store which",
            expected=f"each type in all {total} graphs",
            found=", ".join(f"{key!r} in {count}" for key, count in lacking.items()),
            where=where,
            remedy="save the graphs again with the same types in each: a missing node type with 0 nodes, such as "
            "data['b'].x = torch.empty(0, 3), and a missing edge type with 0 edges, torch.empty(2, 0)",
        )


def compose(indices: Int64 | None, subset: Any, length: int) -> Int64 | None:
    """The graphs of a subset of ``length`` selected graphs; negative numbers count from the end. None is all."""
    if subset is None:
        return indices
    numbers = np.array(subset, np.int64).reshape(-1)
    numbers[numbers < 0] += length
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < length:
        raise SourceError(
            "a part of a dataset has indices that the dataset does not have",
            expected=f"0 to {length - 1}",
            found=f"{numbers.min()} to {numbers.max()}",
        )
    return numbers if indices is None else indices[numbers]


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[name], right[name]) for name in left)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (left.shape, left.data_ptr()) == (right.shape, right.data_ptr())
    return type(left) is type(right) and bool(left == right)


def _call_each(function: Any, numbers: Int64, arguments: Sequence[Any]) -> list[Any]:
    return [_call(function, *pair) for pair in zip(arguments, numbers.tolist(), strict=True)]


def _call_batch(function: Any, numbers: Int64, where: str) -> list[Any]:
    indices = numbers.tolist()
    shown = f"one of graphs {str(indices)[:80]}"
    graphs = list(_call(function, indices, shown))
    if len(graphs) != len(indices):
        raise SourceError(
            "the dataset returned another number of graphs than requested",
            expected=len(indices),
            found=len(graphs),
            where=f"{where}, {shown}",
            remedy="rows are missing: process the dataset again, in one process (rf.prepare_once)",
        )
    return graphs


def _call(function: Any, argument: Any, where: str | int) -> Any:
    """Call a function of the dataset; its errors name the graph, by its number."""
    try:
        return function(argument)
    except (Exception, SystemExit) as error:
        where = where if isinstance(where, str) else f"graph {where}"
        raise SourceError("the dataset raised", found=describe_error(error), where=where) from error


def _describe_graphs(data: Any) -> Iterator[bytes]:
    for store in data.stores:
        yield from _describe(str(store._key), dict(store.items()))


def _describe(name: str, value: Any, *, complete: bool = False) -> Iterator[bytes]:
    """Names, types, shapes and samples of the content of a value, for a fingerprint; or its complete content."""
    facts = f"{name} {type(value).__name__}"
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _describe(f"{name}.{key}", part, complete=complete)
    elif isinstance(value, (list, tuple)):
        facts += f" {len(value)}"
        for index, part in enumerate(value[:: max(1, len(value) // _SAMPLES)]):
            yield from _describe(f"{name}.{index}", part, complete=complete)
    elif type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        pieces = [flat.data]
        if not complete and flat.nbytes > _PIECES * _PIECE_BYTES:
            starts = np.linspace(0, flat.nbytes - _PIECE_BYTES, _PIECES, dtype=np.int64).tolist()
            pieces = [flat[start : start + _PIECE_BYTES].data for start in starts]
        facts += f" {value.dtype} {tuple(value.shape)} {digest_of(*pieces)}"
    elif isinstance(value, (int, float, str)):
        facts += f" {value!r}"
    yield facts.encode()
