"""Random streams that belong to a sample, not to whoever happens to read it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from rankfeed.plan.permutation import Key, mix_one

_U64 = 2**64


class Streams:
    """Generators keyed by (seed, epoch, which): independent of ranks, workers and order.

    Args:
        purpose: keeps streams for different uses apart.

    Examples:
        >>> one, same = (Streams("transform", seed=1, epoch=2).generator(7) for _ in range(2))
        >>> bool(one.integers(1 << 30) == same.integers(1 << 30))
        True
    """

    def __init__(self, purpose: str, seed: int, epoch: int) -> None:
        self._first, self._second = Key.of(purpose, seed, epoch).rounds[:2]

    def generator(self, which: int) -> np.random.Generator:
        """A numpy Generator for the sample (or position) ``which``."""
        key = np.array([self.word(which), (self._second + which) % _U64], np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    def word(self, which: int) -> int:
        """A seed of 64 bits for the sample (or position) ``which``."""
        return mix_one((self._first + which) % _U64)


def wants_rng(function: Callable[..., Any]) -> bool:
    """Whether a transform takes a generator as well: a second required argument, or one named ``rng``.

    Examples:
        >>> wants_rng(lambda sample: sample), wants_rng(lambda sample, rng: sample)
        (False, True)
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except Exception:  # a callable object of the user's may raise anything
        return False
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    return len(required) >= 2 or any(parameter.name == "rng" for parameter in positional[1:])
