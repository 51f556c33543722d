"""Graphs joined to a batch, where all they hold are plain tensors, numbers and texts.

``Batch.from_data_list`` asks each graph for the increment of each attribute and adds it to each tensor; here
tensors are joined first, and what has to be added is added to all of them at once. What comes out is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rankfeed.sources.pyg.layout import NODE_KEYS, Int64, is_plain, offsets_of


def joined(
    graphs: Sequence[Any], follow_batch: Collection[str] = (), exclude_keys: Collection[str] = ()
) -> Any | None:
    """A ``Batch`` equal to ``Batch.from_data_list``, or None if only PyG itself can join these graphs.

    Args:
        graphs: at least one.
        follow_batch: attributes that get a ``<name>_batch`` and ``<name>_ptr``.
        exclude_keys: attributes that are left out.
    """
    kind: Any = type(graphs[0])
    if not _is_plain(kind) or any(type(graph) is not kind for graph in graphs):
        return None
    stored = [graph.stores[0]._mapping for graph in graphs]
    names = list(stored[0])
    if any(list(each) != names for each in stored):
        return None
    nodes = _nodes(stored)
    batch = copy.copy(_empty(kind))
    out = batch.stores[0]
    slices: dict[str, Any] = {}
    shifts: dict[str, Any] = {}
    for name in names:
        if name in exclude_keys or name == "ptr":
            continue
        values = [each[name] for each in stored]
        if name == "num_nodes":
            if nodes is None:
                return None
            out._num_nodes, out.num_nodes = values, sum(values)
            continue
        made = _attribute(name, values, nodes)
        if made is None:
            return None
        out[name], offsets, shifts[name] = made
        slices[name] = torch.from_numpy(offsets)
        if name in follow_batch:
            out[f"{name}_batch"] = torch.from_numpy(np.repeat(np.arange(len(graphs)), np.diff(offsets)))
            out[f"{name}_ptr"] = torch.from_numpy(offsets.copy())
    if graphs[0].stores[0].can_infer_num_nodes:
        if nodes is None:
            return None
        out.batch = torch.from_numpy(np.repeat(np.arange(len(graphs)), nodes))
        out.ptr = torch.from_numpy(offsets_of(nodes))
    batch._num_graphs, batch._slice_dict, batch._inc_dict = len(graphs), slices, shifts
    return batch


def _attribute(name: str, values: list[Any], nodes: Int64 | None) -> tuple[Any, Int64, Any] | None:
    """The values of all graphs, where each starts, and by how much each was shifted; None where not plain."""
    count = len(values)
    first, none = values[0], torch.zeros(count, dtype=torch.int64)
    numbers_nodes = "index" in name or name == "face"
    if isinstance(first, str):
        return (values, np.arange(count + 1), None) if all(type(each) is str for each in values) else None
    if isinstance(first, (int, float)):
        return (torch.tensor(values), np.arange(count + 1), none) if not numbers_nodes else None
    if "batch" in name or not all(map(_is_simple, values)):
        return None
    if first.dim() == 0:
        return (torch.stack(values), np.arange(count + 1), none) if not numbers_nodes else None
    dim = -1 if numbers_nodes else 0
    if any(each.dim() != first.dim() for each in values):
        return None  # PyG has an error for it
    lengths = np.array([each.size(dim) for each in values], np.int64)
    together = torch.cat(values, dim=dim)
    if not numbers_nodes:
        return together, offsets_of(lengths), none
    if nodes is None or together.dtype not in (torch.int32, torch.int64):
        return None
    if any(each.dtype != first.dtype for each in values):
        return None
    shift = offsets_of(nodes)[:-1]
    together += torch.from_numpy(np.repeat(shift, lengths)).to(together.dtype)
    return together, offsets_of(lengths), torch.from_numpy(shift)


def _nodes(stored: Sequence[dict[str, Any]]) -> Int64 | None:
    """Nodes of each graph, told as PyG tells them; None where it would guess."""
    first = stored[0]
    if "num_nodes" in first:
        counts = [each["num_nodes"] for each in stored]
        return np.array(counts, np.int64) if all(type(each) is int and each >= 0 for each in counts) else None
    named = [name for name in first if name in NODE_KEYS] + [name for name in first if "node" in name]
    for name in named:
        if all(type(each[name]) is torch.Tensor and each[name].dim() > 0 for each in stored):
            dim = -1 if "index" in name else 0
            return np.array([each[name].size(dim) for each in stored], np.int64)
        if any(isinstance(each[name], torch.Tensor) for each in stored) or not isinstance(
            first[name], (str, list)
        ):
            return None
    return None


def _is_simple(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and value.is_cpu
        and not value.requires_grad
    )


@lru_cache(maxsize=64)
def _is_plain(kind: type) -> bool:
    from torch_geometric.data import Data

    return issubclass(kind, Data) and is_plain(kind)


@lru_cache(maxsize=64)
def _empty(kind: type) -> Any:
    from torch_geometric.data import Batch

    return Batch(_base_cls=kind)
