"""The rank is found late, and travels to workers; who starts the ranks does not decide it for them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from tests.loading.feeds import Memory
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data._utils import worker

from rankfeed.loading import DistributedBatchSampler, DistributedSampler, Loader, split

EVERYTHING = [
    lambda: Loader(Memory(9), 2),
    lambda: DistributedSampler(9, 2),
    lambda: DistributedBatchSampler(9, 2),
    lambda: split(range(9)),
]
each_kind = pytest.mark.parametrize("make", EVERYTHING, ids=["loader", "sampler", "batch-sampler", "split"])

#: The only task of a Slurm step.
STEP = {
    **dict.fromkeys(("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
    **dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_STEP_NUM_NODES"), "1"),
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def become(patch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", str(world_size))


@contextmanager
def in_group(rank: int, world_size: int) -> Iterator[None]:
    """In a process group of torch's own "fake" backend: one that has no other members to wait for."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Be another process, as a fork or one that was spawned is."""
    patch.setattr(os, "getpid", lambda: -1)


def place(feed: Any) -> tuple[int, int]:
    return feed.topology.rank, feed.topology.world_size


@each_kind
def test_a_detected_rank_is_pickled_to_dataloader_workers(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = make()
    become(monkeypatch, 2, 3)
    travelled = pickle.dumps(feed)
    become(monkeypatch, 0, 1)
    assert pickle.loads(travelled).topology.rank == 2, "a copy in the same process"
    assert feed.topology.rank == 0
    elsewhere(monkeypatch)
    monkeypatch.setattr(worker, "_worker_info", SimpleNamespace(id=0, num_workers=1))
    assert pickle.loads(travelled).topology.rank == 2


@each_kind
def test_a_detected_rank_is_pickled_to_a_process_without_launcher_variables(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        become(patch, 2, 3)
        travelled = pickle.dumps(make())
    elsewhere(monkeypatch)
    assert place(pickle.loads(travelled)) == (2, 3)


@each_kind
def test_the_rank_of_a_process_group_is_pickled_to_child_processes(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, 0, 1)
    feed = make()
    with in_group(1, 4):
        travelled = pickle.dumps(feed)
    elsewhere(monkeypatch)
    assert place(pickle.loads(travelled)) == (1, 4)


@each_kind
@pytest.mark.parametrize("asked", [False, True], ids=["unasked", "asked"])
@pytest.mark.parametrize("launched", [{"RANK": "0", "WORLD_SIZE": "1"}, STEP], ids=["torchrun", "srun"])
def test_ranks_started_by_one_launcher_task_use_the_rank_of_their_process_group(
    make: Any, asked: bool, launched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    feed = make()
    if asked:
        assert place(feed) == (0, 1)  # as a length does that a scheduler is given
    travelled = pickle.dumps(feed)
    for rank in range(2):
        with in_group(rank, 2):
            assert place(pickle.loads(travelled)) == (rank, 2), "spawned"
            assert place(feed) == (rank, 2), "the process that asked is a rank itself now"
            monkeypatch.setattr(worker, "_worker_info", SimpleNamespace(id=0, num_workers=1))
            assert place(feed) == (rank, 2), "in a worker that was forked"
            in_worker = pickle.dumps(feed)
        elsewhere(monkeypatch)
        assert place(pickle.loads(in_worker)) == (rank, 2), "in a worker that was spawned"
        monkeypatch.undo()
        for name, value in launched.items():
            monkeypatch.setenv(name, value)


@each_kind
def test_a_loader_unpickled_in_a_spawned_rank_detects_the_rank_from_its_environment(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unasked = pickle.dumps(make())  # as torch.multiprocessing.spawn does it, from a process that is no rank
    become(monkeypatch, 0, 1)
    feed = make()
    assert iter(feed) is not None
    assert place(feed) == (0, 1)
    travelled = pickle.dumps(feed)
    become(monkeypatch, 1, 2)
    assert place(feed) == (0, 1), "a process looks once"
    assert place(pickle.loads(unasked)) == (1, 2)
    elsewhere(monkeypatch)
    assert place(pickle.loads(travelled)) == (1, 2)
    assert place(feed) == (1, 2)


@each_kind
def test_topology_read_before_the_launcher_variables_are_set_is_detected_again(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = make()
    assert place(feed) == (0, 1)  # as a length does that a scheduler is given
    assert iter(feed) is not None
    become(monkeypatch, 1, 2)
    assert place(feed) == (1, 2)
    alone = type(feed.topology)()
    feed = make()
    feed._topology.given = alone
    assert feed.topology == pickle.loads(pickle.dumps(feed)).topology == alone
