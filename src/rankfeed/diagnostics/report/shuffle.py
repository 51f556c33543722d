"""How well an order is mixed, in figures that a perfect shuffle has known values for.

Looked at are neighbours in the order: in a uniform permutation of n samples the distance of two of them is
(n + 1) / 3 on average, any share x of n with the density 2 (1 - x), and nothing correlates (D. Knuth, "The Art of
Computer Programming", volume 2, 3.3.2: serial tests). The same figures of a permutation that numpy drew show
how far chance alone leads away from them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, lgamma

import numpy as np
import numpy.typing as npt

from rankfeed.diagnostics.report.page import number

Int64 = npt.NDArray[np.int64]
#: Positions -> sample ids.
Order = Callable[[Int64], Int64]

#: Pairs that are looked at, samples of an order that is read whole, and stretches that stand for batches.
PAIRS, WHOLE, STRETCHES = 1 << 15, 1 << 20, 48
#: Bars of the histogram of distances, and the longest batch that is looked at.
BINS, LONGEST = 10, 1 << 12


@dataclass(frozen=True)
class Quality:
    """Figures of an order.

    Attributes:
        pairs: neighbours looked at.
        distance: of neighbours, on average, as a share of the data set.
        near: shares of neighbours by distance, in `BINS` bins from 0 to the whole data set.
        lags, correlations: of samples so many positions apart.
        blocks: different blocks in a global batch, on average.
        spread: how long a block's samples are spread over the epoch, 1 as in a perfect shuffle; None where the
            order is too long to be read whole, or a block is the whole data set.
    """

    pairs: int
    distance: float
    near: list[float]
    lags: list[int]
    correlations: list[float]
    blocks: float
    spread: float | None


def perfect(starts: Int64, batch: int) -> tuple[float, list[float], float]:
    """What a uniform permutation has on average: distance, shares by distance, blocks of a batch.

    Args:
        starts: where blocks begin, and the number of samples at the end.
        batch: samples of a global batch.

    Examples:
        >>> distance, near, blocks = perfect(np.array([0, 2, 4]), batch=2)
        >>> round(distance, 3), round(near[0], 3), round(blocks, 3)
        (0.417, 0.19, 1.667)
    """
    n = int(starts[-1])
    sizes = np.diff(starts).astype(float)
    low = np.arange(BINS) / BINS
    near = (1 - low) ** 2 - (1 - low - 1 / BINS) ** 2
    batch = min(batch, n, LONGEST)
    return (n + 1) / (3 * n), near.tolist(), float((1 - _missed(sizes, n, batch))[sizes > 0].sum())


def quality(order: Order, starts: Int64, batch: int) -> Quality:
    """Look at an order: at all of it where it is short, else at some thousand neighbours, always the same.

    Args:
        order: positions -> sample ids, both from 0 to n - 1.
        starts: where blocks begin, and the number of samples at the end.
        batch: samples of a global batch.

    Examples:
        >>> starts = np.arange(0, 1001, 10)
        >>> asleep = quality(lambda positions: positions, starts, batch=20)
        >>> round(asleep.distance, 3), round(asleep.correlations[0], 2), asleep.blocks
        (0.001, 1.0, 2.0)
        >>> awake = quality(numpys(1000), starts, batch=20)
        >>> 0.31 < awake.distance < 0.36, abs(awake.correlations[0]) < 0.1, awake.blocks > 15
        (True, True, True)
    """
    n = int(starts[-1])
    draw = np.random.default_rng(1)
    lags = [lag for lag in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if lag <= n // 2] or [0]
    correlations, distances = [], np.zeros(1)
    for lag in lags:
        room = n - lag
        first = np.arange(room) if room <= PAIRS else draw.integers(0, room, PAIRS)
        ids, others = order(first), order(first + lag)
        correlations.append(_correlation(ids / n, others / n))
        if lag == lags[0]:
            distances = np.abs(ids - others) / n
    batch = min(batch, n, LONGEST)
    whole_batches = n // batch
    begins = np.unique(draw.integers(0, whole_batches, STRETCHES)) * batch
    blocks = [len(np.unique(_block(starts, order(np.arange(low, low + batch))))) for low in begins.tolist()]
    near = np.histogram(distances, BINS, (0, 1))[0] / len(distances)
    return Quality(
        pairs=len(distances),
        distance=float(distances.mean()),
        near=near.tolist(),
        lags=lags,
        correlations=correlations,
        blocks=float(np.mean(blocks)),
        spread=_spread(order, starts) if n <= WHOLE and len(starts) > 2 else None,
    )


def numpys(n: int) -> Order:
    """An order that numpy draws; of more samples than one keeps, what it would be at any few positions."""
    draw = np.random.default_rng(2)
    if n <= WHOLE:
        drawn = draw.permutation(n)
        return lambda positions: drawn[positions]
    return lambda positions: draw.integers(0, n, positions.shape)


def judged(found: Quality, starts: Int64, batch: int) -> tuple[bool, str]:
    """Whether it is like a perfect shuffle, as far as these figures tell, and a sentence about it.

    Examples:
        >>> starts = np.arange(0, 1001, 10)
        >>> judged(quality(lambda positions: positions, starts, 20), starts, 20)[1]
        'Samples come in their own order, or nearly so: they are not shuffled.'
    """
    distance, _, blocks = perfect(starts, batch)
    chance = 0.03 + 4 / max(1, found.pairs) ** 0.5
    far, wide = found.distance / distance, found.blocks / blocks
    strays = max(map(abs, found.correlations[1:] or found.correlations))
    if found.distance < 0.02 and found.correlations[0] > 0.5:
        return False, "Samples come in their own order, or nearly so: they are not shuffled."
    long = 1.0 if found.spread is None else found.spread
    if strays <= chance and all(abs(each - 1) <= chance for each in (far, wide, long)):
        return True, "No figure tells this order from a perfect shuffle."
    spread = "" if found.spread is None else f", a block's samples are spread {long:.0%} as wide in time"
    return False, (
        f"Mixed, but not as a perfect shuffle: neighbours lie {far:.0%} as far apart as there, a global batch "
        f"draws on {number(found.blocks)} blocks ({number(blocks)} there){spread}."
    )


def _correlation(ids: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> float:
    if len(ids) < 2 or not ids.std() or not others.std():
        return 0.0
    return float(np.corrcoef(ids, others)[0, 1])


def _spread(order: Order, starts: Int64) -> float | None:
    """Standard deviation of the positions of a block's samples, over that of as many drawn from all positions."""
    n = int(starts[-1])
    block = _block(starts, order(np.arange(n)))
    counts = np.bincount(block, minlength=len(starts) - 1)
    places = np.arange(n) / n
    sums, squares = np.bincount(block, places), np.bincount(block, places**2)
    several = counts[: len(sums)] > 1
    if not several.any():
        return None
    many, sums, squares = counts[: len(sums)][several], sums[several], squares[several]
    variance = (squares - sums**2 / many) / (many - 1)
    return float(np.sqrt((np.maximum(variance, 0) * many).sum() / many.sum() * 12))


def _block(starts: Int64, ids: Int64) -> Int64:
    return np.searchsorted(starts, ids, side="right") - 1


def _missed(sizes: npt.NDArray[np.float64], n: int, batch: int) -> npt.NDArray[np.float64]:
    """The chance that ``batch`` of n samples, drawn without putting back, leave out a block of each size."""
    if n > WHOLE:  # so few of so many may as well be put back
        return np.asarray(np.exp(batch * np.log1p(-np.minimum(sizes / n, 1 - 1e-16))))
    kinds, place = np.unique(sizes, return_inverse=True)
    of_kind = [
        exp(_log_choose(n - size, batch) - _log_choose(n, batch)) if size + batch <= n else 0.0 for size in kinds
    ]
    return np.array(of_kind)[place]


def _log_choose(n: float, k: int) -> float:
    """Logarithm of n over k, without the k! that cancels."""
    return lgamma(n + 1) - lgamma(n - k + 1)
