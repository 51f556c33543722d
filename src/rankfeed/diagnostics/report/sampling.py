"""Choosing what fits a chart: evenly spaced items, and equal ranges."""

import numpy as np

from rankfeed.plan.plan import Int64


def picks(count: int, most: int) -> Int64:
    """At most ``most`` of [0, count), evenly spaced, the first and the last among them.

    Examples:
        >>> picks(4, 10).tolist(), picks(10**12, 3).tolist()
        ([0, 1, 2, 3], [0, 499999999999, 999999999999])
    """
    if count <= most:
        return np.arange(count, dtype=np.int64)
    return np.array([number * (count - 1) // (most - 1) for number in range(most)], np.int64)


def edges(count: int, most: int) -> Int64:
    """Bounds of at most ``most`` equal ranges of [0, count).

    Examples:
        >>> edges(3, 10).tolist(), edges(10, 4).tolist()
        ([0, 1, 2, 3], [0, 2, 5, 7, 10])
    """
    parts = max(1, min(count, most))
    return np.array([number * count // parts for number in range(parts + 1)], np.int64)
