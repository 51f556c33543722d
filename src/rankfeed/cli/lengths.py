"""Lengths of the rows of ragged columns: sampled, with quantiles and a histogram."""

from collections.abc import Iterator, Sequence
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


def look(source: Any, names: Sequence[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Read evenly spaced runs of samples; their number, and a summary of the lengths in each of these columns."""
    arrays: dict[str, list[Int64]] = {name: [] for name in names}
    seen = nbytes = 0
    for ids in runs(len(source)) if names else ():
        columns = source.fetch(ids, names)
        for name in names:
            column = columns[name]
            if isinstance(column, (Bytes, Ragged)):
                arrays[name].append(column.lengths)
            else:  # a few ragged rows may all have one length
                arrays[name].append(np.array([len(row) for row in column.rows()], np.int64))
            nbytes += column.nbytes
        seen += len(ids)
        if nbytes > LOOK_BYTES:
            break
    return seen, {name: summarize(np.concatenate(parts)) for name, parts in arrays.items()}


def runs(size: int) -> Iterator[Int64]:
    """Batches of sample ids to read: all samples of a small dataset, else runs from the first to the last."""
    length, count = (size, 1) if size <= LOOKS else (LOOKS // RUNS, RUNS)
    for run in range(count):
        first = (size - length) * run // max(1, count - 1)
        for start in range(first, first + length, BATCH):
            yield np.arange(start, min(start + BATCH, first + length), dtype=np.int64)


def summarize(lengths: Int64) -> dict[str, Any]:
    """Extremes, mean, quantiles and histogram of at least one length: JSON-able."""
    least, most = int(lengths.min()), int(lengths.max())
    quantiles = np.percentile(lengths, QUANTILES, method="inverted_cdf").astype(int).tolist()
    edges = edges_of(least, most, quantiles[QUANTILES.index(50)])
    counts = np.histogram(lengths, [*edges[:-1], edges[-1] - 0.5])[0].tolist()
    bars = zip(pairwise(edges), counts, strict=True)
    return {
        "least": least,
        "mean": float(lengths.mean()),
        "most": most,
        "quantiles": {f"{percent}%": length for percent, length in zip(QUANTILES, quantiles, strict=True)},
        "histogram": [{"from": low, "to": high - 1, "count": count} for (low, high), count in bars],
    }


def edges_of(least: int, most: int, median: int) -> list[int]:
    """Edges of bars: equal round widths, or powers of two if a few lengths are far larger than the others."""
    if most > 8 * max(1, median) and most > 2 * _BARS:
        first = max(1, least).bit_length() - 1
        step = -(-(most.bit_length() - first) // (_BARS + 4))
        edges = [1 << power for power in range(first, most.bit_length() + step, step)]
        return [0, *edges] if least == 0 else edges
    least_width = -(-(most - least + 1) // _BARS)
    power = 10 ** (len(f"{least_width}") - 1)
    width = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= least_width)
    return [width * index for index in range(least // width, most // width + 2)]
