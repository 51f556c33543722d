"""Reading samples of a source to learn about it: all of them in order, or a few evenly spaced ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rankfeed._util.progress import progress_bar
from rankfeed.columns import Columns, Field
from rankfeed.sources.source import Source

Int64 = npt.NDArray[np.int64]

#: Samples that are read to learn the fields; more are read if these leave a type open (empty lists).
PROBES, MORE_PROBES = 8, 64

_BATCH_BYTES, _MOST_ROWS = 1 << 20, 4096
#: Assumed bytes of a row of unknown length.
_UNKNOWN_ROW = 4096


def probe_ids(size: int, count: int = PROBES) -> Int64:
    """Evenly spaced sample ids, beginning with 0: the same on every rank and after every resume.

    Examples:
        >>> probe_ids(1001).tolist(), probe_ids(3).tolist()
        ([0, 125, 250, 375, 500, 625, 750, 875], [0, 1, 2])
    """
    if size <= count:
        return np.arange(size)
    return np.arange(count) * (size - 1) // count


def scan(
    source: Source, columns: Sequence[str] | None, label: str, *, progress: bool
) -> Iterator[tuple[Int64, Columns]]:
    """All samples of a source in order, as (sample ids, rows); ``label`` is the text of the progress bar."""
    size = len(source)
    rows = _batch_rows([source.fields[name] for name in (source.fields if columns is None else columns)])
    with progress_bar(label, size, enabled=progress) as advance:
        for first in range(0, size, rows):
            ids = np.arange(first, min(first + rows, size), dtype=np.int64)
            source.expect(np.arange(first, min(first + 4 * rows, size), dtype=np.int64), columns)
            yield ids, source.fetch(ids, columns)
            advance(len(ids))


def _batch_rows(fields: Sequence[Field]) -> int:
    row_bytes = sum(field.row_bytes() if field.kind == "dense" else _UNKNOWN_ROW for field in fields)
    return max(1, min(_MOST_ROWS, _BATCH_BYTES // max(1, row_bytes)))
