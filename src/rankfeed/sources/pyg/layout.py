"""Batches of graphs cut straight out of the tensors that an `InMemoryDataset` holds.

PyTorch Geometric keeps all graphs of such a data set in one tensor for each attribute, and where each graph starts
in it. A batch of its own loader is made by cutting each graph out as an object and joining the objects again; here
each attribute of a batch is one gather. What comes out is the same, to the byte and to the entries that
``to_data_list()`` needs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int64 = npt.NDArray[np.int64]

#: From this many bytes of a graph on, slices that are joined beat an index of each row (measured).
_LARGE = 8192
#: What PyG tells a graph's number of nodes by, where it says no ``num_nodes`` (``torch_geometric.data.storage``).
NODE_KEYS = ("x", "feat", "pos", "batch", "node_type", "n_id", "tf")


@dataclass(frozen=True, eq=False)
class _Span:
    """Where each graph lies along a tensor: int64 [graphs], [graphs]."""

    starts: Int64
    lengths: Int64


@dataclass(frozen=True, eq=False)
class _Attribute:
    name: str
    #: All graphs' values in one tensor, or a list with one string a graph.
    values: Any
    span: _Span
    #: Along which the graphs lie.
    dim: int
    #: Keys of the stores whose nodes this counts (source and target), and is shifted by; empty for none.
    counts: tuple[Any, ...] = ()


@dataclass(eq=False)
class _Store:
    """The attributes of a kind of nodes or edges; of all, in a homogeneous graph."""

    key: Any
    attributes: list[_Attribute] = field(default_factory=list)
    #: ``num_nodes`` of each graph, where the graphs say so themselves.
    num_nodes: Int64 | None = None
    #: Whether a batch gets ``batch`` and ``ptr``.
    counted: bool = False

    @property
    def nodes(self) -> Int64 | None:
        """Nodes of each graph; None where they could only be guessed."""
        if self.num_nodes is not None:
            return self.num_nodes
        tensors = [each for each in self.attributes if isinstance(each.values, torch.Tensor)]
        for each in [each for each in tensors if each.name in NODE_KEYS] or [
            each for each in tensors if "node" in each.name
        ]:
            return each.span.lengths
        return None


class Layout:
    """Where each attribute of each graph lies.

    Args:
        data: all graphs in one, as ``InMemoryDataset`` stores them.
        stores: what is known of each of its stores, in their order.
    """

    def __init__(self, data: Any, stores: list[_Store]) -> None:
        from torch_geometric.data import Batch

        self._data = data
        self._stores = stores
        self._nodes = {store.key: store.nodes for store in stores}
        # Making an empty batch or graph takes longer than copying one.
        self._empty_batch = Batch(_base_cls=type(data)).stores_as(data)
        self._empty_graph = type(data)().stores_as(data)

    @classmethod
    def of(cls, data: Any, slices: Any, size: int) -> Layout | None:
        """The layout of ``size`` graphs, or None if only PyG itself can join them.

        That is so for classes with an ``__inc__`` or ``__cat_dim__`` of their own, sparse and nested tensors,
        attributes that are dicts or lists of tensors, and whatever else is no plain tensor or text.
        """
        if not is_plain(type(data)) or not isinstance(slices, dict) or size < 2:
            return None
        spans: list[_Span] = []
        stores: list[_Store] = []
        for store in data.stores:
            found = _store_of(data, store, slices, size, spans)
            if found is None:
                return None
            stores.append(found)
        layout = cls(data, stores)
        first = layout.graph(0)
        for found, store in zip(stores, first.stores, strict=True):
            found.counted = hasattr(store, "can_infer_num_nodes") and store.can_infer_num_nodes
            if found.counted and found.nodes is None:
                return None
            if any(layout._nodes.get(key) is None for each in found.attributes for key in each.counts):
                return None
        return layout

    def graph(self, number: int) -> Any:
        """One graph, as ``InMemoryDataset.get`` gives it: its tensors are views."""
        data = copy.copy(self._empty_graph)
        for store, out in zip(self._stores, data.stores, strict=True):
            mapping = out._mapping  # an attribute at a time, PyG looks for what it has to forget
            for each in store.attributes:
                if isinstance(each.values, torch.Tensor):
                    span = each.span
                    mapping[each.name] = each.values.narrow(
                        each.dim, span.starts.item(number), span.lengths.item(number)
                    )
                else:
                    mapping[each.name] = each.values[number]
            if store.num_nodes is not None:
                out.num_nodes = int(store.num_nodes[number])
        return data

    def collate(self, ids: Int64, follow_batch: Collection[str] = (), exclude_keys: Collection[str] = ()) -> Any:
        """Graphs as a ``Batch``, equal to ``Batch.from_data_list`` of them.

        Args:
            ids: int64 [graphs], numbers of the graphs as they are stored.
            follow_batch: attributes that get a ``<name>_batch`` and ``<name>_ptr``.
            exclude_keys: attributes that are left out.
        """
        batch = copy.copy(self._empty_batch)
        picked = _Picked(ids)
        slice_dict: dict[Any, Any] = {}
        inc_dict: dict[Any, Any] = {}
        for store, out in zip(self._stores, batch.stores, strict=True):
            for each in store.attributes:
                if each.name in exclude_keys or each.name == "ptr":
                    continue
                offsets = picked.offsets(each.span)
                out[each.name], incs = self._joined(each, picked)
                if store.key is None:
                    slice_dict[each.name], inc_dict[each.name] = offsets, incs
                else:
                    slice_dict.setdefault(store.key, {})[each.name] = offsets
                    inc_dict.setdefault(store.key, {})[each.name] = incs
                if each.name in follow_batch:
                    out[f"{each.name}_batch"] = picked.numbers(each.span.lengths)
                    out[f"{each.name}_ptr"] = offsets.clone()
            if store.num_nodes is not None and "num_nodes" not in exclude_keys:
                counts = store.num_nodes[ids].tolist()
                out._num_nodes = counts
                out.num_nodes = sum(counts)
            if store.counted:
                nodes = self._nodes[store.key]
                assert nodes is not None
                out.batch = picked.numbers(nodes)
                out.ptr = torch.from_numpy(offsets_of(nodes[ids]))
        batch._num_graphs = len(ids)
        batch._slice_dict = slice_dict
        batch._inc_dict = inc_dict
        return batch

    def _joined(self, each: _Attribute, picked: _Picked) -> tuple[Any, torch.Tensor | None]:
        """An attribute of a batch, and by how much each graph's numbers of nodes were shifted in it."""
        if not isinstance(each.values, torch.Tensor):
            return [each.values[number] for number in picked.ids.tolist()], None
        values = picked.gather(each)
        if not each.counts:
            return values, torch.zeros(len(picked.ids), dtype=torch.int64)
        shifts = []
        for key in each.counts:
            nodes = self._nodes[key]
            assert nodes is not None
            shifts.append(offsets_of(nodes[picked.ids])[:-1])
        lengths = each.span.lengths[picked.ids]
        for row, shift in zip(values if len(shifts) > 1 else [values], shifts, strict=True):
            row += torch.from_numpy(np.repeat(shift, lengths)).to(values.dtype)
        if len(shifts) > 1:
            return values, torch.from_numpy(np.stack(shifts, axis=1)[:, :, None])
        return values, torch.from_numpy(shifts[0])


