"""Joining graphs to a PyG ``Batch``, if their attributes are plain tensors, numbers and texts.

``Batch.from_data_list`` asks each graph for the increment of each attribute and adds it to each tensor. Here the
values of all graphs are joined first, and increments are added to all of them at once: of graph objects
(`join_graphs`), or directly from the tensors of an ``InMemoryDataset`` (`GraphLayout`), which has one tensor per
attribute with the start of each graph. The result is the same, with the entries that ``to_data_list()`` needs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rankfeed.sources.source import Int64, starts_of

#: From this many bytes per graph on, concatenating slices is faster than an index for each row (measured).
_LARGE_GRAPH = 8192
#: Attributes that tell the number of nodes if there is no ``num_nodes`` (``torch_geometric.data.storage``).
_NODE_KEYS = ("x", "feat", "pos", "batch", "node_type", "n_id", "tf")
_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class _Joined:
    """An attribute of the graphs of a batch, whose increments are not added yet."""

    name: str
    values: Any  # a tensor, or a list of texts; of ``num_nodes``, a list of ints
    lengths: Int64  # of each graph
    nodes: tuple[Int64, ...] = ()  # of each graph, in the stores that the values refer to (source, target)


class _Offsets:
    """Where the graphs of a batch begin in its attributes; computed once for those with the same lengths array."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Int64, Int64]] = {}  # holds the lengths too, so that their id stays theirs

    def of(self, lengths: Int64) -> Int64:
        """int64 [graphs + 1]; not to be modified."""
        known = self._known.get(id(lengths))
        if known is None:
            known = self._known[id(lengths)] = lengths, starts_of(lengths)
        return known[1]


