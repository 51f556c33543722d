"""The global generators of torch, numpy and random: seeded for a sample, and put back afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_globals(word: int) -> None:
    """Seed the global generators of torch (CPU), numpy and random with a word of 64 bits."""
    torch.default_generator.manual_seed(word >> 1)
    np.random.seed(word & 0xFFFFFFFF)
    random.seed(word)


@contextmanager
def kept_globals() -> Iterator[None]:
    """Leave the global generators as they were: seeding for a sample must not touch the model's own dropout."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
