"""Joining graphs to a PyG ``Batch``, if their attributes are plain tensors, numbers and texts.

``Batch.from_data_list`` asks each graph for the increment of each attribute and adds it to each tensor. Here the
values of all graphs are joined first, and increments are added to all of them at once: of graph objects
(`join_graphs`), or directly from the tensors of an ``InMemoryDataset`` (`GraphLayout`), which has one tensor per
attribute with the start of each graph. The result is the same, with the entries that ``to_data_list()`` needs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from rankfeed.sources.source import Int64, starts_of

#: From this many bytes per graph on, concatenating slices is faster than an index for each row (measured).
_LARGE_GRAPH = 8192
#: Attributes that tell the number of nodes if there is no ``num_nodes`` (``torch_geometric.data.storage``).
_NODE_KEYS = ("x", "feat", "pos", "batch", "node_type", "n_id", "tf")
_INDEX_DTYPES = (torch.int32, torch.int64)


class _Rows:
    """The rows of each graph in an attribute; computed once for all attributes with the same rows."""

    def __init__(self, lengths: Int64, starts: Int64 | None = None) -> None:
        self.lengths = lengths
        #: int64 [graphs], first row of each graph in the stored tensor; by default, one after the other.
        self.starts = self.offsets[:-1] if starts is None else starts

    @cached_property
    def offsets(self) -> Int64:
        """First row of each graph in a batch of these graphs, and their total: int64 [graphs + 1], read-only."""
        return starts_of(self.lengths)

    @cached_property
    def index(self) -> torch.Tensor:
        """The rows of all graphs in the stored tensor: int64 [rows]."""
        flat = np.repeat(self.starts - self.offsets[:-1], self.lengths)
        flat += np.arange(len(flat))
        return torch.from_numpy(flat)


@dataclass(frozen=True, eq=False)
class _Attribute:
    """An attribute of the graphs of a dataset, or of a batch."""

    name: str
    values: Any  # a tensor, or a list with a text for each graph; of ``num_nodes``, a list of ints
    rows: _Rows  # along ``dim``
    dim: int = 0
    node_stores: tuple[Any, ...] = ()  # keys of the stores whose nodes it refers to (source and target)


def _fill_store(
    out: Any,
    attributes: Iterable[_Attribute],
    nodes: Mapping[Any, _Rows | None],
    own_nodes: _Rows | None,
    follow_batch: Collection[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a store of a batch; its slices and increments. ``own_nodes`` are for ``batch`` and ``ptr``."""
    slices: dict[str, Any] = {}
    increments: dict[str, Any] = {}
    for attr in attributes:
        if attr.name == "num_nodes":
            out._num_nodes, out.num_nodes = attr.values, sum(attr.values)
            continue
        begins = torch.from_numpy(attr.rows.offsets)
        increments[attr.name] = _add_increments(attr, nodes)
        out[attr.name], slices[attr.name] = attr.values, begins
        if attr.name in follow_batch:
            out[f"{attr.name}_batch"] = _graph_numbers(attr.rows)
            out[f"{attr.name}_ptr"] = begins.clone()
    if own_nodes is not None:
        out.batch = _graph_numbers(own_nodes)
        out.ptr = torch.from_numpy(own_nodes.offsets.copy())
    return slices, increments


def _add_increments(attr: _Attribute, nodes: Mapping[Any, _Rows | None]) -> torch.Tensor | None:
    """Add the number of nodes of earlier graphs to node numbers; what was added for each graph."""
    if not isinstance(attr.values, torch.Tensor):
        return None
    increments = [rows.offsets[:-1] for key in attr.node_stores if (rows := nodes[key]) is not None]
    if not increments:
        return torch.zeros(len(attr.rows.lengths), dtype=torch.int64)
    for row, increment in zip(attr.values if len(increments) > 1 else [attr.values], increments, strict=True):
        row += torch.from_numpy(np.repeat(increment, attr.rows.lengths)).to(row.dtype)
    return torch.from_numpy(increments[0] if len(increments) == 1 else np.stack(increments, axis=1)[:, :, None])


def _graph_numbers(rows: _Rows) -> torch.Tensor:
    """The graph of the batch that each row belongs to: int64 [rows]."""
    return torch.from_numpy(np.repeat(np.arange(len(rows.lengths)), rows.lengths))


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
    if any(list(mapping) != names for mapping in stored):
        return None
    nodes = _node_counts(stored)
    has_batch = graphs[0].stores[0].can_infer_num_nodes
    if nodes is None and (has_batch or "num_nodes" in names):
        return None
    attributes = []
    for name in names:
        if name not in exclude_keys and name != "ptr":
            joined = _join_attribute(name, [mapping[name] for mapping in stored], nodes)
            if joined is None:
                return None
            attributes.append(joined)
    batch = copy.copy(empty)
    own_nodes = nodes if has_batch else None
    slices, increments = _fill_store(batch.stores[0], attributes, {None: nodes}, own_nodes, follow_batch)
    batch._num_graphs, batch._slice_dict, batch._inc_dict = len(graphs), slices, increments
    return batch


