"""Hashes of the rows of a batch, their padding, and shingles of their tokens, to compare rows between runs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from rankfeed.diagnostics.batch_columns import Column
from rankfeed.diagnostics.keys import bytes_of, hashes

#: Tokens of a shingle, and of how many hashes one is kept.
_TOKENS, _KEPT = 12, 16
#: Factors of the hash of a shingle.
_FACTORS = np.random.default_rng(12).integers(1 << 62, size=_TOKENS, dtype=np.uint64) | np.uint64(1)


def ends(column: Column, *, first: bool = False) -> list[tuple[int, int, int]]:
    """Of rows that may be padded: hash of the last element, of the row without its trailing run, run length."""
    found = []
    for row in column:
        line = row[::-1] if first else row
        same = (line == line[-1]).reshape(len(line), -1).all(axis=1)
        run = len(line) if same.all() else int(np.argmin(same[::-1]))
        body = row[run:] if first else row[: len(row) - run]
        found.append((xxh3_64_intdigest(bytes_of(line[-1])), xxh3_64_intdigest(bytes_of(body)), run))
    return found


def shingles_of(row: npt.NDArray[Any]) -> list[int]:
    """Hashes of every 12 consecutive tokens, of which one in 16 is kept."""
    if len(row) < _TOKENS:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(row.astype(np.uint64), _TOKENS)
    mixed = (windows * _FACTORS).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    kept: list[int] = mixed[mixed % _KEPT == 0].tolist()
    return kept


def hashed(fields: Mapping[str, Column]) -> dict[str, list[int]]:
    """Hashes of the rows of each field that can be hashed."""
    return {name: keys for name, column in fields.items() if (keys := hashes(column)) is not None}


def unmasked(fields: Mapping[str, Column]) -> dict[str, Column]:
    """Fields without the ends of rows that a mask of zeros and ones, or lengths, leave out."""
    arrays = {name: column for name, column in fields.items() if isinstance(column, np.ndarray) and column.size}
    masks: dict[tuple[int, ...], tuple[str, npt.NDArray[Any]]] = {}  # by the shape that they are for
    for name, array in arrays.items():
        if array.ndim == 2 and array.dtype.kind in "iub" and np.isin(array, (0, 1)).all():
            kept = array.astype(bool) if array[:, 0].any() else array == 0  # ones may be padding
            if (kept[:, 1:] != kept[:, :-1]).sum(axis=1).max(initial=0) <= 1:
                masks.setdefault(array.shape, (name, kept))
        elif array.ndim == 1 and array.dtype.kind in "iu" and "len" in name.lower():
            shapes = (other.shape[:2] for other in arrays.values() if other.ndim > 1)
            for shape in (shape for shape in shapes if array.max() <= shape[1]):
                masks[shape] = name, np.arange(shape[1]) < array[:, None]
    result = dict(fields)
    for name, array in arrays.items():
        mask, kept = masks.get(array.shape[:2], (name, array))
        if mask != name:
            result[name] = [row[places] for row, places in zip(array, kept, strict=True)]
    return result


def all_ends(found: Mapping[str, Column]) -> dict[str, list[tuple[int, int, int]]]:
    """Both ends of the columns that may be padded: ``name`` and ``name<``."""
    padded = {
        name: column
        for name, column in found.items()
        if isinstance(column, np.ndarray) and column.dtype.kind in "iufb" and 2 <= column.ndim <= 3 and column.size
    }
    last = {name: ends(column) for name, column in padded.items()}
    return last | {f"{name}<": ends(column, first=True) for name, column in padded.items()}


def tokens(found: Mapping[str, Column]) -> tuple[list[int], int]:
    """Shingles and number of tokens of the integer sequences, of the most varied field if there are several."""
    sequences: list[list[npt.NDArray[Any]]] = []
    for column in found.values():
        rows = [row for row in column if isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype.kind in "iu"]
        if len(rows) == len(column) and rows and max(map(len, rows)) >= 2 * _TOKENS:
            sequences.append(rows)
    best = max(sequences, key=lambda rows: len(np.unique(np.concatenate(rows))), default=[])
    trimmed = [row[: len(row) - run + 1] for row in best if len(row) for _, _, run in ends([row])]
    return [key for row in trimmed for key in shingles_of(row)], sum(map(len, trimmed))
