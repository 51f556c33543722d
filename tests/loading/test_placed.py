"""The rank is found late, and travels to workers; who starts the ranks does not decide it for them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tests.loading.feeds import Memory

from rankfeed.loading import DistributedBatchSampler, DistributedSampler, Loader, split

EVERYTHING = [
    lambda: Loader(Memory(9), 2),
    lambda: DistributedSampler(9, 2),
    lambda: DistributedBatchSampler(9, 2),
    lambda: split(range(9)),
]
each_kind = pytest.mark.parametrize("make", EVERYTHING, ids=["loader", "sampler", "batch-sampler", "split"])


def become(patch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", str(world_size))


@each_kind
def test_a_rank_that_is_known_travels(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = make()
    become(monkeypatch, 2, 3)
    travelled = pickle.dumps(feed)
    become(monkeypatch, 0, 1)
    assert pickle.loads(travelled).topology.rank == 2
    assert feed.topology.rank == 0


@each_kind
def test_ranks_started_with_a_pickle_of_it_find_their_own(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    travelled = pickle.dumps(make())  # as torch.multiprocessing.spawn does it, from a process that is no rank
    shares = []
    for rank in range(3):
        with monkeypatch.context() as patch:
            become(patch, rank, 3)
            topology = pickle.loads(travelled).topology
            shares.append((topology.rank, topology.world_size))
    assert shares == [(0, 3), (1, 3), (2, 3)]


@each_kind
def test_it_is_found_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, 1, 2)
    feed = make()
    assert iter(feed) is not None
    assert feed.topology.rank == 1
    become(monkeypatch, 0, 2)
    assert feed.topology.rank == 1
