"""The user's ``map`` function, applied to samples before they are written.

Its result may depend on the sample and on the generator passed to it, and on nothing else: then the shards are the
same in whatever process and order it is called.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from rankfeed._util.validate import check_callable
from rankfeed.errors import WriteError, safe_str
from rankfeed.plan import RngStreams, wants_rng


@dataclass(frozen=True)
class SampleMap:
    """A function of a sample, or of a list of samples, that returns no sample, one or several."""

    function: Callable[..., Any]  # called with a generator as well if it takes a second argument
    batch: int = 0  # number of samples in a list; 0: called with a sample
    seed: int = 0  # of the generators

    def __post_init__(self) -> None:
        check_callable("map", self.function)

    def apply(self, samples: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """The new samples, each with the id of the sample it was made of, or of the first one of the batch."""
        # The name is part of the keys: the same seed gives the same generators as ever.
        streams = RngStreams("pack", self.seed, 0) if wants_rng(self.function) else None
        remaining = iter(samples)
        while batch := list(islice(remaining, max(1, self.batch))):
            first, argument = batch[0]
            where = f"sample {first}"
            if self.batch:
                argument = [sample for _, sample in batch]
                where = f"the batch of {len(batch)} samples from sample {first} on"
            arguments = (argument,) if streams is None else (argument, streams.generator(first))
            for sample in self._results(arguments, where):
                yield first, sample

    def _results(self, arguments: tuple[Any, ...], where: str) -> Iterator[Any]:
        """The samples of one call, one by one: they need not fit into memory."""
        refused = ""
        try:
            result = self.function(*arguments)
            samples = [] if result is None else [result] if isinstance(result, dict) else result
            if isinstance(samples, Iterable) and not isinstance(samples, (str, bytes, np.ndarray)):
                for sample in samples:
                    if not isinstance(sample, dict):
                        refused = f"a {type(result).__name__} that contains a {type(sample).__name__}"
                        break
                    yield sample
            else:
                refused = type(result).__name__
        except (Exception, SystemExit) as error:
            raise WriteError(
                "map raised an error",
                found=f"{type(error).__name__}: {safe_str(error)}",
                where=where,
                remedy="fix the function, and change its key if it has one; or return None to leave samples out",
            ) from error
        if refused:
            raise WriteError(
                "map returned something other than samples",
                expected="a dict, None, or several dicts (a list, a generator)",
                found=refused,
                where=where,
            )