class _Picked:
    """The graphs of a batch; what several attributes need of them is made once."""

    def __init__(self, ids: Int64) -> None:
        self.ids = ids
        self._index: dict[_Span, torch.Tensor] = {}

    def offsets(self, span: _Span) -> torch.Tensor:
        """Where each graph starts in the batch, and at the end the total: int64 [graphs + 1]."""
        return torch.from_numpy(offsets_of(span.lengths[self.ids]))

    def numbers(self, lengths: Int64) -> torch.Tensor:
        """Which graph of the batch each row belongs to: int64 [rows]."""
        return torch.from_numpy(np.repeat(np.arange(len(self.ids)), lengths[self.ids]))

    def gather(self, each: _Attribute) -> torch.Tensor:
        """The values of these graphs in one tensor."""
        values, dim = each.values, each.dim
        lengths = each.span.lengths[self.ids]
        row_bytes = values.nbytes // max(1, values.size(dim))
        if int(lengths.sum()) * row_bytes >= _LARGE * len(lengths):
            runs = zip(each.span.starts[self.ids].tolist(), lengths.tolist(), strict=True)
            return torch.cat([values.narrow(dim, start, length) for start, length in runs], dim=dim)
        index = self._index.get(each.span)
        if index is None:
            before = np.cumsum(lengths) - lengths
            rows = np.repeat(each.span.starts[self.ids] - before, lengths)
            rows += np.arange(len(rows))
            index = self._index[each.span] = torch.from_numpy(rows)
        rows_of: torch.Tensor = values.index_select(dim, index)
        return rows_of


