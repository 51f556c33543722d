"""A Topology is a few integers that fit together, wherever it travels."""

import pickle
import sys
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.jobs import run_python

from rankfeed.errors import ArgumentError, TopologyError
from rankfeed.topology import Topology


@st.composite
def valid(draw):
    world = draw(st.integers(1, 10**6))
    local, nodes = draw(st.integers(1, world)), draw(st.integers(1, world))
    return {
        "rank": draw(st.integers(0, world - 1)),
        "world_size": world,
        "local_rank": draw(st.integers(0, local - 1)),
        "local_world_size": local,
        "node": draw(st.integers(0, nodes - 1)),
        "num_nodes": nodes,
        "launcher": draw(st.sampled_from(["single", "torchrun", "mesh"])),
    }


@given(valid())
def test_consistent_topology_fields_are_kept_and_survive_pickle(values):
    topology = Topology(**values)
    assert asdict(topology) == values
    again = pickle.loads(pickle.dumps(topology))
    assert again == topology
    assert hash(again) == hash(topology)


@given(
    valid(), st.sampled_from([("rank", "world_size"), ("local_rank", "local_world_size"), ("node", "num_nodes")])
)
def test_a_rank_or_node_index_outside_its_count_raises_topology_error(values, pair):
    index, count = pair
    for bad in (-1, values[count], values[count] + 1):
        with pytest.raises(TopologyError, match=f"{index} is"):
            Topology(**{**values, index: bad})


@given(valid(), st.sampled_from(["local_world_size", "num_nodes"]))
def test_a_local_world_size_or_node_count_above_the_world_size_raises_topology_error(values, part):
    with pytest.raises(TopologyError, match=part):
        Topology(**{**values, part: values["world_size"] + 1})


@pytest.mark.parametrize("name", ["rank", "world_size", "local_rank", "local_world_size", "node", "num_nodes"])
@pytest.mark.parametrize("bad", [True, False, np.True_, 1.0, np.float32(1), "1", None])
def test_topology_fields_that_are_not_integers_raise_argument_error(name, bad):
    with pytest.raises(ArgumentError, match=f"invalid {name}"):
        Topology(**{name: bad})


@pytest.mark.parametrize("count", ["world_size", "local_world_size", "num_nodes"])
@pytest.mark.parametrize("bad", [0, -1])
def test_counts_below_one_raise_topology_error(count, bad):
    with pytest.raises(TopologyError, match=f"{count} is not positive"):
        Topology(**{count: bad})


@pytest.mark.parametrize("bad", ["", None, 3])
def test_an_invalid_launcher_name_raises_argument_error(bad):
    with pytest.raises(ArgumentError, match="launcher"):
        Topology(launcher=bad)


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64])
def test_numpy_integers_in_a_topology_become_python_ints(kind):
    topology = Topology(kind(1), kind(2), kind(1), kind(2))
    assert topology == Topology(1, 2, 1, 2)
    assert {type(topology.rank), type(topology.world_size)} == {int}


def test_assigning_to_a_topology_field_raises_attribute_error():
    with pytest.raises(AttributeError):
        Topology().rank = 1


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (2, 3)])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_global_rank_numbers_dataloader_workers_within_their_rank(monkeypatch, rank, world_size, num_workers):
    topology = Topology(rank, world_size)
    asked = Counter()
    for worker in range(num_workers):
        data = SimpleNamespace(get_worker_info=lambda w=worker: SimpleNamespace(id=w, num_workers=num_workers))
        monkeypatch.setitem(sys.modules, "torch.utils.data", data)
        assert Topology.worker() == (worker, num_workers)
        assert topology.global_world_size == world_size * num_workers
        asked[topology.global_rank] += 1
    assert asked == Counter(range(rank * num_workers, (rank + 1) * num_workers))
    monkeypatch.setitem(sys.modules, "torch.utils.data", SimpleNamespace(get_worker_info=lambda: None))
    assert (topology.worker(), topology.global_rank, topology.global_world_size) == ((0, 1), rank, world_size)


def test_topology_detect_imports_neither_torch_nor_mpi4py():
    script = (
        "import sys; from rankfeed.topology import Topology; t = Topology.detect(); t.global_rank; "
        "print(sorted({'torch', 'mpi4py'} & set(sys.modules)))"
    )
    assert run_python(script).strip() == "[]"


def test_a_rank_given_as_text_raises_argument_error_with_a_remedy() -> None:
    with pytest.raises(ArgumentError, match=r"(?s)invalid rank.*an integer\n.*'0'.*instead of text: rank=0"):
        Topology(rank="0")  # type: ignore[arg-type]