def _fill_store(
    out: Any, attributes: Iterable[_Joined], nodes: Int64 | None, follow_batch: Collection[str], offsets: _Offsets
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a store of a batch; its slices and increments. ``nodes`` of each graph for ``batch`` and ``ptr``."""
    slices: dict[str, Any] = {}
    increments: dict[str, Any] = {}
    for each in attributes:
        if each.name == "num_nodes":
            out._num_nodes, out.num_nodes = each.values, sum(each.values)
            continue
        begins = torch.from_numpy(offsets.of(each.lengths))
        increments[each.name] = _add_increments(each, offsets)
        out[each.name], slices[each.name] = each.values, begins
        if each.name in follow_batch:
            out[f"{each.name}_batch"] = _graph_numbers(each.lengths)
            out[f"{each.name}_ptr"] = begins.clone()
    if nodes is not None:
        out.batch = _graph_numbers(nodes)
        out.ptr = torch.from_numpy(offsets.of(nodes).copy())
    return slices, increments


def _add_increments(each: _Joined, offsets: _Offsets) -> torch.Tensor | None:
    """Add the number of nodes of earlier graphs to node numbers; what was added for each graph."""
    if not isinstance(each.values, torch.Tensor):
        return None
    if not each.nodes:
        return torch.zeros(len(each.lengths), dtype=torch.int64)
    increments = [offsets.of(nodes)[:-1] for nodes in each.nodes]
    for row, increment in zip(each.values if len(increments) > 1 else [each.values], increments, strict=True):
        row += torch.from_numpy(np.repeat(increment, each.lengths)).to(row.dtype)
    return torch.from_numpy(increments[0] if len(increments) == 1 else np.stack(increments, axis=1)[:, :, None])


def _graph_numbers(lengths: Int64) -> torch.Tensor:
    """The graph of the batch that each row belongs to: int64 [rows]."""
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))


def join_graphs(
    graphs: Sequence[Any], follow_batch: Collection[str] = (), exclude_keys: Collection[str] = ()
) -> Any | None:
    """A ``Batch`` equal to ``Batch.from_data_list``, or None if only PyG can join these graphs (at least one)."""
    kind: Any = type(graphs[0])
    empty = _empty_batch(kind)
    if empty is None or any(type(graph) is not kind for graph in graphs):
        return None
    stored = [graph.stores[0]._mapping for graph in graphs]
    names = list(stored[0])
    if any(list(each) != names for each in stored):
        return None
    nodes = _node_counts(stored)
    has_batch = graphs[0].stores[0].can_infer_num_nodes
    if nodes is None and (has_batch or "num_nodes" in names):
        return None
    attributes = []
    for name in names:
        if name not in exclude_keys and name != "ptr":
            joined = _join_attribute(name, [each[name] for each in stored], nodes)
            if joined is None:
                return None
            attributes.append(joined)
    batch = copy.copy(empty)
    slices, increments = _fill_store(
        batch.stores[0], attributes, nodes if has_batch else None, follow_batch, _Offsets()
    )
    batch._num_graphs, batch._slice_dict, batch._inc_dict = len(graphs), slices, increments
    return batch


def _join_attribute(name: str, values: list[Any], nodes: Int64 | None) -> _Joined | None:
    """Values of all graphs; None if they are not plain."""
    first, ones = values[0], np.ones(len(values), np.int64)
    if name == "num_nodes" or isinstance(first, str):
        is_plain = name == "num_nodes" or all(type(each) is str for each in values)
        return _Joined(name, values, ones) if is_plain else None
    is_index = "index" in name or name == "face"
    if isinstance(first, (int, float)):
        return _Joined(name, torch.tensor(values), ones) if not is_index else None
    if "batch" in name or not all(_is_plain_tensor(each) for each in values):
        return None
    if first.dim() == 0:
        return _Joined(name, torch.stack(values), ones) if not is_index else None
    if any(each.dim() != first.dim() for each in values):
        return None  # PyG has an error for it
    dim = -1 if is_index else 0
    lengths = np.array([each.size(dim) for each in values], np.int64)
    if not is_index:
        return _Joined(name, torch.cat(values, dim=dim), lengths)
    if nodes is None or first.dtype not in _INDEX_DTYPES or any(each.dtype != first.dtype for each in values):
        return None
    return _Joined(name, torch.cat(values, dim=dim), lengths, (nodes,))


def _node_counts(stored: Sequence[dict[str, Any]]) -> Int64 | None:
    """Nodes of each graph, by PyG's rules; None if PyG would guess."""
    first = stored[0]
    if "num_nodes" in first:
        counts = [each["num_nodes"] for each in stored]
        return np.array(counts, np.int64) if all(type(each) is int and each >= 0 for each in counts) else None
    for name in _node_names(first):
        if all(type(each[name]) is torch.Tensor and each[name].dim() > 0 for each in stored):
            dim = -1 if "index" in name else 0
            return np.array([each[name].size(dim) for each in stored], np.int64)
        has_tensors = any(isinstance(each[name], torch.Tensor) for each in stored)
        if has_tensors or not isinstance(first[name], (str, list)):
            return None
    return None


def _node_names(names: Iterable[str]) -> list[str]:
    """Names of attributes with a row for each node, in the order in which PyG looks for them."""
    return [name for name in names if name in _NODE_KEYS] + [name for name in names if "node" in name]


@dataclass(frozen=True, eq=False)
class _Attribute:
    """An attribute of all graphs of a dataset: one tensor, or a list with a text for each graph."""

    name: str
    values: Any
    starts: Int64  # of each graph along ``dim``; equal starts are one array
    lengths: Int64
    dim: int = 0
    node_stores: tuple[Any, ...] = ()  # keys of the stores whose nodes it refers to (source and target)


@dataclass(eq=False)
class _Store:
    """The attributes of a type of nodes or edges (of all, in a homogeneous graph), in PyG's order."""

    key: Any
    attributes: list[_Attribute] = field(default_factory=list)
    num_nodes: Int64 | None = None  # if the graphs have this attribute
    has_batch: bool = False  # whether a batch gets ``batch`` and ``ptr``

    @property
    def nodes(self) -> Int64 | None:
        """Number of nodes of each graph; None if it could only be guessed."""
        if self.num_nodes is not None:
            return self.num_nodes
        lengths = {each.name: each.lengths for each in self.attributes if isinstance(each.values, torch.Tensor)}
        return next((lengths[name] for name in _node_names(lengths)), None)


class GraphLayout:
    """Where each attribute of each graph is stored; made by `GraphLayout.of`."""

    def __init__(self, data: Any, stores: list[_Store]) -> None:
        from torch_geometric.data import Batch

        self._stores = stores
        self._nodes = {store.key: store.nodes for store in stores}
        # Copying an empty batch or graph is faster than making one.
        self._empty_batch = Batch(_base_cls=type(data)).stores_as(data)
        self._empty_graph = type(data)().stores_as(data)

    @classmethod
    def of(cls, data: Any, slices: Any, size: int) -> GraphLayout | None:
        """The layout of ``size`` graphs; None if not all attributes are plain tensors, numbers and texts."""
        if not _is_plain_class(type(data)) or not isinstance(slices, dict) or size < 2:
            return None
        spans: list[tuple[Int64, Int64]] = []
        stores: list[_Store] = []
        for store in data.stores:
            found = _store_of(data, store, slices, size, spans)
            if found is None:
                return None
            stores.append(found)
        layout = cls(data, stores)
        first = layout.graph(0)
        for found, store in zip(stores, first.stores, strict=True):
            found.has_batch = hasattr(store, "can_infer_num_nodes") and store.can_infer_num_nodes
            if found.has_batch and found.nodes is None:
                return None
            if any(layout._nodes.get(key) is None for each in found.attributes for key in each.node_stores):
                return None
        return layout

    def graph(self, number: int) -> Any:
        """One graph, as ``InMemoryDataset.get`` returns it: its tensors are views."""
        data = copy.copy(self._empty_graph)
        for store, out in zip(self._stores, data.stores, strict=True):
            mapping = out._mapping  # setting attributes one by one is slow
            for each in store.attributes:
                if isinstance(each.values, torch.Tensor):
                    start, length = each.starts.item(number), each.lengths.item(number)
                    mapping[each.name] = each.values.narrow(each.dim, start, length)
                else:
                    mapping[each.name] = each.values[number]
            if store.num_nodes is not None:
                out.num_nodes = int(store.num_nodes[number])
        return data

    def collate(self, ids: Int64, follow_batch: Collection[str] = (), exclude_keys: Collection[str] = ()) -> Any:
        """A ``Batch`` equal to ``Batch.from_data_list`` of the graphs ``ids`` (int64)."""
        batch = copy.copy(self._empty_batch)
        chosen: dict[int, Int64] = {}  # of attributes with the same starts, the same array

        def of_ids(lengths: Int64) -> Int64:
            if (found := chosen.get(id(lengths))) is None:
                found = chosen[id(lengths)] = lengths[ids]
            return found

        nodes = {key: None if counts is None else of_ids(counts) for key, counts in self._nodes.items()}
        rows: dict[int, torch.Tensor] = {}
        offsets = _Offsets()
        batch._slice_dict, batch._inc_dict = {}, {}
        for store, out in zip(self._stores, batch.stores, strict=True):
            attributes = [
                _Joined(
                    each.name,
                    _gather(each, ids, of_ids(each.lengths), offsets, rows),
                    of_ids(each.lengths),
                    tuple(counts for key in each.node_stores if (counts := nodes[key]) is not None),
                )
                for each in store.attributes
                if each.name not in exclude_keys and each.name != "ptr"
            ]
            if store.num_nodes is not None and "num_nodes" not in exclude_keys:
                attributes.append(_Joined("num_nodes", store.num_nodes[ids].tolist(), ids))
            counts = nodes[store.key] if store.has_batch else None
            filled = _fill_store(out, attributes, counts, follow_batch, offsets)
            for entries, found in zip((batch._slice_dict, batch._inc_dict), filled, strict=True):
                if store.key is None:
                    entries.update(found)
                elif found:
                    entries[store.key] = found
        batch._num_graphs = len(ids)
        return batch


def _gather(each: _Attribute, ids: Int64, lengths: Int64, offsets: _Offsets, rows: dict[int, torch.Tensor]) -> Any:
    """The values of some graphs; ``rows`` keeps the indices that attributes with the same starts share."""
    values, dim = each.values, each.dim
    if not isinstance(values, torch.Tensor):
        return [values[number] for number in ids.tolist()]
    row_bytes = values.nbytes // max(1, values.size(dim))
    if int(lengths.sum()) * row_bytes >= _LARGE_GRAPH * len(lengths):
        slices = zip(each.starts[ids].tolist(), lengths.tolist(), strict=True)
        return torch.cat([values.narrow(dim, start, length) for start, length in slices], dim=dim)
    index = rows.get(id(each.starts))
    if index is None:
        found = np.repeat(each.starts[ids] - offsets.of(lengths)[:-1], lengths)
        found += np.arange(len(found))
        index = rows[id(each.starts)] = torch.from_numpy(found)
    return values.index_select(dim, index)


def _store_of(
    data: Any, store: Any, slices: dict[Any, Any], size: int, spans: list[tuple[Int64, Int64]]
) -> _Store | None:
    """The attributes of a store; None if one of them is not plain."""
    from torch_geometric.data.storage import EdgeStorage

    key = store._key
    is_edges = key is not None and isinstance(store, EdgeStorage)
    own_slices = (
        slices.get(key, {}) if key is not None else {name: slices[name] for name in slices if name in store}
    )
    found = _Store(key)
    for name, cuts in own_slices.items():
        values = store.get(name)
        span = _span_of(cuts, size, spans)
        if not isinstance(name, str) or name == "num_nodes" or span is None:
            return None
        starts, lengths = span
        if isinstance(values, list):
            if not all(type(each) is str for each in values) or lengths.tolist() != [1] * len(values):
                return None
            found.attributes.append(_Attribute(name, values, starts, lengths))
            continue
        if not _is_plain_tensor(values) or values.dim() == 0 or "batch" in name:
            return None
        dim = data.__cat_dim__(name, values, store) % values.dim()
        if int((starts + lengths).max()) > values.size(dim):
            return None
        node_stores = _node_stores(key, name, is_edges)
        if node_stores and (values.dtype not in _INDEX_DTYPES or values.dim() > 2):
            return None
        if len(node_stores) > 1 and (values.dim() != 2 or values.size(0) != 2):
            return None
        found.attributes.append(_Attribute(name, values, starts, lengths, dim, node_stores))
    if "_num_nodes" in store.__dict__:
        counts = store.__dict__["_num_nodes"]
        if len(counts) != size or not all(type(each) is int and each >= 0 for each in counts):
            return None
        found.num_nodes = np.array(counts, np.int64)
    return found


def _node_stores(key: Any, name: str, is_edges: bool) -> tuple[Any, ...]:
    """Stores whose nodes an attribute refers to; by PyG's rule, its name contains "index"."""
    if key is None:
        return (None,) if "index" in name or name == "face" else ()
    return (key[0], key[-1]) if is_edges and "index" in name else ()


def _span_of(cuts: Any, size: int, spans: list[tuple[Int64, Int64]]) -> tuple[Int64, Int64] | None:
    """Start and length of each graph; attributes with equal slices share them."""
    if type(cuts) is not torch.Tensor or cuts.dim() != 1 or len(cuts) != size + 1 or cuts.is_floating_point():
        return None
    edges = cuts.numpy().astype(np.int64, copy=False)
    lengths = np.diff(edges)
    if edges[0] < 0 or lengths.min() < 0:
        return None
    for span in spans:
        if np.array_equal(span[0], edges[:-1]) and np.array_equal(span[1], lengths):
            return span
    spans.append((edges[:-1], lengths))
    return spans[-1]


def _is_plain_class(kind: type) -> bool:
    """Whether graphs of a class are joined like PyG's own."""
    from torch_geometric.data import Data, HeteroData

    base = next((base for base in (Data, HeteroData) if issubclass(kind, base)), None)
    return base is not None and all(
        getattr(kind, name) is getattr(base, name)
        for name in ("__inc__", "__cat_dim__", "__init__", "num_nodes", "stores_as", "stores", "__setattr__")
    )


@lru_cache(maxsize=64)
def _empty_batch(kind: type) -> Any:
    """An empty batch of homogeneous graphs; None if only PyG can join graphs of this class."""
    from torch_geometric.data import Batch, Data

    return Batch(_base_cls=kind) if issubclass(kind, Data) and _is_plain_class(kind) else None


def _is_plain_tensor(value: Any) -> bool:
    """Whether this is a strided tensor without gradient, in host memory."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and not value.requires_grad
        and value.is_cpu
    )
