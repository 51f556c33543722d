"""How well an order is mixed, by figures with known values for a perfect shuffle.

Neighbours in a uniform permutation of n samples are (n + 1) / 3 apart on average, and nothing correlates
(D. Knuth, "The Art of Computer Programming", volume 2, 3.3.2: serial tests).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, lgamma, sqrt

import numpy as np
import numpy.typing as npt

from rankfeed.plan.plan import Int64

#: Positions -> sample ids.
Order = Callable[[Int64], Int64]

#: Pairs that are examined, batches, and the longest batch.
PAIRS, BATCHES, LONGEST = 1 << 15, 48, 1 << 12
#: Samples from which drawing with and without replacement are the same.
_LARGE = 1 << 20


@dataclass(frozen=True)
class ShuffleQuality:
    """Figures of an order beside those of a perfect shuffle.

    Attributes:
        distance, perfect_distance: of neighbours, on average, as shares of the data set.
        correlations: with samples that come later, by the number of positions between them.
        blocks, perfect_blocks: different blocks in a global batch, on average.
        chance: how far chance alone moves a correlation from 0, and a ratio from 1.
    """

    distance: float
    perfect_distance: float
    correlations: dict[int, float]
    blocks: float
    perfect_blocks: float
    chance: float

    @property
    def is_perfect(self) -> bool:
        """Whether these figures do not distinguish the order from a perfect shuffle."""
        ratios = self.distance / self.perfect_distance, self.blocks / self.perfect_blocks
        strays = [*self.correlations.values()][1:] or [*self.correlations.values()]
        return max(map(abs, strays)) <= self.chance and all(abs(each - 1) <= self.chance for each in ratios)

    def __str__(self) -> str:
        if self.distance < 0.02 and next(iter(self.correlations.values())) > 0.5:
            return "Samples come in stored order, or nearly so: they are not shuffled."
        if self.is_perfect:
            return "No figure distinguishes this order from a perfect shuffle."
        return "Mixed, but not as by a perfect shuffle."


def quality(order: Order, starts: Int64, batch: int) -> ShuffleQuality:
    """Examine an order: some thousand neighbours and batches, always the same; all of a short one.

    Args:
        order: positions -> sample ids, both in [0, n).
        starts: where blocks begin, and the number of samples at the end.
        batch: samples of a global batch.

    Examples:
        >>> starts = np.arange(0, 1001, 10)
        >>> found = quality(lambda positions: positions, starts, batch=20)
        >>> round(found.distance, 3), round(found.correlations[1], 2), found.blocks, round(found.perfect_blocks, 1)
        (0.001, 1.0, 2.0, 18.4)
        >>> print(found)
        Samples come in stored order, or nearly so: they are not shuffled.
    """
    n = int(starts[-1])
    draw = np.random.default_rng(1)
    correlations, distances = {}, np.zeros(1)
    for lag in [lag for lag in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if lag <= n // 2] or [1]:
        first = np.arange(n - lag) if n - lag <= PAIRS else draw.integers(0, n - lag, PAIRS)
        ids, others = order(first), order(first + lag)
        correlations[lag] = _correlation(ids / n, others / n)
        distances = np.abs(ids - others) / n if lag == 1 < n else distances
    batch = min(batch, n, LONGEST)
    begins = np.unique(draw.integers(0, n // batch, BATCHES)) * batch
    read = [np.searchsorted(starts, order(np.arange(low, low + batch)), side="right") for low in begins.tolist()]
    missed = _missed(np.diff(starts).astype(float), n, batch)
    return ShuffleQuality(
        distance=float(distances.mean()),
        perfect_distance=(n + 1) / (3 * n),
        correlations=correlations,
        blocks=float(np.mean([len(np.unique(each)) for each in read])),
        perfect_blocks=float((1 - missed).sum()),
        chance=0.03 + 4 / sqrt(max(1, len(distances))),
    )


def _correlation(ids: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> float:
    return float(np.corrcoef(ids, others)[0, 1]) if len(ids) > 1 and ids.std() and others.std() else 0.0


def _missed(sizes: npt.NDArray[np.float64], n: int, batch: int) -> npt.NDArray[np.float64]:
    """Probability that ``batch`` of n samples, drawn without replacement, leave out a block of each size."""
    if n > _LARGE:
        return np.asarray(np.exp(batch * np.log1p(-np.minimum(sizes / n, 1 - 1e-16))))

    def log_choose(count: float) -> float:
        """Logarithm of count over batch, without the batch! that cancels."""
        return lgamma(count + 1) - lgamma(count - batch + 1)

    kinds, place = np.unique(sizes, return_inverse=True)
    of_kind = [exp(log_choose(n - size) - log_choose(n)) if size + batch <= n else 0.0 for size in kinds]
    return np.array(of_kind)[place]
