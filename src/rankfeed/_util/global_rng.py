"""Seeds, saves and restores the global random generators of torch, numpy and random."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# Held by the calls that read or set the state of torch's global generator. They hold a mutex of torch while they
# may wait for the GIL (the garbage collector can run in them), and wait for that mutex with the GIL held: two
# threads in them at once may wait for each other forever (torch 2.13).
_lock = threading.RLock()


def _init_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_init_in_child)  # where another thread may have held it


def seed_global_rngs(seed: int) -> None:
    """Seed the global generators of torch (CPU), numpy and random with 64 bits."""
    with _lock:
        torch.default_generator.manual_seed(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global generators on exit: seeding them for a sample must not affect the model's dropout."""
    with _lock:
        torch_state = torch.get_rng_state()
    states = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        with _lock:
            torch.set_rng_state(torch_state)
        np.random.set_state(states[0])
        random.setstate(states[1])


def rng_states() -> dict[str, Any]:
    """The state of each global generator, to find out whether it was drawn from."""
    with _lock:
        torch_state = torch.get_rng_state()
    name, keys, *others = np.random.get_state()
    numpy_state = name, np.asarray(keys).tobytes(), *others
    return {"torch": torch_state.numpy().tobytes(), "numpy.random": numpy_state, "random": random.getstate()}
