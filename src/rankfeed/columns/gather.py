"""Copying the rows of a batch from where they lie to where they are wanted.

Two ways lead there, and the size of a row decides: many small rows are gathered by one vectorised call, large
ones by a loop of plain copies, which run at the memory's own speed and outweigh the loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

#: From this many bytes a row on, a Python loop of slice copies beats index arrays (measured: about equal between
#: 1 and 4 KiB).
LOOP_BYTES = 2048


def take_rows(values: Array, rows: Int64, out: Array) -> None:
    """``out[i] = values[rows[i]]``, vectorised, straight into ``out``.

    Args:
        values: [n, ...].
        rows: int64 [m], in range.
        out: [m, ...], C-contiguous, of the dtype of ``values``.
    """
    # Any mode but "raise" writes into `out` directly; rows were checked where they were given.
    values.take(rows, axis=0, out=out, mode="clip")


def copy_segments(values: Array, starts: Int64, lengths: Int64, out: Array, targets: Int64) -> None:
    """``out[targets[i] : targets[i] + lengths[i]] = values[starts[i] : starts[i] + lengths[i]]`` for each i.

    Args:
        values: [n, ...], elements with a row of a batch being a run of them.
        starts: int64 [m], where each run starts.
        lengths: int64 [m], elements in each.
        out: [k, ...] of the same dtype.
        targets: int64 [m], where each run goes.
    """
    total = int(lengths.sum())
    if total == 0:
        return
    if total * values[:1].nbytes >= LOOP_BYTES * len(starts):
        runs = zip(starts.tolist(), lengths.tolist(), targets.tolist(), strict=True)
        for start, length, target in runs:
            out[target : target + length] = values[start : start + length]
        return
    before = np.cumsum(lengths) - lengths
    within = np.arange(total)
    sources = np.repeat(starts - before, lengths) + within
    if np.array_equal(targets, targets[0] + before):
        take_rows(values, sources, out[targets[0] : targets[0] + total])
    else:
        out[np.repeat(targets - before, lengths) + within] = values[sources]
