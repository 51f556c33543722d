"""A function of the user's between input and pack: of a sample, or of several at once, to none, one or many.

What it makes of a sample may depend on the sample and on the generator that it is handed, and on nothing else:
then the pack is the same whoever calls it, in whatever order, and however often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankfeed._util.validate import check_callable, check_int
from rankfeed.errors import PackError, safe_str
from rankfeed.plan import RngStreams, wants_rng


@dataclass(frozen=True)
class Mapped:
    """What is done to each sample before it is packed.

    Args:
        function: of a sample, or of a list of samples; called with a generator as well if it takes one.
        size: how many samples it takes at once, 0 for one that is not in a list.
        seed: of the generators.

    Examples:
        >>> twice = Mapped(lambda sample: [sample, sample])
        >>> list(twice.rows([(7, {"x": 1})]))
        [(7, {'x': 1}), (7, {'x': 1})]
        >>> list(Mapped(lambda samples: samples[1:], size=2).rows(enumerate([{"x": 1}, {"x": 2}, {"x": 3}])))
        [(0, {'x': 2})]
    """

    function: Callable[..., Any]
    size: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_callable("map", self.function)
        check_int("map_batch", self.size, at_least=0)

    def rows(self, samples: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """What the function makes of samples, in order.

        Args:
            samples: with the id of each. Batches are counted from the first.

        Yields:
            the new samples, each with the id of what it was made of (of a batch, its first).

        Raises:
            PackError: the function raised, or returned something else than samples; names the sample.
        """
        streams = RngStreams("pack", self.seed, 0) if wants_rng(self.function) else None
        for first, given, where in self._calls(samples):
            arguments = (given,) if streams is None else (given, streams.generator(first))
            for sample in self._made(arguments, where):
                yield first, sample

    def _made(self, arguments: tuple[Any, ...], where: str) -> Iterator[Any]:
        """What one call makes, one by one: it may be far more than fits into memory."""
        try:
            result = self.function(*arguments)
            if isinstance(result, dict):
                yield result
            elif result is not None:
                yield from _many(result)
        except _Unfit as unfit:
            raise PackError(
                "map returned something else than samples",
                expected="a dict, None, or several dicts (a list, a generator)",
                found=str(unfit),
                where=where,
            ) from None
        except (Exception, SystemExit) as error:
            raise PackError(
                "map raised an error",
                found=f"{type(error).__name__}: {safe_str(error)}",
                where=where,
                remedy="mend the function and give it another key, if it has one; or let it return None for "
                "samples to be left out",
            ) from error

    def _calls(self, samples: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any, str]]:
        """First id, argument and place of each call."""
        if not self.size:
            yield from ((number, sample, f"sample {number}") for number, sample in samples)
            return
        waiting: list[tuple[int, Any]] = []
        for each in samples:
            waiting.append(each)
            if len(waiting) == self.size:
                yield _batch(waiting)
                waiting = []
        if waiting:
            yield _batch(waiting)


class _Unfit(Exception):
    """What a function returned is no sample."""


def _batch(waiting: list[tuple[int, Any]]) -> tuple[int, list[Any], str]:
    first = waiting[0][0]
    return first, [sample for _, sample in waiting], f"the batch of {len(waiting)} samples from sample {first} on"


def _many(result: Any) -> Iterator[Any]:
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes, np.ndarray)):
        raise _Unfit(type(result).__name__)
    for sample in result:
        if not isinstance(sample, dict):
            raise _Unfit(f"a {type(result).__name__} with a {type(sample).__name__} in it")
        yield sample
