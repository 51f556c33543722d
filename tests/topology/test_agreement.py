"""What the processes of a launch say of themselves, and what of it cannot be."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rankfeed import Topology
from rankfeed.topology.agreement import Seen, contradictions


def world(*per_node: int, host: str = "h", told: bool = True) -> list[Seen]:
    """A launch of so many processes on each node."""
    places = [(node, local, size) for node, size in enumerate(per_node) for local in range(size)]
    return [
        Seen(
            f"{host}{node}",
            100 + rank,
            Topology(rank, len(places), local, size, node, len(per_node), "slurm"),
            local_told=told,
            node_told=told,
            data="d",
        )
        for rank, (node, local, size) in enumerate(places)
    ]


def moved(seen: Sequence[Seen], which: int, /, **places: int | str) -> list[Seen]:
    """One of them says something else of its place."""
    one = seen[which]
    assert one.topology is not None
    return [*seen[:which], replace(one, topology=replace(one.topology, **places)), *seen[which + 1 :]]


@pytest.mark.parametrize("per_node", [(1,), (4,), (2, 2), (3, 1), (1, 1, 1), (2, 5, 1)])
def test_a_launch_of_any_shape_agrees(per_node: tuple[int, ...]) -> None:
    assert contradictions(world(*per_node)) == []


def test_several_nodes_on_one_host_agree() -> None:
    assert contradictions([replace(one, host="vm") for one in world(2, 2)]) == []


def test_virtual_local_ranks_agree() -> None:
    seen = world(3)
    assert contradictions([moved(seen, rank, local_rank=0)[rank] for rank in range(3)]) == []


def test_places_that_were_worked_out_contradict_nobody() -> None:
    # Two processes on one host and one on the other, where MPI says no node.
    seen = world(2, 1, told=False)
    assert contradictions(moved(seen, 2, node=2, num_nodes=3)) == []


@pytest.mark.parametrize("rank", range(1, 4))
def test_a_rank_that_did_not_come_is_named(rank: int) -> None:
    seen = [replace(one, local_told=False) for one in world(2, 2)]
    assert contradictions([one for one in seen if one is not seen[rank]]) == [f"rank {rank} did not come"]


WRONG = {
    "rank twice": (
        moved(world(2, 2), 3, rank=0),
        ["rank 0 is there 2 times: h0, pid 100; h1, pid 103", "rank 3 did"],
    ),
    "world size": (moved(world(2, 2), 3, world_size=5), ["world sizes differ", "rank 4 did not come"]),
    "launcher": (
        moved(world(2, 2), 1, launcher="mpich"),
        ["launchers differ: slurm says rank 0 (h0, pid 100), mpich"],
    ),
    "local rank": (moved(world(3), 2, local_rank=1), ["local rank is there more than once: 1"]),
    "local size": (moved(world(2, 2), 1, local_world_size=3), ["on node 0 (h0) there are 2 processes", "2 or 3"]),
    "number of nodes": (moved(world(2, 2), 1, num_nodes=3), ["numbers of nodes differ"]),
    "node": (
        moved(moved(world(1, 1), 1, node=0), 1, local_world_size=1),
        ["node 0 is on 2 hosts: h0, h1"],
    ),
    "data": ([replace(one, data=f"d{one.host}") for one in world(1, 1)], ["data sets differ"]),
    "problem": ([*world(1, 1), Seen("h9", 7, problem="no size")], ["a process (h9, pid 7) cannot go on: no size"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_named(case: str) -> None:
    seen, words = WRONG[case]
    said = "\n".join(contradictions(seen))
    assert all(word in said for word in words), said
    assert contradictions(seen[::-1])
