"""Lengths of the rows of ragged columns: sampled, with quantiles and a histogram."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns.columns import Bytes, Ragged

Int64 = npt.NDArray[np.int64]

#: Samples that are read, in how many runs of neighbours, in what batches, and bytes after which reading ends.
LOOKS, RUNS, BATCH, LOOK_BYTES = 4096, 16, 64, 256 << 20
#: Quantiles in percent.
QUANTILES = (5, 25, 50, 75, 95)
#: Approximate number of bars of a histogram.
_BARS = 10


@dataclass(frozen=True)
class Lengths:
    """Lengths of the rows of a column; bar i counts lengths from ``edges[i]`` up to, but not, ``edges[i + 1]``."""

    least: int
    mean: float
    most: int
    quantiles: Mapping[int, int]  # by percent
    edges: Sequence[int]
    counts: Sequence[int]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        bars = zip(pairwise(self.edges), self.counts, strict=True)
        return {
            "least": self.least,
            "mean": self.mean,
            "most": self.most,
            "quantiles": {f"{percent}%": length for percent, length in self.quantiles.items()},
            "histogram": [{"from": low, "to": high - 1, "count": count} for (low, high), count in bars],
        }


def look(source: Any, names: Sequence[str]) -> tuple[int, dict[str, Lengths]]:
    """Read evenly spaced runs of samples, always the same ones.

    Returns:
        the number of samples read, and the lengths of each of these columns (of ragged rows, bytes or text).
    """
    found: dict[str, list[Int64]] = {name: [] for name in names}
    seen = nbytes = 0
    for ids in runs(len(source)) if names else ():
        columns = source.fetch(ids, names)
        for name in names:
            column = columns[name]
            if isinstance(column, (Bytes, Ragged)):
                found[name].append(column.lengths)
            else:  # a few ragged rows may all have one length
                found[name].append(np.array([len(row) for row in column.rows()], np.int64))
            nbytes += column.nbytes
        seen += len(ids)
        if nbytes > LOOK_BYTES:
            break
    return seen, {name: lengths_of(np.concatenate(each)) for name, each in found.items()}


def runs(size: int) -> Iterator[Int64]:
    """Batches of sample ids to read: all samples of a small dataset, else runs from the first to the last.

    Examples:
        >>> [len(ids) for ids in runs(100)]
        [64, 36]
        >>> ids = np.concatenate(list(runs(10**12)))
        >>> len(ids), len(np.unique(ids))
        (4096, 4096)
    """
    length, count = (size, 1) if size <= LOOKS else (LOOKS // RUNS, RUNS)
    for number in range(count):
        first = (size - length) * number // max(1, count - 1)
        for start in range(first, first + length, BATCH):
            yield np.arange(start, min(start + BATCH, first + length), dtype=np.int64)


def lengths_of(lengths: Int64) -> Lengths:
    """Summarise at least one length.

    Examples:
        >>> found = lengths_of(np.array([1, 1, 2, 4]))
        >>> found.quantiles[50], found.edges, found.counts
        (1, [1, 2, 3, 4, 5], [2, 1, 0, 1])
    """
    least, most = int(lengths.min()), int(lengths.max())
    found = np.percentile(lengths, QUANTILES, method="inverted_cdf").astype(int).tolist()
    quantiles = dict(zip(QUANTILES, found, strict=True))
    edges = edges_of(least, most, quantiles[50])
    counts = np.histogram(lengths, [*edges[:-1], edges[-1] - 0.5])[0].tolist()
    return Lengths(least, float(lengths.mean()), most, quantiles, edges, counts)


def edges_of(least: int, most: int, median: int) -> list[int]:
    """Edges of bars: equal round widths, or powers of two if a few lengths are far larger than the others.

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
    least_width = -(-(most - least + 1) // _BARS)
    power = 10 ** (len(f"{least_width}") - 1)
    width = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= least_width)
    return [width * number for number in range(least // width, most // width + 2)]
