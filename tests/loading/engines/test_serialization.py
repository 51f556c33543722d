"""Whatever pickles travels between processes and arrives as it was, over memory of the receiver's own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.loading.feeds import Pair, same

from rankfeed._util.workers import Channel, PeerGoneError
from rankfeed.loading.engines.messages import receive, serialize
from rankfeed.loading.engines.regions import MIN_BYTES, BorrowedRegions, RegionPool, RegionSlice


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a connection within this process."""
    ours, theirs = socket.socketpair()
    pidfd = os.pidfd_open(os.getpid())
    with ours, theirs:
        yield Channel(ours, pidfd), Channel(theirs, pidfd)
    os.close(pidfd)


class Memory:
    """Shared memory, and both sides of it within this process."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("test")
        self.pool, self.borrowed = RegionPool(self.descriptor), BorrowedRegions(self.descriptor)

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def give_back(self) -> int:
        """Return the regions that are free again; how many there are."""
        offsets = self.borrowed.take_returned()
        for each in offsets:
            self.pool.take_back(each)
        return len(offsets)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    os.close(memory.descriptor)


def sent(value: Any, memory: Memory | None = None) -> Any:
    """A value that went through a connection."""
    with channels() as (ours, theirs):
        batch = serialize(value, regions=None if memory is None else memory.pool)
        sender = threading.Thread(target=batch.send, args=(theirs,))
        sender.start()
        try:
            return receive(ours.receive(), None if memory is None else memory.borrowed)
        finally:
            sender.join()


def test_a_batch_sent_to_another_process_keeps_structure_shared_tensors_and_plain_values() -> None:
    shared = torch.arange(4)
    value = {"pair": Pair(shared, "ä"), "again": shared, "bytes": b"x" * 100_000, "none": None, "n": np.int64(3)}
    arrived = sent(value)
    assert same(arrived["pair"], value["pair"])
    assert arrived["pair"].image is arrived["again"]
    assert {**arrived, "pair": 0, "again": 0} == {**value, "pair": 0, "again": 0}


def test_received_arrays_are_writable_and_independent_of_the_sent_arrays() -> None:
    tensor = torch.zeros(100_000)
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    arrived, array = sent((tensor, read_only))
    arrived += 1
    assert not tensor.any()
    assert arrived.sum() == 100_000
    assert not array.any()


def test_large_arrays_are_in_shared_memory_and_small_ones_in_the_message(memory: Memory) -> None:
    small, large = sent((torch.ones(100), np.arange(50_000)), memory)
    assert memory.size >= large.nbytes
    assert small.tolist() == [1] * 100
    assert large.tolist() == list(range(50_000))
    small += 1
    large += 1


def test_a_batch_that_was_built_in_shared_memory_is_not_copied(memory: Memory) -> None:
    array = memory.pool.allocate((50_000,), np.dtype(np.int64))
    array[:] = 7
    array[40_000:] = 8
    arrived, part, again = sent((array, array[40_000:], torch.from_numpy(array)), memory)
    array[0] = 1  # the same memory
    assert arrived[0] == again[0] == 1
    assert part.tolist() == [8] * 10_000


def test_shared_memory_is_reused_only_after_the_received_tensor_and_its_views_are_freed(memory: Memory) -> None:
    first = sent(torch.zeros(50_000), memory)
    part = first[10:20].view(2, 5)
    weights = torch.ones(2, 5, requires_grad=True)
    loss = (part * weights).sum()  # autograd keeps the part
    del first, part
    assert memory.give_back() == 0
    second = sent(torch.ones(50_000), memory)
    loss.backward()
    assert weights.grad is not None
    assert not weights.grad.any()
    size = memory.size
    del loss, second
    assert memory.give_back() == 2
    third = sent(torch.full((50_000,), 3.0), memory)
    assert memory.size == size
    assert third.unique().tolist() == [3.0]


def test_kept_batches_stay_intact_and_their_shared_memory_is_reused_once_they_are_freed(memory: Memory) -> None:
    def twenty() -> list[torch.Tensor]:
        return [sent(torch.full((50_000,), float(number)), memory) for number in range(20)]

    expected = [[float(number)] for number in range(20)]
    kept = twenty()
    assert [array.unique().tolist() for array in kept] == expected
    size = memory.size
    del kept
    assert memory.give_back() == 20
    kept = twenty()
    assert memory.size == size
    assert [array.unique().tolist() for array in kept] == expected


def test_hundreds_of_kept_arrays_in_shared_memory_use_few_memory_mappings(memory: Memory) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:test")

    arrays = []
    for number in range(300):
        arrays.append(memory.pool.allocate((MIN_BYTES << number % 3,), np.dtype(np.uint8)))
        arrays[-1][:] = number % 251
    large = memory.pool.allocate((100_000_000,), np.dtype(np.uint8))
    large[-1] = 7
    kept = sent([*arrays, large], memory)
    assert [array[-1] for array in kept] == [*(number % 251 for number in range(300)), 7]
    assert mappings() < 10


def test_an_array_in_shared_memory_that_the_worker_still_references_is_copied_when_sent(memory: Memory) -> None:
    def filled(value: int) -> Any:
        array = memory.pool.allocate((50_000,), np.dtype(np.int64))
        array[:] = value
        return array

    kept = filled(7)
    batch = serialize(kept, regions=memory.pool)
    batch = batch._replace(buffers=memory.pool.copy_kept(batch.buffers))
    with channels() as (ours, theirs):
        batch.send(theirs)
        arrived = receive(ours.receive(), memory.borrowed)
    kept[:] = 8
    assert np.unique(arrived).tolist() == [7]
    del arrived, kept
    assert memory.give_back() == 1
    arrays = [filled(value) for value in range(5)]
    assert [np.unique(each).tolist() for each in arrays] == [[value] for value in range(5)]


def test_an_array_freed_while_its_buffers_are_copied_does_not_give_its_memory_to_a_copy(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [memory.pool.allocate((1 << 18,), np.dtype(np.uint8))]
    lent = [memory.pool.lend(kept[0][first : first + (1 << 17)].data) for first in (0, 1 << 17)]
    lend = memory.pool.lend

    def lend_and_forget(buffer: memoryview) -> Any:
        kept.clear()
        return lend(buffer)

    monkeypatch.setattr(memory.pool, "lend", lend_and_forget)
    copies = memory.pool.copy_kept([region for region in lent if region is not None])
    assert len({each.region for each in [*lent, *copies] if isinstance(each, RegionSlice)}) == 3


def test_a_peer_that_closes_its_socket_in_the_middle_of_a_message_raises_peer_gone_error() -> None:
    with channels() as (ours, theirs):
        theirs.socket.sendall((1000).to_bytes(8, "little") + b"x" * 999)
        theirs.socket.close()
        with pytest.raises(PeerGoneError):
            ours.receive()
