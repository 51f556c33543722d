"""Drawing samples anew each epoch: a formula for who is drawn, as the shuffle is one for who comes next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_bool, check_int, check_optional
from rankfeed.plan import Key
from rankfeed.plan.permutation import mix, permutation
from rankfeed.plan.plan import Int64


class Draws:
    """An epoch's draws from a population: stands where a :class:`rankfeed.Plan` stands.

    Args:
        population: number of samples drawn from.
        epoch_size: draws in an epoch; None for as many as the population has.
        replacement: whether each draw is independent of all others. If not, draws ``k * population`` to
            ``(k + 1) * population - 1`` of an epoch are a permutation of it.
        seed: any integer; draws of different (seed, epoch) have nothing in common.

    Raises:
        PlanError: no samples, or no draws.

    Examples:
        >>> Draws(4, 6, replacement=False).sample_ids(0, range(6)).tolist()
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
        """The kind of order, as a plan has one."""
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
        places = np.asarray(positions, np.int64)
        if not self.replacement:
            deals, cards = np.divmod(places, self.population)
            key = Key.of("redealt", self.seed, epoch)
            return permutation(cards, self.population, key, tweaks=mix(deals.view(np.uint64)))
        first, second = (np.uint64(word) for word in Key.of("resampled", self.seed, epoch).rounds[:2])
        bits = mix(mix(places.view(np.uint64) + first) ^ second)
        # The remainder favours no sample by more than one in 2**64 / population.
        return (bits % np.uint64(self.population)).astype(np.int64)
