"""Reading a whole source once, in order, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Columns, Field
from rankfeed.sources.source import Source

Int64 = npt.NDArray[np.int64]

#: Bytes and rows of a batch, about, and what a row of unknown length is taken for.
_BATCH_BYTES, _MOST_ROWS, _UNKNOWN = 1 << 20, 4096, 4096


def read_in_order(
    source: Source, columns: Sequence[str] | None, label: str, *, progress: bool
) -> Iterator[tuple[Int64, Columns]]:
    """All samples of a source: sample ids and their rows.

    Args:
        source: what to read.
        columns: names of those to read; None for all.
        label: what the bar says.
        progress: a bar on standard error while that is a terminal.

    Raises:
        SourceError: it cannot be read.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    size = len(source)
    rows = _rows([source.fields[name] for name in (source.fields if columns is None else columns)])
    console = Console(stderr=True)
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = not (progress and console.is_terminal)
    with Progress(*shown, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task(label, total=size)
        for first in range(0, size, rows):
            ids = np.arange(first, min(first + rows, size), dtype=np.int64)
            source.expect(np.arange(first, min(first + 4 * rows, size), dtype=np.int64), columns)
            yield ids, source.fetch(ids, columns)
            bar.update(task, advance=len(ids))


def _rows(fields: Sequence[Field]) -> int:
    row = sum(field.row_bytes() if field.kind == "dense" else _UNKNOWN for field in fields)
    return max(1, min(_MOST_ROWS, _BATCH_BYTES // max(1, row)))
