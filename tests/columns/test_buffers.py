"""Memory is used again, and never while anything over it lives."""

import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rankfeed.columns.buffers import BufferPool

FLOAT32 = np.dtype("float32")
SHAPE = (256, 100)


def fill(pool: BufferPool, value: float) -> np.ndarray[Any, Any]:
    array = pool.allocate(SHAPE, FLOAT32)
    array[:] = value
    return array


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[3:5, ::2],
        lambda array: array.T,
        lambda array: array.reshape(-1)[5:],
        lambda array: array.view(np.uint8),
        lambda array: array.ravel().astype(FLOAT32, copy=False),
        lambda array: memoryview(array),
        lambda array: memoryview(array)[2:3],
        lambda array: np.frombuffer(array, np.int32),
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array)[7:9],
        lambda array: torch.from_numpy(array).view(-1)[::3],
        lambda array: torch.from_numpy(array).untyped_storage(),
        lambda array: torch.from_numpy(array).numpy()[1],
        lambda array: torch.from_numpy(array).split([100, 156])[1],
        lambda array: torch.nested.nested_tensor_from_jagged(torch.from_numpy(array), torch.tensor([0, 6, 256])),
        lambda array: torch.from_dlpack(array),
        lambda array: torch.from_numpy(array).detach().requires_grad_(),
        lambda array: iter(array),
        lambda array: list(array)[17],
        lambda array: [array, [array]],
    ],
    ids=range(21),
)
def test_memory_is_reused_only_after_every_object_that_refers_to_it_is_gone(hold: Callable[[Any], Any]) -> None:
    pool = BufferPool()
    array = fill(pool, 1)
    address = array.ctypes.data
    kept = hold(array)
    del array
    gc.collect()
    taken = [fill(pool, 2) for _ in range(4)]
    assert address not in [item.ctypes.data for item in taken]
    del kept, taken
    gc.collect()
    again = [fill(pool, 3) for _ in range(5)]
    assert address in [item.ctypes.data for item in again]


def test_memory_is_reused_while_the_garbage_collector_is_disabled() -> None:
    pool = BufferPool()
    gc.disable()
    try:
        addresses = {fill(pool, 0).ctypes.data for _ in range(20)}
    finally:
        gc.enable()
    assert len(addresses) == 1


def test_an_array_keeps_its_values_after_its_buffer_pool_is_deleted() -> None:
    pool = BufferPool()
    array = fill(pool, 5)
    del pool
    gc.collect()
    assert (array == 5).all()


def test_allocated_arrays_are_writable_contiguous_and_of_the_requested_shape_and_dtype() -> None:
    pool = BufferPool()
    for shape in [(), (0,), (3,), (0, 5), (1000, 1000), (70_000,), (2, 3, 4)]:
        for dtype in ("uint8", "float64", "int16", "complex128", "bool"):
            array = pool.allocate(shape, np.dtype(dtype))
            assert (array.shape, array.dtype.name) == (shape, dtype)
            assert array.flags.c_contiguous
            assert array.flags.writeable
            assert array.flags.aligned


def test_a_buffer_is_reused_for_a_smaller_request_and_not_for_a_larger_one() -> None:
    pool = BufferPool()
    address = pool.allocate((1 << 17,), np.dtype(np.uint8)).ctypes.data
    assert pool.allocate(((1 << 16) + 1,), np.dtype(np.uint8)).ctypes.data == address
    assert pool.allocate(((1 << 17) + 1,), np.dtype(np.uint8)).ctypes.data != address


def test_a_buffer_pool_keeps_fewer_than_100_of_300_freed_buffers() -> None:
    pool = BufferPool()
    many = [fill(pool, 0) for _ in range(300)]
    del many
    assert sum(len(kept) for kept in pool._kept.values()) < 100


def test_threads_never_share_allocated_memory() -> None:
    pool, failures = BufferPool(), []

    def work(mark: int) -> None:
        kept = []
        for turn in range(300):
            array = pool.allocate(SHAPE, FLOAT32)
            array[:] = mark * 1000 + turn
            kept.append((mark * 1000 + turn, torch.from_numpy(array)[turn % 256 :]))
            if len(kept) > turn % 7:
                value, tensor = kept.pop(turn % len(kept))
                if not (tensor == value).all():
                    failures.append(value)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_memory_freed_by_another_thread_is_reused() -> None:
    pool = BufferPool()
    box = [fill(pool, 1)]
    address = box[0].ctypes.data
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert fill(pool, 2).ctypes.data == address


def test_an_unpickled_array_does_not_share_memory_with_the_pool() -> None:
    pool = BufferPool()
    twin = pickle.loads(pickle.dumps(fill(pool, 4)))
    fill(pool, 9)
    assert (twin == 4).all()
