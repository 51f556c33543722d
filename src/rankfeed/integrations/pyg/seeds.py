"""Seed nodes for loaders of PyTorch Geometric that sample around them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rankfeed._util.validate import invalid
from rankfeed.errors import ArgumentError, safe_repr
from rankfeed.loading import DistributedBatchSampler
from rankfeed.plan import Tail
from rankfeed.sources.extras import need
from rankfeed.storage import digest_of
from rankfeed.topology import Topology


class NodeSeeds(DistributedBatchSampler):
    """This rank's equal share of the seed nodes, for ``NeighborLoader(..., batch_sampler=NodeSeeds(...))``.

    Every seed is drawn once per epoch over all ranks, in the same number of steps on every rank. After the last
    step of an epoch the next one begins, in another order. ``set_epoch``, ``state_dict`` and
    ``load_state_dict`` are those of :class:`rankfeed.DistributedBatchSampler`.

    It works with every loader that has ``input_nodes`` (``NeighborLoader``, ``HGTLoader``, ``NodeLoader``), and
    runs in the process that iterates it, for any number of workers.

    Args:
        input_nodes: those of the loader: a tensor or list of indices, a boolean mask, in a heterogeneous
            graph ``(node type, indices or mask or None)`` or a node type; None for all nodes.
        batch_size: seeds of this rank's batches.
        data: the graph; needed only where ``input_nodes`` means all nodes (of a type).
        shuffle: whether to shuffle, by a keyed bijection that takes no memory.
        seed: of the order.
        tail: how an epoch ends (see :class:`rankfeed.Schedule`).
        topology: rank and world size; detected at the first ``len`` or ``iter`` if left out.

    Raises:
        ArgumentError: ``input_nodes`` is none of these.
        PlanError: no seeds (at once), or fewer seeds than ranks (at the first ``len`` or ``iter``).

    Examples:
        >>> import torch, rankfeed as rf
        >>> train_mask = torch.tensor([True, False, True, True, True])
        >>> seeds = NodeSeeds(train_mask, 2, shuffle=False, topology=rf.Topology(rank=1, world_size=2))
        >>> list(seeds)  # indices into the seeds, as the loader expects
        [[2, 3]]
        >>> seeds.nodes[[2, 3]]
        array([3, 4])
    """

    def __init__(
        self,
        input_nodes: Any,
        batch_size: int = 1,
        *,
        data: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "even",
        topology: Topology | None = None,
    ) -> None:
        kind, nodes = _seeds(input_nodes, data)
        super().__init__(len(nodes), batch_size, shuffle=shuffle, seed=seed, tail=tail, topology=topology)
        #: The seeds, int64, in the loader's order.
        self.nodes = nodes
        # A checkpoint is valid for these seeds only.
        self._fingerprint = digest_of(str(kind or "").encode(), np.ascontiguousarray(nodes).data)


def _seeds(input_nodes: Any, data: Any) -> tuple[str | None, np.ndarray[Any, np.dtype[np.int64]]]:
    """The node type, if any, and the nodes, as PyG's loaders read them."""
    import torch

    kind = None
    if isinstance(input_nodes, str):
        kind, input_nodes = input_nodes, None
    elif isinstance(input_nodes, (tuple, list)) and len(input_nodes) == 2 and isinstance(input_nodes[0], str):
        kind, input_nodes = input_nodes
    if input_nodes is None:
        return kind, np.arange(_count(kind, data))
    try:
        nodes = torch.as_tensor(input_nodes)
    except Exception:
        raise invalid(
            "input_nodes", "indices, a boolean mask, or (node type, either of these)", input_nodes
        ) from None
    if nodes.dtype == torch.bool:
        nodes = nodes.nonzero().view(-1)
    if nodes.dim() != 1 or (nodes.numel() and (nodes.is_floating_point() or nodes.is_complex())):
        raise ArgumentError(
            "these are no seed nodes",
            expected="indices, a boolean mask, or (node type, either of these)",
            found=f"{nodes.dtype} of shape {tuple(nodes.shape)}",
        )
    return kind, nodes.cpu().numpy().astype(np.int64)


def _count(kind: str | None, data: Any) -> int:
    if data is None:
        raise ArgumentError(
            "the nodes of the graph cannot be counted without the graph",
            found=f"input_nodes={kind!r}",
            remedy="pass data=, or the nodes",
        )
    get_input_nodes = need("torch_geometric.loader.utils", extra="pyg").get_input_nodes
    try:
        _, nodes, _ = get_input_nodes(data, kind)
    except Exception as error:  # AssertionError, KeyError, TypeError or AttributeError
        raise ArgumentError(
            "the graph has no such nodes", expected="a node type of the graph", found=safe_repr(kind)
        ) from error
    return int(nodes.numel())