def _join_attribute(name: str, values: list[Any], nodes: _Rows | None) -> _Attribute | None:
    """Values of all graphs; None if they are not plain."""
    first, ones = values[0], _Rows(np.ones(len(values), np.int64))
    if name == "num_nodes" or isinstance(first, str):
        is_plain = name == "num_nodes" or all(type(text) is str for text in values)
        return _Attribute(name, values, ones) if is_plain else None
    is_index = "index" in name or name == "face"
    if isinstance(first, (int, float)):
        return _Attribute(name, torch.tensor(values), ones) if not is_index else None
    if "batch" in name or not all(_is_plain_tensor(tensor) for tensor in values):
        return None
    if first.dim() == 0:
        return _Attribute(name, torch.stack(values), ones) if not is_index else None
    if any(tensor.dim() != first.dim() for tensor in values):
        return None  # PyG has an error for it
    dim = -1 if is_index else 0
    rows = _Rows(np.array([tensor.size(dim) for tensor in values], np.int64))
    if not is_index:
        return _Attribute(name, torch.cat(values, dim=dim), rows)
    if nodes is None or first.dtype not in _INDEX_DTYPES or any(tensor.dtype != first.dtype for tensor in values):
        return None
    return _Attribute(name, torch.cat(values, dim=dim), rows, dim, (None,))


def _node_counts(stored: Sequence[dict[str, Any]]) -> _Rows | None:
    """Nodes of each graph, by PyG's rules; None if PyG would guess."""
    first = stored[0]
    if "num_nodes" in first:
        counts = [mapping["num_nodes"] for mapping in stored]
        are_counts = all(type(count) is int and count >= 0 for count in counts)
        return _Rows(np.array(counts, np.int64)) if are_counts else None
    for name in _node_names(first):
        if all(type(mapping[name]) is torch.Tensor and mapping[name].dim() > 0 for mapping in stored):
            dim = -1 if "index" in name else 0
            return _Rows(np.array([mapping[name].size(dim) for mapping in stored], np.int64))
        has_tensors = any(isinstance(mapping[name], torch.Tensor) for mapping in stored)
        if has_tensors or not isinstance(first[name], (str, list)):
            return None
    return None


def _node_names(names: Iterable[str]) -> list[str]:
    """Names of attributes with a row for each node, in the order in which PyG looks for them."""
    return [name for name in names if name in _NODE_KEYS] + [name for name in names if "node" in name]


@dataclass(eq=False)
class _Store:
    """The attributes of a type of nodes or edges (of all, in a homogeneous graph), in PyG's order."""

    key: Any
    attributes: list[_Attribute] = field(default_factory=list)
    num_nodes: _Rows | None = None  # if the graphs have this attribute
    has_batch: bool = False  # whether a batch gets ``batch`` and ``ptr``

    @property
    def nodes(self) -> _Rows | None:
        """The nodes of each graph; None if their number could only be guessed."""
        if self.num_nodes is not None:
            return self.num_nodes
        rows = {attr.name: attr.rows for attr in self.attributes if isinstance(attr.values, torch.Tensor)}
        return next((rows[name] for name in _node_names(rows)), None)


class GraphLayout:
    """Where each attribute of each graph is stored; made by `GraphLayout.of`."""

    def __init__(self, data: Any, stores: list[_Store], rows: list[_Rows]) -> None:
        from torch_geometric.data import Batch

        self._stores, self._rows = stores, rows
        self._nodes = {store.key: store.nodes for store in stores}
        # Copying an empty batch or graph is faster than making one.
        self._empty_batch = Batch(_base_cls=type(data)).stores_as(data)
        self._empty_graph = type(data)().stores_as(data)

    @classmethod
    def of(cls, data: Any, slices: Any, size: int) -> GraphLayout | None:
        """The layout of ``size`` graphs; None if not all attributes are plain tensors, numbers and texts."""
        if not _is_plain_class(type(data)) or not isinstance(slices, dict) or size < 2:
            return None
        rows: list[_Rows] = []
        stores: list[_Store] = []
        for store in data.stores:
            target = _store_of(data, store, slices, size, rows)
            if target is None:
                return None
            stores.append(target)
        layout = cls(data, stores, rows)
        first = layout.graph(0)
        for target, store in zip(stores, first.stores, strict=True):
            target.has_batch = hasattr(store, "can_infer_num_nodes") and store.can_infer_num_nodes
            if target.has_batch and target.nodes is None:
                return None
            if any(layout._nodes.get(key) is None for attr in target.attributes for key in attr.node_stores):
                return None
        return layout

    def graph(self, index: int) -> Any:
        """One graph, as ``InMemoryDataset.get`` returns it: its tensors are views."""
        data = copy.copy(self._empty_graph)
        for store, out in zip(self._stores, data.stores, strict=True):
            mapping = out._mapping  # setting attributes one by one is slow
            for attr in store.attributes:
                if isinstance(attr.values, torch.Tensor):
                    start, length = attr.rows.starts.item(index), attr.rows.lengths.item(index)
                    mapping[attr.name] = attr.values.narrow(attr.dim, start, length)
                else:
                    mapping[attr.name] = attr.values[index]
            if store.num_nodes is not None:
                out.num_nodes = int(store.num_nodes.lengths[index])
        return data

    def collate(self, ids: Int64, follow_batch: Collection[str] = (), exclude_keys: Collection[str] = ()) -> Any:
        """A ``Batch`` equal to ``Batch.from_data_list`` of the graphs ``ids`` (int64)."""
        batch = copy.copy(self._empty_batch)
        rows = {stored: _Rows(stored.lengths[ids], stored.starts[ids]) for stored in self._rows}
        nodes = {key: None if stored is None else rows[stored] for key, stored in self._nodes.items()}
        batch._slice_dict, batch._inc_dict = {}, {}
        for store, out in zip(self._stores, batch.stores, strict=True):
            attributes = [
                _gather(attr, ids, rows[attr.rows])
                for attr in store.attributes
                if attr.name not in exclude_keys and attr.name != "ptr"
            ]
            if store.num_nodes is not None and "num_nodes" not in exclude_keys:
                counts = rows[store.num_nodes]
                attributes.append(_Attribute("num_nodes", counts.lengths.tolist(), counts))
            own_nodes = nodes[store.key] if store.has_batch else None
            filled = _fill_store(out, attributes, nodes, own_nodes, follow_batch)
            for entries, filled_entries in zip((batch._slice_dict, batch._inc_dict), filled, strict=True):
                if store.key is None:
                    entries.update(filled_entries)
                elif filled_entries:
                    entries[store.key] = filled_entries
        batch._num_graphs = len(ids)
        return batch


