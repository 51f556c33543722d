"""Random streams keyed by what they are used for, not by the process that uses them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.plan.permutation import Key, mix_one

_U64 = 2**64


@cache
def _key_type() -> Any:
    """Keys of Philox generators; with ``key=``, numpy would also draw a seed from the system each time."""
    from numpy.random.bit_generator import ISeedSequence  # 10 ms, and few loaders draw numbers

    class PhiloxKey(ISeedSequence):
        def __init__(self, *words: int) -> None:
            self._words = words

        def __reduce__(self) -> tuple[Any, ...]:
            return _key, self._words

        def generate_state(self, n_words: int, dtype: npt.DTypeLike = np.uint64) -> npt.NDArray[Any]:
            return np.array(self._words, dtype)

    return PhiloxKey


def _key(*words: int) -> Any:
    return _key_type()(*words)


class RngStreams:
    """Generators keyed by (purpose, seed, epoch, index): independent of ranks, workers and order."""

    def __init__(self, purpose: str, seed: int, epoch: int) -> None:
        self._first, self._second = Key.of(purpose, seed, epoch).rounds[:2]

    def generator(self, index: int) -> np.random.Generator:
        """A numpy Generator for a sample id or position."""
        key = _key(self.word(index), (self._second + index) % _U64)
        return np.random.Generator(np.random.Philox(key))

    def word(self, index: int) -> int:
        """A 64-bit seed for a sample id or position."""
        return mix_one((self._first + index) % _U64)


def wants_rng(function: Callable[..., Any]) -> bool:
    """Whether a transform takes a generator: it has a second required argument, or one named ``rng``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except Exception:  # a callable object of the user's may raise anything
        return False
    positional = [arg for arg in parameters if arg.kind in (arg.POSITIONAL_ONLY, arg.POSITIONAL_OR_KEYWORD)]
    required = [arg for arg in positional if arg.default is arg.empty]
    return len(required) >= 2 or any(arg.name == "rng" for arg in positional[1:])
