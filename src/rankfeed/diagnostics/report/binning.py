"""What is too long for a screen, cut down: evenly spaced picks, and stretches of about equal length."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rankfeed.diagnostics.report.page import short

Int64 = npt.NDArray[np.int64]

#: Rows and columns of a grid that a phone can show.
ROWS, COLUMNS = 32, 60


def picks(count: int, most: int) -> Int64:
    """At most so many of [0, count), evenly spaced, the first and the last among them.

    Examples:
        >>> picks(4, 10).tolist(), picks(10**12, 3).tolist()
        ([0, 1, 2, 3], [0, 499999999999, 999999999999])
    """
    if count <= most:
        return np.arange(count, dtype=np.int64)
    return np.array([number * (count - 1) // (most - 1) for number in range(most)], np.int64)


def edges(count: int, most: int) -> Int64:
    """Where at most so many stretches of [0, count) begin, and the end of the last.

    Examples:
        >>> edges(3, 10).tolist(), edges(10, 4).tolist()
        ([0, 1, 2, 3], [0, 2, 5, 7, 10])
    """
    parts = max(1, min(count, most))
    return np.array([number * count // parts for number in range(parts + 1)], np.int64)


def names_of(cuts: Sequence[int] | Int64) -> list[str]:
    """The stretches between edges by name.

    Examples:
        >>> names_of([0, 1, 4]), names_of([0, 500_000, 1_000_000])
        (['0', '1–3'], ['0–500k', '500k–1M'])
    """
    found = []
    for low, high in zip(map(int, cuts[:-1]), map(int, cuts[1:]), strict=True):
        if high - low <= 1:
            found.append(name_of(low))
        elif high > 100_000:
            found.append(f"{short(low)}–{short(high)}")
        else:
            found.append(f"{low}–{high - 1}")
    return found


def name_of(number: int) -> str:
    """A number as a short name: in full where it is short anyway.

    Examples:
        >>> name_of(31250), name_of(123_456_789)
        ('31250', '123M')
    """
    return str(number) if number < 1_000_000 else short(number)


def place_in(cuts: Int64, values: npt.NDArray[np.generic] | Sequence[float]) -> Int64:
    """In which stretch between edges each value lies."""
    return np.searchsorted(cuts[1:-1], np.asarray(values), side="right").astype(np.int64)
