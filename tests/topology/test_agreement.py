"""Reports of the processes of a launch are consistent, or the contradiction is named."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rankfeed import Topology
from rankfeed.topology.agreement import ProcessReport, find_contradictions


def world(*per_node: int, host: str = "h", known: bool = True) -> list[ProcessReport]:
    """Reports of a launch with these numbers of processes per node."""
    places = [(node, local, size) for node, size in enumerate(per_node) for local in range(size)]
    return [
        ProcessReport(
            f"{host}{node}",
            100 + rank,
            Topology(rank, len(places), local, size, node, len(per_node), "slurm"),
            local_known=known,
            node_known=known,
            data="d",
        )
        for rank, (node, local, size) in enumerate(places)
    ]


def moved(seen: Sequence[ProcessReport], which: int, /, **places: int | str) -> list[ProcessReport]:
    """The reports with another topology of one process."""
    one = seen[which]
    assert one.topology is not None
    return [*seen[:which], replace(one, topology=replace(one.topology, **places)), *seen[which + 1 :]]


@pytest.mark.parametrize("per_node", [(1,), (4,), (2, 2), (3, 1), (1, 1, 1), (2, 5, 1)])
def test_reports_of_a_consistent_launch_of_any_shape_have_no_contradictions(per_node: tuple[int, ...]) -> None:
    assert find_contradictions(world(*per_node)) == []


def test_several_nodes_on_one_host_are_no_contradiction() -> None:
    assert find_contradictions([replace(one, host="vm") for one in world(2, 2)]) == []


def test_local_rank_0_on_every_rank_is_no_contradiction() -> None:
    seen = world(3)
    assert find_contradictions([moved(seen, rank, local_rank=0)[rank] for rank in range(3)]) == []


def test_inferred_node_numbers_are_no_contradiction() -> None:
    # Two processes on one host and one on the other, where MPI says no node.
    seen = world(2, 1, known=False)
    assert find_contradictions(moved(seen, 2, node=2, num_nodes=3)) == []


@pytest.mark.parametrize("rank", range(1, 4))
def test_find_contradictions_names_a_rank_that_did_not_report(rank: int) -> None:
    seen = [replace(one, local_known=False) for one in world(2, 2)]
    assert find_contradictions([one for one in seen if one is not seen[rank]]) == [f"rank {rank} did not report"]


WRONG = {
    "rank twice": (
        moved(world(2, 2), 3, rank=0),
        ["rank 0 was reported by 2 processes: h0, pid 100; h1, pid 103", "rank 3 did"],
    ),
    "world size": (moved(world(2, 2), 3, world_size=5), ["world sizes differ", "rank 4 did not report"]),
    "launcher": (
        moved(world(2, 2), 1, launcher="mpich"),
        ["launchers differ: slurm on rank 0 (h0, pid 100), mpich"],
    ),
    "local rank": (moved(world(3), 2, local_rank=1), ["local rank exists more than once: 1"]),
    "local size": (moved(world(2, 2), 1, local_world_size=3), ["on node 0 (h0) there are 2 processes", "2 or 3"]),
    "number of nodes": (moved(world(2, 2), 1, num_nodes=3), ["numbers of nodes differ"]),
    "node": (moved(moved(world(1, 1), 1, node=0), 1, local_world_size=1), ["node 0 is on 2 hosts: h0, h1"]),
    "data": ([replace(one, data=f"d{one.host}") for one in world(1, 1)], ["datasets differ"]),
    "problem": (
        [*world(1, 1), ProcessReport("h9", 7, problem="no size")],
        ["a process (h9, pid 7) failed: no size"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_find_contradictions_describes_each_kind_of_contradiction_between_ranks(case: str) -> None:
    seen, words = WRONG[case]
    said = "\n".join(find_contradictions(seen))
    assert all(word in said for word in words), said
    assert find_contradictions(seen[::-1])