def is_plain(kind: type) -> bool:
    """Whether graphs of a class are joined as PyG's own are."""
    from torch_geometric.data import Data, HeteroData

    base = next((base for base in (Data, HeteroData) if issubclass(kind, base)), None)
    return base is not None and all(
        getattr(kind, name) is getattr(base, name)
        for name in ("__inc__", "__cat_dim__", "__init__", "num_nodes", "stores_as", "stores", "__setattr__")
    )


def _store_of(data: Any, store: Any, slices: dict[Any, Any], size: int, spans: list[_Span]) -> _Store | None:
    """A store's attributes, in the order in which PyG reads them; None if one of them is not plain."""
    from torch_geometric.data.storage import EdgeStorage

    key = store._key
    of_edges = key is not None and isinstance(store, EdgeStorage)
    mine = slices.get(key, {}) if key is not None else {name: slices[name] for name in slices if name in store}
    found = _Store(key)
    for name, cuts in mine.items():
        values = store.get(name)
        span = _span_of(cuts, size, spans)
        if not isinstance(name, str) or name == "num_nodes" or span is None or not _is_simple(values, size):
            return None
        if not isinstance(values, torch.Tensor):
            if span.lengths.tolist() != [1] * size:
                return None
            found.attributes.append(_Attribute(name, values, span, 0))
            continue
        dim = data.__cat_dim__(name, values, store) % values.dim()
        if int((span.starts + span.lengths).max()) > values.size(dim) or "batch" in name:
            return None
        counts = _counts(key, name, of_edges)
        if counts and (values.dtype not in (torch.int32, torch.int64) or values.dim() > 2):
            return None
        if len(counts) > 1 and (values.dim() != 2 or values.size(0) != 2):
            return None
        found.attributes.append(_Attribute(name, values, span, dim, counts))
    if "_num_nodes" in store.__dict__:
        counted = store.__dict__["_num_nodes"]
        if len(counted) != size or not all(type(each) is int and each >= 0 for each in counted):
            return None
        found.num_nodes = np.array(counted, np.int64)
    return found


def _counts(key: Any, name: str, of_edges: bool) -> tuple[Any, ...]:
    """Stores whose nodes an attribute numbers, by PyG's rule: the names that have "index" in them."""
    if key is None:
        return (None,) if "index" in name or name == "face" else ()
    return (key[0], key[-1]) if of_edges and "index" in name else ()


def _is_simple(values: Any, size: int) -> bool:
    if isinstance(values, list):
        return len(values) == size and all(type(each) is str for each in values)
    return (
        type(values) is torch.Tensor
        and values.layout is torch.strided
        and not values.is_nested
        and values.dim() > 0
        and values.device.type == "cpu"
        and not values.requires_grad
    )


def _span_of(cuts: Any, size: int, spans: list[_Span]) -> _Span | None:
    """Where the graphs lie; one for all attributes that are cut alike."""
    if type(cuts) is not torch.Tensor or cuts.dim() != 1 or len(cuts) != size + 1 or cuts.is_floating_point():
        return None
    edges = cuts.numpy().astype(np.int64, copy=False)
    lengths = np.diff(edges)
    if edges[0] < 0 or lengths.min() < 0:
        return None
    for span in spans:
        if np.array_equal(span.starts, edges[:-1]) and np.array_equal(span.lengths, lengths):
            return span
    spans.append(_Span(edges[:-1], lengths))
    return spans[-1]


def offsets_of(lengths: Int64) -> Int64:
    """Where each of these lengths starts, and at the end their sum: int64 [lengths + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
