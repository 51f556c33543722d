"""Resampling: which sample is drawn at a position of an epoch, as a pure function."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_bool, check_int, check_optional
from rankfeed.plan import Key
from rankfeed.plan.permutation import mix, permutation
from rankfeed.plan.plan import Int64


class ResamplingPlan:
    """Draws samples from a population, with the interface of :class:`rankfeed.Plan`.

    Args:
        population: number of samples to draw from.
        epoch_size: draws per epoch; None for the size of the population.
        replacement: whether draws are independent. If not, draws ``k * population`` to
            ``(k + 1) * population - 1`` of an epoch are a permutation of the population.
        seed: any integer; draws of different (seed, epoch) are independent.

    Examples:
        >>> ResamplingPlan(4, 6, replacement=False).sample_ids(0, range(6)).tolist()
        [3, 2, 0, 1, 1, 2]
    """

    lanes = 1

    def __init__(
        self, population: int, epoch_size: int | None = None, *, replacement: bool = True, seed: int = 0
    ) -> None:
        self.population = check_int("population", population, at_least=1)
        size = check_optional(check_int, "epoch_size", epoch_size, at_least=1, at_most=2**62)
        self.num_samples = self.population if size is None else size
        self.replacement = check_bool("replacement", replacement)
        self.seed = check_int("seed", seed)

    @property
    def shuffle(self) -> str:
        """The kind of order."""
        return "resampled" if self.replacement else "redealt"

    def describe(self) -> dict[str, int | str]:
        """What the draws depend on."""
        return {
            "samples": self.num_samples,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "population": self.population,
        }

    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """The samples drawn at some positions of an epoch: int64, in [0, population)."""
        draws = np.asarray(positions, np.int64)
        if not self.replacement:
            rounds, places = np.divmod(draws, self.population)
            key = Key.of("redealt", self.seed, epoch)
            return permutation(places, self.population, key, tweaks=mix(rounds.view(np.uint64)))
        first, second = (np.uint64(word) for word in Key.of("resampled", self.seed, epoch).rounds[:2])
        bits = mix(mix(draws.view(np.uint64) + first) ^ second)
        # The modulo bias is at most one in 2**64 / population.
        return (bits % np.uint64(self.population)).astype(np.int64)
