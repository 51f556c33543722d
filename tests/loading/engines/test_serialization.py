"""Whatever pickles travels between processes and arrives as it was, over memory of the receiver's own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.loading.feeds import Pair, same

from rankfeed._util.workers import Channel, PeerGoneError
from rankfeed.columns.buffers import BufferPool
from rankfeed.loading.engines.process import SerializedBatch, receive, serialize


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a connection within this process."""
    ours, theirs = socket.socketpair()
    pidfd = os.pidfd_open(os.getpid())
    with ours, theirs:
        yield Channel(ours, pidfd), Channel(theirs, pidfd)
    os.close(pidfd)


def sent(value: Any, allocate: Any = np.empty) -> Any:
    """A value that went through a connection."""
    with channels() as (ours, theirs):
        sender = threading.Thread(target=serialize(value).send, args=(theirs,))
        sender.start()
        try:
            return receive(ours.receive(), ours, allocate)
        finally:
            sender.join()


@given(
    arrays.arrays(
        st.sampled_from(["float32", "int64", "bool", "uint8", "complex64", "float16"]),
        arrays.array_shapes(min_dims=0, min_side=0),
        fill=st.just(1),
    )
)
def test_arrays_and_tensors_of_any_shape_arrive_as_they_were(array: np.ndarray[Any, Any]) -> None:
    arrived, tensor = sent((array, torch.from_numpy(array.copy())))
    assert arrived.dtype == array.dtype
    assert np.array_equal(arrived, array, equal_nan=array.dtype.kind in "fc")
    assert np.array_equal(tensor.numpy(), array, equal_nan=array.dtype.kind in "fc")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4).T,
        torch.arange(10)[::3],
        torch.arange(3).expand(4, 3),
        torch.ones(2, dtype=torch.bfloat16),
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
        torch.view_as_complex(torch.ones(2, 2)).conj().imag,
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor(1.0),
        torch.empty(0, 3),
        torch.ones(5, dtype=torch.uint16),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}{tensor.stride()}",
)
def test_every_kind_of_tensor_arrives(tensor: torch.Tensor) -> None:
    arrived = sent({"tensor": tensor})["tensor"]
    assert type(arrived) is type(tensor)
    assert arrived.requires_grad == tensor.requires_grad
    assert same(arrived.detach().resolve_conj().resolve_neg(), tensor.detach().resolve_conj().resolve_neg())


def test_structure_identity_and_plain_values_are_kept() -> None:
    shared = torch.arange(4)
    value = {"pair": Pair(shared, "ä"), "again": shared, "bytes": b"x" * 100_000, "none": None, "n": np.int64(3)}
    arrived = sent(value)
    assert same(arrived["pair"], value["pair"])
    assert arrived["pair"].image is arrived["again"]
    assert {**arrived, "pair": 0, "again": 0} == {**value, "pair": 0, "again": 0}


def test_what_arrives_can_be_written_and_is_independent_of_what_was_sent() -> None:
    tensor = torch.zeros(100_000)
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    arrived, array = sent((tensor, read_only))
    arrived += 1
    assert not tensor.any()
    assert arrived.sum() == 100_000
    assert not array.any()


def test_memory_is_used_again_once_what_arrived_is_gone_and_not_before() -> None:
    pool = BufferPool()
    first = sent(torch.zeros(50_000), pool.allocate)
    address = first.data_ptr()
    part = first[10:20]
    del first
    second = sent(torch.ones(50_000), pool.allocate)
    assert second.data_ptr() != address
    assert not part.any()
    del part
    assert sent(torch.ones(50_000), pool.allocate).data_ptr() == address


def test_what_does_not_pickle_fails_before_a_byte_is_sent() -> None:
    with pytest.raises(Exception, match="pickle"):
        serialize((torch.ones(10), threading.Lock()))


def test_a_lambda_arrives() -> None:
    assert sent(lambda number: number + 1)(2) == 3


def test_a_peer_that_closes_its_end_in_the_middle_of_a_message_is_an_error() -> None:
    with channels() as (ours, theirs):
        batch = serialize(torch.ones(10))
        SerializedBatch(batch.content, [*batch.buffers, memoryview(b"")]).send(theirs)
        theirs.socket.close()
        message = ours.receive()
        with pytest.raises(PeerGoneError):
            receive(message + b"", ours, lambda shape, dtype: np.empty(shape[0] + 1, dtype))
