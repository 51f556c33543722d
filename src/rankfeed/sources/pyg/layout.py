"""Gathering batches of graphs directly from the tensors of an `InMemoryDataset`.

PyTorch Geometric stores all graphs of such a dataset in one tensor per attribute, with the start of each graph.
Its loader cuts each graph out as an object and joins the objects again; here each attribute of a batch is one
gather. The result is the same, including the entries that ``to_data_list()`` needs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rankfeed.sources.source import Int64, starts_of

#: From this many bytes per graph on, concatenating slices is faster than an index for each row (measured).
_LARGE_GRAPH = 8192
#: Attributes that tell the number of nodes if there is no ``num_nodes`` (``torch_geometric.data.storage``).
NODE_KEYS = ("x", "feat", "pos", "batch", "node_type", "n_id", "tf")


@dataclass(frozen=True, eq=False)
class _Span:
    """Start and length of each graph along a tensor: int64 [graphs] each."""

    starts: Int64
    lengths: Int64


@dataclass(frozen=True, eq=False)
class _Attribute:
    """An attribute of all graphs.

    Args:
        name: of the attribute.
        values: one tensor, or a list with a string for each graph.
        span: where the graphs are, along ``dim``.
        dim: a dimension.
        node_stores: keys of the stores whose nodes it refers to (source and target); empty for none.
    """

    name: str
    values: Any
    span: _Span
    dim: int
    node_stores: tuple[Any, ...] = ()


@dataclass(eq=False)
class _Store:
    """The attributes of a type of nodes or edges; of all, in a homogeneous graph.

    Args:
        key: of the store.
        attributes: in the order in which PyG reads them.
        num_nodes: of each graph, if the graphs have this attribute.
        has_batch: whether a batch gets ``batch`` and ``ptr``.
    """

    key: Any
    attributes: list[_Attribute] = field(default_factory=list)
    num_nodes: Int64 | None = None
    has_batch: bool = False

    @property
    def nodes(self) -> Int64 | None:
        """Number of nodes of each graph; None if it could only be guessed."""
        if self.num_nodes is not None:
            return self.num_nodes
        tensors = [each for each in self.attributes if isinstance(each.values, torch.Tensor)]
        named = [each for each in tensors if each.name in NODE_KEYS]
        named += [each for each in tensors if "node" in each.name]
        return named[0].span.lengths if named else None


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
        """The layout of ``size`` graphs, or None if only PyG can join them.

        Only PyG can join classes with an ``__inc__`` or ``__cat_dim__`` of their own, sparse and nested tensors,
        attributes that are dicts or lists of tensors, and everything else that is no plain tensor or text.
        """
        if not is_plain_class(type(data)) or not isinstance(slices, dict) or size < 2:
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
                    start, length = each.span.starts.item(number), each.span.lengths.item(number)
                    mapping[each.name] = each.values.narrow(each.dim, start, length)
                else:
                    mapping[each.name] = each.values[number]
            if store.num_nodes is not None:
                out.num_nodes = int(store.num_nodes[number])
        return data

    def collate(self, ids: Int64, follow_batch: Collection[str] = (), exclude_keys: Collection[str] = ()) -> Any:
        """A ``Batch`` equal to ``Batch.from_data_list`` of the graphs ``ids`` (int64)."""
        batch = copy.copy(self._empty_batch)
        gatherer = _Gatherer(ids)
        slice_dict: dict[Any, Any] = {}
        inc_dict: dict[Any, Any] = {}
        for store, out in zip(self._stores, batch.stores, strict=True):
            for each in store.attributes:
                if each.name in exclude_keys or each.name == "ptr":
                    continue
                offsets = torch.from_numpy(starts_of(each.span.lengths[ids]))
                out[each.name], increments = self._join(each, gatherer)
                if store.key is None:
                    slice_dict[each.name], inc_dict[each.name] = offsets, increments
                else:
                    slice_dict.setdefault(store.key, {})[each.name] = offsets
                    inc_dict.setdefault(store.key, {})[each.name] = increments
                if each.name in follow_batch:
                    out[f"{each.name}_batch"] = gatherer.graph_numbers(each.span.lengths)
                    out[f"{each.name}_ptr"] = offsets.clone()
            if store.num_nodes is not None and "num_nodes" not in exclude_keys:
                counts = store.num_nodes[ids].tolist()
                out._num_nodes = counts
                out.num_nodes = sum(counts)
            if store.has_batch:
                nodes = self._nodes[store.key]
                assert nodes is not None
                out.batch = gatherer.graph_numbers(nodes)
                out.ptr = torch.from_numpy(starts_of(nodes[ids]))
        batch._num_graphs = len(ids)
        batch._slice_dict = slice_dict
        batch._inc_dict = inc_dict
        return batch

    def _join(self, each: _Attribute, gatherer: _Gatherer) -> tuple[Any, torch.Tensor | None]:
        """An attribute of a batch, and the increment of each graph's node numbers."""
        if not isinstance(each.values, torch.Tensor):
            return [each.values[number] for number in gatherer.ids.tolist()], None
        values = gatherer.gather(each)
        if not each.node_stores:
            return values, torch.zeros(len(gatherer.ids), dtype=torch.int64)
        increments = []
        for key in each.node_stores:
            nodes = self._nodes[key]
            assert nodes is not None
            increments.append(starts_of(nodes[gatherer.ids])[:-1])
        lengths = each.span.lengths[gatherer.ids]
        for row, increment in zip(values if len(increments) > 1 else [values], increments, strict=True):
            row += torch.from_numpy(np.repeat(increment, lengths)).to(values.dtype)
        if len(increments) > 1:
            return values, torch.from_numpy(np.stack(increments, axis=1)[:, :, None])
        return values, torch.from_numpy(increments[0])


