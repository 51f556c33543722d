"""The global random generators of torch, numpy and Python: seeded for one sample and restored afterwards."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_global_rngs(seed: int) -> None:
    """Seed the global generators of torch (CPU), numpy and random with 64 bits."""
    torch.default_generator.manual_seed(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global generators on exit: seeding them for a sample must not affect the model's dropout."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
