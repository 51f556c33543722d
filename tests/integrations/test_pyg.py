"""Seed nodes in all ways that PyG takes; on ranks, killed and resumed: tests/launch/test_frameworks.py."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import rankfeed as rf
from rankfeed.errors import ArgumentError, PlanError, StateError
from rankfeed.integrations.pyg import NodeSeeds

ONE = rf.Topology()


def test_node_seeds_accept_tensors_lists_masks_and_node_types_like_pyg() -> None:
    data = Data(num_nodes=6)
    typed = HeteroData()
    typed["user"].num_nodes = 4
    mask = torch.tensor([False, True, True, False])
    for given, graph, nodes in (
        (torch.tensor([5, 2, 9]), None, [5, 2, 9]),
        ([5, 2, 9], None, [5, 2, 9]),
        (np.array([5, 2, 9]), None, [5, 2, 9]),
        (mask, None, [1, 2]),
        (("user", mask), None, [1, 2]),
        (("user", torch.tensor([3])), None, [3]),
        (None, data, list(range(6))),
        ("user", typed, list(range(4))),
        (("user", None), typed, list(range(4))),
    ):
        seeds = NodeSeeds(given, 2, data=graph, shuffle=False, topology=ONE)
        assert seeds.nodes.tolist() == nodes
        assert [place for batch in seeds for place in batch] == list(range(len(nodes)))


def test_loading_a_node_seeds_state_of_other_seeds_raises_state_error() -> None:
    state = NodeSeeds([1, 2, 3], topology=ONE).state_dict()
    NodeSeeds(torch.tensor([1, 2, 3]), topology=ONE).load_state_dict(state)
    for other in ([1, 2, 4], ("user", [1, 2, 3])):
        with pytest.raises(StateError, match="other data"):
            NodeSeeds(other, topology=ONE).load_state_dict(state)


def test_invalid_node_seeds_raise_an_error() -> None:
    with pytest.raises(ArgumentError, match="pass data="):
        NodeSeeds(None)
    with pytest.raises(ArgumentError, match="no such nodes"):
        NodeSeeds("item", data=HeteroData())
    for wrong in (torch.zeros(2, 2, dtype=torch.long), torch.rand(3)):
        with pytest.raises(ArgumentError, match="not a selection of nodes"):
            NodeSeeds(wrong)
    with pytest.raises(PlanError):
        len(NodeSeeds(torch.zeros(4, dtype=torch.bool), topology=ONE))