def _gather(attr: _Attribute, ids: Int64, rows: _Rows) -> _Attribute:
    values, dim = attr.values, attr.dim
    if not isinstance(values, torch.Tensor):
        values = [values[index] for index in ids.tolist()]
    elif int(rows.offsets[-1]) * (values.nbytes // max(1, values.size(dim))) >= _LARGE_GRAPH * len(ids):
        slices = zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True)
        values = torch.cat([values.narrow(dim, start, length) for start, length in slices], dim=dim)
    else:
        values = values.index_select(dim, rows.index)
    return _Attribute(attr.name, values, rows, dim, attr.node_stores)


def _store_of(data: Any, store: Any, slices: dict[Any, Any], size: int, all_rows: list[_Rows]) -> _Store | None:
    """The attributes of a store; None if one of them is not plain. ``all_rows`` are those of all attributes."""
    from torch_geometric.data.storage import EdgeStorage

    key = store._key
    is_edges = key is not None and isinstance(store, EdgeStorage)
    own_slices = (
        slices.get(key, {}) if key is not None else {name: slices[name] for name in slices if name in store}
    )
    result = _Store(key)
    for name, cuts in own_slices.items():
        values = store.get(name)
        rows = _rows_of(cuts, size, all_rows)
        if not isinstance(name, str) or name == "num_nodes" or rows is None:
            return None
        if isinstance(values, list):
            if not all(type(text) is str for text in values) or rows.lengths.tolist() != [1] * len(values):
                return None
            result.attributes.append(_Attribute(name, values, rows))
            continue
        if not _is_plain_tensor(values) or values.dim() == 0 or "batch" in name:
            return None
        dim = data.__cat_dim__(name, values, store) % values.dim()
        if int((rows.starts + rows.lengths).max()) > values.size(dim):
            return None
        node_stores: tuple[Any, ...] = ()
        if "index" in name or (key is None and name == "face"):  # by PyG's rule, numbers of nodes
            node_stores = (None,) if key is None else (key[0], key[-1]) if is_edges else ()
        if node_stores and (values.dtype not in _INDEX_DTYPES or values.dim() > 2):
            return None
        if len(node_stores) > 1 and (values.dim() != 2 or values.size(0) != 2):
            return None
        result.attributes.append(_Attribute(name, values, rows, dim, node_stores))
    if "_num_nodes" in store.__dict__:
        counts = store.__dict__["_num_nodes"]
        if len(counts) != size or not all(type(count) is int and count >= 0 for count in counts):
            return None
        result.num_nodes = _Rows(np.array(counts, np.int64))
        all_rows.append(result.num_nodes)
    return result


def _rows_of(cuts: Any, size: int, all_rows: list[_Rows]) -> _Rows | None:
    """The rows of each graph; attributes with equal slices share them."""
    if type(cuts) is not torch.Tensor or cuts.dim() != 1 or len(cuts) != size + 1 or cuts.is_floating_point():
        return None
    edges = cuts.numpy().astype(np.int64, copy=False)
    lengths = np.diff(edges)
    if edges[0] < 0 or lengths.min() < 0:
        return None
    for rows in all_rows:
        if np.array_equal(rows.starts, edges[:-1]) and np.array_equal(rows.lengths, lengths):
            return rows
    all_rows.append(_Rows(lengths, edges[:-1]))
    return all_rows[-1]


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
