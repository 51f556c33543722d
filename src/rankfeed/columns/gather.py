"""Copy the rows of a batch from where they are stored into the batch.

Many small rows are gathered by one vectorised call; large rows by a loop of plain copies, which run at the speed
of memory and outweigh the loop.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

#: From this many bytes per row, a Python loop of slice copies beats index arrays (equal between 1 and 4 KiB).
LOOP_BYTES = 2048
#: Bytes copied through a temporary array, which stays in the processor's cache.
_TEMPORARY_BYTES = 1 << 16
#: Cells of a padded batch that may be copied per needed cell.
_MAX_WASTE = 4


def take_rows(values: Array, rows: Int64, out: Array) -> None:
    """``out[i] = values[rows[i]]``: ``rows`` in range, ``out`` C-contiguous and of the dtype of ``values``."""
    # Any mode but "raise" writes into `out` directly; the caller has checked the rows.
    values.take(rows, 0, out, "clip")


def copy_segments(values: Array, starts: Int64, lengths: Int64, out: Array, targets: Int64) -> None:
    """``out[targets[i] : targets[i] + lengths[i]] = values[starts[i] : starts[i] + lengths[i]]`` for each i."""
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


def suits_windows(values: Array, lengths: Int64, longest: int) -> bool:
    """Whether :func:`copy_windows` pads rows of these lengths faster than row by row copies."""
    cells, total = longest * len(lengths), int(lengths.sum())
    return cells <= _MAX_WASTE * total and total * values[:1].nbytes < LOOP_BYTES * len(lengths)


def copy_windows(values: Array, starts: Int64, lengths: Int64, out: Array, slots: Int64, fill: Any) -> None:
    """``out[slots[i], :n] = values[starts[i] : starts[i] + n]``, then ``fill``, with n of ``lengths[i]``.

    From each start as many elements are copied as the longest row has: such windows are one strided view, which
    numpy indexes without an index per element. The surplus is overwritten with ``fill``. Consecutive rows, as in a
    pass without shuffling, are copied with one mask. ``out`` is [k, longest, ...], C-contiguous.
    """
    longest = out.shape[1]
    if len(slots) and _is_sequence(slots, 1) and _is_sequence(starts, lengths[:-1]):
        first, start = int(slots[0]), int(starts[0])
        rows = out[first : first + len(slots)]
        rows[...] = fill
        rows[_length_mask(lengths, longest)] = values[start : start + int(lengths.sum())]
        return
    width = math.prod(out.shape[2:])
    flat, row_cells = np.ascontiguousarray(values).reshape(-1), longest * width
    rows = out.reshape(len(out), row_cells)
    # Windows that would end beyond the values: only their rows.
    fits = starts + longest <= len(values)
    for start, length, slot in zip(
        starts[~fits].tolist(), lengths[~fits].tolist(), slots[~fits].tolist(), strict=True
    ):
        out[slot, :length] = values[start : start + length]
    starts_fit, slots_fit = (starts, slots) if fits.all() else (starts[fits], slots[fits])
    if len(starts_fit) and row_cells:
        windows = np.ndarray((len(flat) - row_cells + 1, row_cells), flat.dtype, flat, 0, flat.strides * 2)
        step = max(1, _TEMPORARY_BYTES // (row_cells * flat.itemsize))
        for at in range(0, len(starts_fit), step):
            rows[slots_fit[at : at + step]] = windows[starts_fit[at : at + step] * width]
    if (lengths < longest).any():
        padding = ~_length_mask(lengths * width, row_cells)
        if len(slots) == len(out) and (slots == np.arange(len(out))).all():
            np.copyto(rows, fill, where=padding)
        else:
            copied = rows[slots]
            np.copyto(copied, fill, where=padding)
            rows[slots] = copied


def _is_sequence(numbers: Int64, steps: Int64 | int) -> bool:
    return bool((np.diff(numbers) == steps).all())


def _length_mask(lengths: Int64, width: int) -> npt.NDArray[np.bool_]:
    """Bool [rows, width], True for the first ``lengths[i]`` cells of row i."""
    # Comparisons of narrow numbers are vectorised better.
    narrow: Any = np.int16 if width < 2**15 else np.int64
    mask: npt.NDArray[np.bool_] = np.arange(width, dtype=narrow) < lengths.astype(narrow)[:, None]
    return mask
