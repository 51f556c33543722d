"""Joining graph objects to a batch, if their attributes are plain tensors, numbers and texts.

``Batch.from_data_list`` asks each graph for the increment of each attribute and adds it to each tensor. Here
tensors are joined first, and increments are added to all of them at once. The result is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rankfeed.sources.pyg.layout import NODE_KEYS, is_plain_class, is_plain_tensor
from rankfeed.sources.source import Int64, starts_of


def join_graphs(
    graphs: Sequence[Any], follow_batch: Collection[str] = (), exclude_keys: Collection[str] = ()
) -> Any | None:
    """A ``Batch`` equal to ``Batch.from_data_list``, or None if only PyG can join these graphs (at least one)."""
    kind: Any = type(graphs[0])
    if not _is_plain_data(kind) or any(type(graph) is not kind for graph in graphs):
        return None
    stored = [graph.stores[0]._mapping for graph in graphs]
    names = list(stored[0])
    if any(list(each) != names for each in stored):
        return None
    nodes = _node_counts(stored)
    batch = copy.copy(_empty_batch(kind))
    out = batch.stores[0]
    slices: dict[str, Any] = {}
    increments: dict[str, Any] = {}
    for name in names:
        if name in exclude_keys or name == "ptr":
            continue
        values = [each[name] for each in stored]
        if name == "num_nodes":
            if nodes is None:
                return None
            out._num_nodes, out.num_nodes = values, sum(values)
            continue
        joined = _join_attribute(name, values, nodes)
        if joined is None:
            return None
        out[name], offsets, increments[name] = joined
        slices[name] = torch.from_numpy(offsets)
        if name in follow_batch:
            out[f"{name}_batch"] = torch.from_numpy(np.repeat(np.arange(len(graphs)), np.diff(offsets)))
            out[f"{name}_ptr"] = torch.from_numpy(offsets.copy())
    if graphs[0].stores[0].can_infer_num_nodes:
        if nodes is None:
            return None
        out.batch = torch.from_numpy(np.repeat(np.arange(len(graphs)), nodes))
        out.ptr = torch.from_numpy(starts_of(nodes))
    batch._num_graphs, batch._slice_dict, batch._inc_dict = len(graphs), slices, increments
    return batch


def _join_attribute(name: str, values: list[Any], nodes: Int64 | None) -> tuple[Any, Int64, Any] | None:
    """Values of all graphs, the start of each, and the increment of each; None if they are not plain."""
    count = len(values)
    first, no_increments = values[0], torch.zeros(count, dtype=torch.int64)
    is_index = "index" in name or name == "face"
    if isinstance(first, str):
        return (values, np.arange(count + 1), None) if all(type(each) is str for each in values) else None
    if isinstance(first, (int, float)):
        return (torch.tensor(values), np.arange(count + 1), no_increments) if not is_index else None
    if "batch" in name or not all(is_plain_tensor(each) and each.is_cpu for each in values):
        return None
    if first.dim() == 0:
        return (torch.stack(values), np.arange(count + 1), no_increments) if not is_index else None
    dim = -1 if is_index else 0
    if any(each.dim() != first.dim() for each in values):
        return None  # PyG has an error for it
    lengths = np.array([each.size(dim) for each in values], np.int64)
    joined = torch.cat(values, dim=dim)
    if not is_index:
        return joined, starts_of(lengths), no_increments
    if nodes is None or joined.dtype not in (torch.int32, torch.int64):
        return None
    if any(each.dtype != first.dtype for each in values):
        return None
    increments = starts_of(nodes)[:-1]
    joined += torch.from_numpy(np.repeat(increments, lengths)).to(joined.dtype)
    return joined, starts_of(lengths), torch.from_numpy(increments)


def _node_counts(stored: Sequence[dict[str, Any]]) -> Int64 | None:
    """Nodes of each graph, by PyG's rules; None if PyG would guess."""
    first = stored[0]
    if "num_nodes" in first:
        counts = [each["num_nodes"] for each in stored]
        return np.array(counts, np.int64) if all(type(each) is int and each >= 0 for each in counts) else None
    named = [name for name in first if name in NODE_KEYS] + [name for name in first if "node" in name]
    for name in named:
        if all(type(each[name]) is torch.Tensor and each[name].dim() > 0 for each in stored):
            dim = -1 if "index" in name else 0
            return np.array([each[name].size(dim) for each in stored], np.int64)
        has_tensors = any(isinstance(each[name], torch.Tensor) for each in stored)
        if has_tensors or not isinstance(first[name], (str, list)):
            return None
    return None


@lru_cache(maxsize=64)
def _is_plain_data(kind: type) -> bool:
    from torch_geometric.data import Data

    return issubclass(kind, Data) and is_plain_class(kind)


@lru_cache(maxsize=64)
def _empty_batch(kind: type) -> Any:
    from torch_geometric.data import Batch

    return Batch(_base_cls=kind)
