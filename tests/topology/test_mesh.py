"""Peers along the other dimensions of a mesh read the same samples."""

import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from tests.topology.test_detect import group

from rankfeed.errors import TopologyError
from rankfeed.topology import Topology

pytestmark = pytest.mark.usefixtures("clean")


def mesh_of(rank, shape, names):
    """What from_mesh asks of a DeviceMesh, as rank sees it."""
    members = np.arange(np.prod(shape)).reshape(shape)
    where = [int(axis) for axis in np.argwhere(members == rank).ravel()]
    return SimpleNamespace(mesh=members, mesh_dim_names=names, get_coordinate=lambda: where or None)


def stand_at(monkeypatch, rank, size, local_size):
    monkeypatch.setitem(sys.modules, "torch.distributed", group(rank, size))
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local_size, "LOCAL_WORLD_SIZE": local_size}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


NAMES = ("pp", "dp", "cp", "tp")
SHAPE = (2, 3, 2, 2)


@pytest.mark.parametrize(
    ("dims", "rank_of", "world_size"),
    [
        ("dp", lambda pp, dp, cp, tp: dp, 3),
        (["dp"], lambda pp, dp, cp, tp: dp, 3),
        (("dp", "cp"), lambda pp, dp, cp, tp: dp * 2 + cp, 6),
        (("cp", "dp"), lambda pp, dp, cp, tp: cp * 3 + dp, 6),
        (NAMES, lambda pp, dp, cp, tp: ((pp * 3 + dp) * 2 + cp) * 2 + tp, 24),
    ],
)
@pytest.mark.parametrize("local_size", [1, 2, 4, 8, 12, 24])
def test_from_mesh_ranks_are_row_major_over_the_selected_mesh_dimensions(
    monkeypatch, dims, rank_of, world_size, local_size
):
    seen = Counter()
    for rank in range(24):
        stand_at(monkeypatch, rank, 24, local_size)
        mesh = mesh_of(rank, SHAPE, NAMES)
        topology = Topology.from_mesh(mesh, dims)
        assert topology.rank == rank_of(*mesh.get_coordinate())
        assert (topology.world_size, topology.launcher) == (world_size, "mesh")
        seen[topology.rank] += 1
    assert seen == Counter(dict.fromkeys(range(world_size), 24 // world_size))


def test_from_mesh_local_ranks_count_the_distinct_mesh_coordinates_on_each_node(monkeypatch):
    seen = []
    for rank in range(8):
        stand_at(monkeypatch, rank, 8, 4)
        seen.append(Topology.from_mesh(mesh_of(rank, (4, 2), ("dp", "tp")), "dp"))
    assert [(t.rank, t.local_rank, t.local_world_size, t.node, t.num_nodes) for t in seen] == [
        (0, 0, 2, 0, 2), (0, 0, 2, 0, 2), (1, 1, 2, 0, 2), (1, 1, 2, 0, 2),
        (2, 0, 2, 1, 2), (2, 0, 2, 1, 2), (3, 1, 2, 1, 2), (3, 1, 2, 1, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ("fsdp", "no dimension 'fsdp'"),
        (["dp", "fsdp"], "no dimension 'fsdp'"),
        ((), "name each dimension once"),
        (("dp", "dp"), "name each dimension once"),
    ],
)
def test_from_mesh_with_an_invalid_dimension_raises_topology_error_listing_the_mesh_dimensions(dims, message):
    with pytest.raises(TopologyError, match=message) as caught:
        Topology.from_mesh(mesh_of(0, (2, 2), ("dp", "tp")), dims)
    assert "'dp', 'tp'" in str(caught.value)


def test_from_mesh_without_mesh_dim_names_raises_topology_error():
    with pytest.raises(TopologyError, match="mesh_dim_names"):
        Topology.from_mesh(mesh_of(0, (2, 2), None), "dp")


def test_from_mesh_in_a_process_outside_the_mesh_raises_topology_error():
    with pytest.raises(TopologyError, match="not part of the mesh"):
        Topology.from_mesh(mesh_of(7, (2, 2), ("dp", "tp")), "dp")
