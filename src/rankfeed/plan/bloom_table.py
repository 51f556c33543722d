"""A multiset of sample ids in constant space whose difference to another one can be listed.

An invertible Bloom lookup table: each id is added to one cell of each of three rows, and a cell keeps the count,
the sum of ids and the sum of their hashes (modulo 2**64). Two tables are subtracted cell by cell, so that common
ids cancel. Up to a few hundred remaining ids can be listed: a cell with a single id reveals it, it is removed from
its other cells, and so on. So the check that every sample was delivered once takes a few kilobytes for 10^3
samples and for 10^12, and a failed check names the samples.

Sources: M. Goodrich and M. Mitzenmacher, "Invertible Bloom lookup tables" (2011); D. Eppstein et al., "What's the
difference? Efficient set reconciliation without prior context" (2011).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankfeed.plan.permutation import mix

_ROWS = 3
_CELLS = 256
_CHECK = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class MultisetDifference:
    """Difference of a multiset to the expected one, with multiplicity."""

    missing: int
    repeated: int
    exact: bool  # whether both numbers are exact; otherwise they are lower bounds
    ids: dict[int, int]  # the ids that differ and their surplus (negative if missing): all if exact, else some

    def __bool__(self) -> bool:
        return bool(self.missing or self.repeated)


@dataclass
class InvertibleBloomTable:
    """A multiset of sample ids in 18 KiB."""

    cells: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros((3, _ROWS, _CELLS), np.uint64))

    def add(self, sample_ids: npt.NDArray[np.int64]) -> None:
        """Add ids, with multiplicity: int64 array, none negative."""
        ids = np.asarray(sample_ids, np.int64).reshape(-1).view(np.uint64)
        _add(self.cells, ids, np.ones_like(ids))

    def merge(self, other: InvertibleBloomTable) -> None:
        """Add the ids of another table."""
        self.cells += other.cells

    @property
    def count(self) -> int:
        """Number of ids, with multiplicity."""
        return int(self.cells[0, 0].sum())

    def difference(self, expected: InvertibleBloomTable) -> MultisetDifference:
        """Missing and repeated ids, compared with ``expected``."""
        rest = self.cells - expected.cells
        found: dict[int, int] = {}
        while single := _singles(rest):
            for sample_id, count in single.items():
                found[sample_id] = found.get(sample_id, 0) + count
            counts = -np.array(list(single.values()), np.int64)
            _add(rest, np.array(list(single), np.uint64), counts.view(np.uint64))
        left = rest[0].view(np.int64)
        found = {sample_id: count for sample_id, count in sorted(found.items()) if count}
        missing = -sum(count for count in found.values() if count < 0)
        repeated = sum(count for count in found.values() if count > 0)
        missing += int(-np.minimum(left, 0).sum(axis=1).min())
        repeated += int(np.maximum(left, 0).sum(axis=1).max())
        return MultisetDifference(missing, repeated, not rest.any(), found)


def _add(cells: npt.NDArray[np.uint64], ids: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint64]) -> None:
    places, checks = _places(ids)
    for row in range(_ROWS):
        for layer, values in enumerate((counts, counts * ids, counts * checks)):
            np.add.at(cells[layer, row], places[row], values)


def _places(ids: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint64]]:
    """The cell of each id in each row, [rows, n], and its hash."""
    hashed = mix(ids)
    shifts = np.arange(_ROWS, dtype=np.uint64)[:, None] * np.uint64(16)
    return ((hashed >> shifts) % np.uint64(_CELLS)).astype(np.intp), mix(hashed ^ _CHECK)


def _singles(rest: npt.NDArray[np.uint64]) -> dict[int, int]:
    """Ids that are alone in one of their cells, with their counts."""
    row, cell = np.nonzero(rest[0])
    counts = rest[0, row, cell].view(np.int64)
    sign = np.sign(counts).view(np.uint64)
    size = np.abs(counts).view(np.uint64)
    ids = rest[1, row, cell] * sign // size
    places, checks = _places(ids)
    alone = (
        (rest[1, row, cell] == counts.view(np.uint64) * ids)
        & (rest[2, row, cell] == counts.view(np.uint64) * checks)
        & (places[row, np.arange(len(row))] == cell)
    )
    return dict(zip(ids[alone].tolist(), counts[alone].tolist(), strict=True))