class _Gatherer:
    """Gathers attributes of the graphs of a batch; row indices are shared by attributes with the same span."""

    def __init__(self, ids: Int64) -> None:
        self.ids = ids
        self._rows: dict[_Span, torch.Tensor] = {}

    def graph_numbers(self, lengths: Int64) -> torch.Tensor:
        """The graph of the batch that each row belongs to: int64 [rows]."""
        return torch.from_numpy(np.repeat(np.arange(len(self.ids)), lengths[self.ids]))

    def gather(self, each: _Attribute) -> torch.Tensor:
        """The values of the graphs in one tensor."""
        values, dim = each.values, each.dim
        lengths = each.span.lengths[self.ids]
        row_bytes = values.nbytes // max(1, values.size(dim))
        if int(lengths.sum()) * row_bytes >= _LARGE_GRAPH * len(lengths):
            slices = zip(each.span.starts[self.ids].tolist(), lengths.tolist(), strict=True)
            return torch.cat([values.narrow(dim, start, length) for start, length in slices], dim=dim)
        index = self._rows.get(each.span)
        if index is None:
            before = np.cumsum(lengths) - lengths
            rows = np.repeat(each.span.starts[self.ids] - before, lengths)
            rows += np.arange(len(rows))
            index = self._rows[each.span] = torch.from_numpy(rows)
        gathered: torch.Tensor = values.index_select(dim, index)
        return gathered


def is_plain_class(kind: type) -> bool:
    """Whether graphs of a class are joined like PyG's own."""
    from torch_geometric.data import Data, HeteroData

    base = next((base for base in (Data, HeteroData) if issubclass(kind, base)), None)
    return base is not None and all(
        getattr(kind, name) is getattr(base, name)
        for name in ("__inc__", "__cat_dim__", "__init__", "num_nodes", "stores_as", "stores", "__setattr__")
    )


def is_plain_tensor(value: Any) -> bool:
    """Whether this is a strided tensor without gradient."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and not value.requires_grad
    )


def _store_of(data: Any, store: Any, slices: dict[Any, Any], size: int, spans: list[_Span]) -> _Store | None:
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
        if isinstance(values, list):
            if not all(type(each) is str for each in values) or span.lengths.tolist() != [1] * len(values):
                return None
            found.attributes.append(_Attribute(name, values, span, 0))
            continue
        if not is_plain_tensor(values) or values.dim() == 0 or values.device.type != "cpu":
            return None
        dim = data.__cat_dim__(name, values, store) % values.dim()
        if int((span.starts + span.lengths).max()) > values.size(dim) or "batch" in name:
            return None
        node_stores = _node_stores(key, name, is_edges)
        if node_stores and (values.dtype not in (torch.int32, torch.int64) or values.dim() > 2):
            return None
        if len(node_stores) > 1 and (values.dim() != 2 or values.size(0) != 2):
            return None
        found.attributes.append(_Attribute(name, values, span, dim, node_stores))
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


def _span_of(cuts: Any, size: int, spans: list[_Span]) -> _Span | None:
    """Where the graphs are; attributes with equal slices share a span."""
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
