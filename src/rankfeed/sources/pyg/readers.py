"""How graphs are had from a data set of PyTorch Geometric: from memory, from a database, or one by one."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from rankfeed.errors import RankfeedError, SourceError
from rankfeed.sources.pyg.identity import SAMPLES, digests
from rankfeed.sources.pyg.layout import Layout
from rankfeed.sources.source import Int64

#: Cached graphs that are compared with what is stored.
_CACHED = 1024


class Graphs(Sequence[Any]):
    """Graphs of a batch that are cut out of what is stored when they are looked at."""

    def __init__(self, layout: Layout, numbers: Int64) -> None:
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


class Each:
    """Any map-style Dataset of graphs, or a list: asked for one graph after the other."""

    #: Which of the stored graphs the data set offers; None for all.
    picks: Int64 | None = None
    #: Of the file that is read while graphs are; None where they are in memory, or the file is unknown.
    path: str | None = None

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.runs_user_code = not isinstance(dataset, (list, tuple))
        self.takes_batches = hasattr(dataset, "__getitems__")

    def __len__(self) -> int:
        size: int = len(self.dataset)
        return size

    def read(self, numbers: Int64) -> Sequence[Any]:
        """Some graphs, by their number in the data set."""
        wanted = numbers.tolist()
        if not self.takes_batches:
            return [self._one(number) for number in wanted]
        graphs = list(_asked(self.dataset.__getitems__, wanted))
        return _counted(graphs, wanted, type(self.dataset).__name__)

    def _one(self, number: int) -> Any:
        return _asked(self.dataset.__getitem__, number)

    def identity(self) -> list[bytes] | None:
        """What a fingerprint is made of; None where the content is not known."""
        from torch_geometric.data.data import BaseData

        if not isinstance(self.dataset, (list, tuple)):
            return None
        pieces: list[bytes] = []
        for number in np.unique(np.linspace(0, len(self) - 1, SAMPLES, dtype=np.int64)).tolist():
            graph = self.dataset[number]
            if not isinstance(graph, BaseData):
                return None
            pieces += digests(graph)
        return pieces

    def portable(self) -> Any:
        """The data set without what another process cannot use."""
        return self.dataset


class InMemory(Each):
    """An ``InMemoryDataset``: all graphs lie in a tensor for each attribute, which are read, not copied."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.picks = _picks(dataset)
        self.runs_user_code = dataset.transform is not None
        self.takes_batches = False
        layout = Layout.of(dataset._data, dataset.slices, dataset.len())
        self._layout = layout if layout is not None and _is_untouched(dataset, layout) else None

    @staticmethod
    def fits(dataset: Any) -> bool:
        """Whether it is one, and reads its graphs as that class does."""
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
        if self._layout is not None and self.dataset.transform is None:
            return Graphs(self._layout, numbers)
        return [self._one(number) for number in numbers.tolist()]

    def _one(self, number: int) -> Any:
        # Not dataset.get(): that keeps each graph it ever cut out, in each worker.
        graph = _asked(self._cut, number)
        return graph if self.dataset.transform is None else _asked(self.dataset.transform, graph, number)

    def _cut(self, number: int) -> Any:
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
        return [str(stored.len()).encode(), *digests(stored._data, stored.slices)]

    def portable(self) -> Any:
        if self.dataset._data_list is None or self._layout is None:
            return self.dataset
        dataset = copy.copy(self.dataset)
        dataset._data_list = None
        return dataset


class OnDisk(Each):
    """An ``OnDiskDataset``: its database is opened in each thread of each process that reads."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.picks = _picks(dataset)
        self.runs_user_code = True
        self.takes_batches = True
        self._open = threading.local()
        #: Handles that a fork brought along: closing one would reach into the parent's database.
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
        dataset = self._here()
        own_get = kind.get is not OnDiskDataset.get and kind.multi_get is OnDiskDataset.multi_get
        try:
            if own_get or len(wanted) == 1:
                graphs = [_asked(dataset.get, number) for number in wanted]
                if dataset.transform is not None:
                    graphs = [
                        _asked(dataset.transform, graph, number)
                        for graph, number in zip(graphs, wanted, strict=True)
                    ]
                return graphs
            # Not its __getitems__, which takes a part of a data set (dataset[ids]) for the whole.
            return _counted(_asked(dataset.multi_get, wanted), wanted, dataset.processed_paths[0])
        except BaseException:
            self._open.__dict__.clear()  # a query cut short leaves its temporary table behind
            raise

    def _here(self) -> Any:
        """The data set with a handle of this process's and thread's own."""
        mine = self._open.__dict__
        if mine.get("process") != os.getpid():
            if "dataset" in mine:
                self._inherited.append(mine["dataset"])
            mine.update(process=os.getpid(), dataset=self.portable())
        return mine["dataset"]

    def identity(self) -> list[bytes] | None:
        path = self.dataset.processed_paths[0]
        if self.dataset.backend != "sqlite":
            return None
        try:
            with open(path, "rb") as file:
                # SQLite's header holds the number of pages and a counter of changes.
                return [str(len(self)).encode(), repr(self.dataset.schema).encode(), file.read(100)]
        except OSError as error:
            raise SourceError("the database cannot be read", found=error, where=path) from error

    def portable(self) -> Any:
        dataset = copy.copy(self.dataset)
        dataset._db, dataset._numel = None, self._length
        return dataset


def reader_of(dataset: Any) -> Each:
    """What reads the graphs of a data set."""
    for kind in (InMemory, OnDisk):
        if kind.fits(dataset):
            return kind(dataset)
    return Each(dataset)


def _picks(dataset: Any) -> Int64 | None:
    """Numbers of the graphs that a part of a PyG data set offers."""
    if dataset._indices is None:
        return None
    numbers = np.array(dataset._indices, np.int64).reshape(-1)
    size = dataset.len()
    numbers = np.where(numbers < 0, numbers + size, numbers)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < size:
        raise SourceError(
            "a part of a data set names graphs that it has not",
            expected=f"0 to {size - 1}",
            found=f"{numbers.min()} to {numbers.max()}",
        )
    return numbers


def _is_untouched(dataset: Any, layout: Layout) -> bool:
    """Whether the graphs that the data set keeps as objects are still what is stored, and none was put there."""
    cached = dataset._data_list or ()
    numbers = [number for number, graph in enumerate(cached) if graph is not None]
    for number in numbers[:: max(1, len(numbers) // _CACHED)]:
        ours, theirs = layout.graph(number).to_dict(), cached[number].to_dict()
        if ours.keys() != theirs.keys() or not all(_is_same(ours[name], theirs[name]) for name in ours):
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


def _asked(function: Any, *arguments: Any) -> Any:
    """What a function of the data set returns, its error told as one of ours."""
    try:
        return function(*arguments[:1])
    except (Exception, SystemExit) as error:
        said = error.summary if isinstance(error, RankfeedError) else str(error)
        which = arguments[-1]
        shown = f"graph {which}" if isinstance(which, int) else f"one of graphs {str(which)[:80]}"
        raise SourceError("the data set raised", found=f"{type(error).__name__}: {said}", where=shown) from error


def _counted(graphs: list[Any], wanted: list[int], where: str) -> list[Any]:
    if len(graphs) != len(wanted):
        raise SourceError(
            "the data set returned another number of graphs than it was asked for",
            expected=len(wanted),
            found=len(graphs),
            where=f"{where}, one of graphs {str(wanted)[:80]}",
            remedy="rows are missing: process the data set again, by one process (rf.prepare_once)",
        )
    return graphs
