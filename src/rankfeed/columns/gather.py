"""Copying the rows of a batch from where they lie to where they are wanted.

Two ways lead there, and the size of a row decides: many small rows are gathered by one vectorised call, large
ones by a loop of plain copies, which run at the memory's own speed and outweigh the loop.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

#: From this many bytes a row on, a Python loop of slice copies beats index arrays (measured: about equal between
#: 1 and 4 KiB).
LOOP_BYTES = 2048
#: Bytes that are copied by way of an array of their own: it stays in the processor's cache.
_BY_WAY = 1 << 16
#: Cells of a padded batch that may be copied for each that is wanted.
_WASTE = 4


def take_rows(values: Array, rows: Int64, out: Array) -> None:
    """``out[i] = values[rows[i]]``, vectorised, straight into ``out``.

    Args:
        values: [n, ...].
        rows: int64 [m], in range.
        out: [m, ...], C-contiguous, of the dtype of ``values``.
    """
    # Any mode but "raise" writes into `out` directly; rows were checked where they were given.
    values.take(rows, 0, out, "clip")


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


def suits_windows(values: Array, lengths: Int64, longest: int) -> bool:
    """Whether rows are padded sooner by :func:`copy_windows` than one by one.

    Args:
        values: [n, ...], what the rows are runs of.
        lengths: int64 [m], of each row.
        longest: the largest of them.
    """
    cells, total = longest * len(lengths), int(lengths.sum())
    return cells <= _WASTE * total and total * values[:1].nbytes < LOOP_BYTES * len(lengths)


def copy_windows(values: Array, starts: Int64, lengths: Int64, out: Array, slots: Int64, fill: Any) -> None:
    """``out[slots[i], :n] = values[starts[i] : starts[i] + n]`` and ``fill`` behind, with n of ``lengths[i]``.

    As many elements as the longest row has are copied from each start on, whatever they are: such windows are one
    strided view, which numpy indexes without an index for each element. What is too much is filled over. Where the
    rows lie one behind the other, as in a pass without shuffling, one mask tells where their elements go.

    Args:
        values: [n, ...], elements with a row of a batch being a run of them.
        starts: int64 [m], where each run starts.
        lengths: int64 [m], elements in each; none longer than ``longest``.
        out: [k, longest, ...] of the same dtype, C-contiguous.
        slots: int64 [m], which row of ``out`` each becomes.
        fill: what stands behind a row.
    """
    longest = out.shape[1]
    if len(slots) and _follow(slots, 1) and _follow(starts, lengths[:-1]):
        first, start = int(slots[0]), int(starts[0])
        rows = out[first : first + len(slots)]
        rows[...] = fill
        rows[_within(lengths, longest)] = values[start : start + int(lengths.sum())]
        return
    width = math.prod(out.shape[2:])
    flat, wide = np.ascontiguousarray(values).reshape(-1), longest * width
    rows = out.reshape(len(out), wide)
    # A window that would lead out of the values: its row alone.
    fits = starts + longest <= len(values)
    for start, length, slot in zip(
        starts[~fits].tolist(), lengths[~fits].tolist(), slots[~fits].tolist(), strict=True
    ):
        out[slot, :length] = values[start : start + length]
    starts_fit, slots_fit = (starts, slots) if fits.all() else (starts[fits], slots[fits])
    if len(starts_fit) and wide:
        windows = np.ndarray((len(flat) - wide + 1, wide), flat.dtype, flat, 0, flat.strides * 2)
        step = max(1, _BY_WAY // (wide * flat.itemsize))
        for at in range(0, len(starts_fit), step):
            rows[slots_fit[at : at + step]] = windows[starts_fit[at : at + step] * width]
    if (lengths < longest).any():
        behind = ~_within(lengths * width, wide)
        if len(slots) == len(out) and (slots == np.arange(len(out))).all():
            np.copyto(rows, fill, where=behind)
        else:
            kept = rows[slots]
            np.copyto(kept, fill, where=behind)
            rows[slots] = kept


def _follow(numbers: Int64, steps: Int64 | int) -> bool:
    """Whether each number is the one before it and a step."""
    return bool((np.diff(numbers) == steps).all())


def _within(lengths: Int64, wide: int) -> npt.NDArray[np.bool_]:
    """Which cells of rows so wide have an element: bool [rows, wide]."""
    # Narrow numbers are compared several at once.
    narrow: Any = np.int16 if wide < 2**15 else np.int64
    within: npt.NDArray[np.bool_] = np.arange(wide, dtype=narrow) < lengths.astype(narrow)[:, None]
    return within
