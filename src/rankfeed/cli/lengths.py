"""How long the rows of a column are: a look at some of them, their quantiles and a histogram."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns.columns import Bytes, Ragged

Int64 = npt.NDArray[np.int64]

#: Samples that are looked at, in how many stretches, how many at once, and bytes after which no more are.
LOOKS, STRETCHES, BATCH, LOOK_BYTES = 4096, 16, 64, 256 << 20
#: Quantiles that are told, in percent.
QUANTILES = (5, 25, 50, 75, 95)
#: Bars of a histogram, about.
_BARS = 10


@dataclass(frozen=True)
class Lengths:
    """Lengths of a column's rows.

    Args:
        least, mean, most: of those looked at.
        quantiles: by percent.
        edges: of the histogram's bars, the last exclusive.
        counts: how many rows are in each bar.
    """

    least: int
    mean: float
    most: int
    quantiles: Mapping[int, int]
    edges: Sequence[int]
    counts: Sequence[int]

    @property
    def labels(self) -> list[str]:
        """The lengths in each bar."""
        last = (f"{low:,}" if high == low + 1 else f"{low:,} – {high - 1:,}" for low, high in pairwise(self.edges))
        return list(last)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        bars = zip(pairwise(self.edges), self.counts, strict=True)
        return {
            "least": self.least,
            "mean": self.mean,
            "most": self.most,
            "quantiles": {f"{percent}%": length for percent, length in self.quantiles.items()},
            "histogram": [{"from": low, "to": high - 1, "count": count} for (low, high), count in bars],
        }


def look(source: Any, names: Sequence[str]) -> tuple[int, dict[str, Lengths]]:
    """The lengths of some columns, judged by evenly spaced stretches of samples: always the same ones.

    Args:
        source: to look at.
        names: columns of ragged rows, bytes or text.

    Returns:
        how many samples were looked at, and the lengths for each column.
    """
    found: dict[str, list[Int64]] = {name: [] for name in names}
    seen = nbytes = 0
    for ids in stretches(len(source)) if names else ():
        columns = source.fetch(ids, names)
        for name in names:
            column = columns[name]
            if isinstance(column, (Bytes, Ragged)):
                found[name].append(column.lengths)
            else:  # rows of a few samples may be of one length
                found[name].append(np.array([len(row) for row in column.rows()], np.int64))
            nbytes += column.nbytes
        seen += len(ids)
        if nbytes > LOOK_BYTES:
            break
    return seen, {name: lengths_of(np.concatenate(each)) for name, each in found.items()}


def stretches(size: int) -> Iterator[Int64]:
    """Sample ids to look at: all where there are few, else stretches of neighbours over the whole length.

    Examples:
        >>> [len(ids) for ids in stretches(100)]
        [64, 36]
        >>> ids = np.concatenate(list(stretches(10**12)))
        >>> len(ids), len(np.unique(ids))
        (4096, 4096)
    """
    if size <= LOOKS:
        spans = [(0, size)]
    else:
        length = LOOKS // STRETCHES
        firsts = [(size - length) * number // (STRETCHES - 1) for number in range(STRETCHES)]
        spans = [(first, first + length) for first in firsts]
    for first, last in spans:
        for start in range(first, last, BATCH):
            yield np.arange(start, min(start + BATCH, last), dtype=np.int64)


def lengths_of(lengths: Int64) -> Lengths:
    """What there is to say of them (at least one).

    Examples:
        >>> told = lengths_of(np.array([1, 1, 2, 4]))
        >>> told.quantiles[50], told.labels, told.counts
        (1, ['1', '2', '3', '4'], [2, 1, 0, 1])
    """
    least, most = int(lengths.min()), int(lengths.max())
    found = np.percentile(lengths, QUANTILES, method="inverted_cdf").astype(int).tolist()
    quantiles = dict(zip(QUANTILES, found, strict=True))
    edges = edges_of(least, most, quantiles[50])
    counts = np.histogram(lengths, [*edges[:-1], edges[-1] - 0.5])[0].tolist()
    return Lengths(least, float(lengths.mean()), most, quantiles, edges, counts)


def edges_of(least: int, most: int, median: int) -> list[int]:
    """Edges of bars for whole numbers: equal round widths, or doubling where a few are far larger than the rest.

    Examples:
        >>> edges_of(3, 96, 50)
        [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
        >>> edges_of(0, 3000, 9)
        [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    """
    if most > 8 * max(1, median) and most > 2 * _BARS:
        first = max(1, least).bit_length() - 1
        step = -(-(most.bit_length() - first) // (_BARS + 4))
        edges = [1 << power for power in range(first, most.bit_length() + step, step)]
        return [0, *edges] if least == 0 else edges
    width = _round(-(-(most - least + 1) // _BARS))
    return [width * number for number in range(least // width, most // width + 2)]


def _round(width: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= width:
                return factor * power
        power *= 10
