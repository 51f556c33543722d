"""What padding will cost: the lengths of some batches, read from the data."""

from typing import Any

from rankfeed.columns.columns import Ragged
from rankfeed.diagnostics.report.binning import picks
from rankfeed.plan import Schedule

#: Batches that are read, and bytes after which no more are.
BATCHES, BYTES = 48, 256 << 20


def padding_of(source: Any, schedule: Schedule) -> dict[str, list[float]]:
    """By ragged column, the share of padding of some batches of a rank, evenly spaced over its steps.

    Args:
        source: with ragged columns, or without: then nothing is read.
        schedule: of the rank.

    Raises:
        SourceError: the data cannot be read.

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"x": [1.0] * length} for length in (1, 3, 2, 2)])
        >>> plan = rf.Plan(4, shuffle="none")
        >>> schedule = rf.Schedule(plan, batch_size=2, topology=rf.Topology(rank=0, world_size=1))
        >>> [round(share, 2) for share in padding_of(source, schedule)["x"]]
        [0.33, 0.0]
    """
    names = [name for name, field in source.fields.items() if field.kind == "ragged"]
    found: dict[str, list[float]] = {name: [] for name in names}
    nbytes = 0
    for step in picks(len(schedule), BATCHES).tolist() if names else ():
        columns = source.fetch(schedule.batch(step)[schedule.valid(step)], names)
        for name in names:
            column = columns[name]
            lengths = column.lengths if isinstance(column, Ragged) else [len(row) for row in column.rows()]
            full = len(lengths) * int(max(lengths, default=0))
            found[name].append(1 - float(sum(lengths)) / full if full else 0.0)
            nbytes += column.nbytes
        if nbytes > BYTES:
            break
    return found
