"""Copy the rows of a batch from where they are stored into the batch.

Many small rows are gathered by one vectorised call; large rows by a loop of plain copies, which run at the speed
of memory and outweigh the loop.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

#: From this many bytes per row, a Python loop of slice copies beats index arrays (equal between 1 and 4 KiB).
_LOOP_BYTES = 2048
#: Bytes copied through a temporary array, which stays in the processor's cache.
_TEMPORARY_BYTES = 1 << 18
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
    if total * values[:1].nbytes >= _LOOP_BYTES * len(starts):
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


def copy_padded(values: Array, starts: Int64, lengths: Int64, out: Array, slots: Int64, fill: Any) -> None:
    """``out[slots[i], :n] = values[starts[i] : starts[i] + n]``, then ``fill``, with n of ``lengths[i]``.

    From the start of each small row, as many elements are copied as the longest row has: such windows are one
    strided view, which numpy indexes without an index per element. Consecutive rows, as in a pass without
    shuffling, are copied with one mask. ``out`` is [k, longest, ...], C-contiguous.
    """
    longest, width = out.shape[1], math.prod(out.shape[2:])
    total, cells = int(lengths.sum()), longest * width
    rows_are_small = total * values[:1].nbytes < _LOOP_BYTES * len(lengths)
    windowed = rows_are_small and longest * len(lengths) <= _MAX_WASTE * total
    if windowed and (np.diff(slots) == 1).all() and (np.diff(starts) == lengths[:-1]).all():
        consecutive = out[slots[0] : slots[0] + len(slots)]
        consecutive[...] = fill
        consecutive[_is_filled(lengths, longest)] = values[starts[0] : starts[0] + total]
        return
    fits = starts + longest <= len(values) if windowed else np.zeros(len(starts), np.bool_)
    alone = (each[~fits].tolist() for each in (starts, lengths, slots))
    for start, length, slot in zip(*alone, strict=True):
        out[slot, :length] = values[start : start + length]
        out[slot, length:] = fill
    if not fits.any() or not cells:
        return
    starts, lengths, slots = starts[fits], lengths[fits], slots[fits]
    flat, rows = np.ascontiguousarray(values).reshape(-1), out.reshape(len(out), cells)
    windows = np.ndarray((len(flat) - cells + 1, cells), flat.dtype, flat, 0, flat.strides * 2)
    step = max(1, _TEMPORARY_BYTES // (cells * flat.itemsize))
    for at in range(0, len(starts), step):
        some = slice(at, at + step)
        copied = windows[starts[some] * width]
        np.copyto(copied, fill, where=~_is_filled(lengths[some] * width, cells))
        rows[slots[some]] = copied


def _is_filled(lengths: Int64, cells: int) -> npt.NDArray[np.bool_]:
    """Bool [rows, cells], True for the first ``lengths[i]`` cells of row i; at most 2**15 cells."""
    # Comparisons of narrow numbers are vectorised better.
    filled: npt.NDArray[np.bool_] = np.arange(cells, dtype=np.int16) < lengths.astype(np.int16)[:, None]
    return filled
