"""The report of a run's rates, from snapshots of ``loader.stats()`` that a job wrote to files."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from rankfeed.diagnostics.report.charts import lines
from rankfeed.diagnostics.report.page import Figure, Page, Section
from rankfeed.diagnostics.report.sampling import picks
from rankfeed.errors import CorruptError, SourceError
from rankfeed.storage.commit import decodable

#: Snapshots of a chart, ranks that have a line each, and the share of waiting that is worth attention.
_POINTS, _RANKS, _WAITED = 120, 4, 0.1
#: Seconds (or bytes) below which no ratio is computed.
_INSTANT = 1e-9

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Floats = npt.NDArray[np.float64]


@decodable
class StatsSnapshot(msgspec.Struct, frozen=True):
    """The part of ``loader.stats()`` that is drawn; other fields are ignored."""

    steps: Count
    samples: Count
    seconds: Seconds
    waited_seconds: Seconds
    padding_bytes: Count = 0
    padded_bytes: Count = 0
    cache_hits: Count = 0
    cache_lookups: Count = 0
    private_bytes: Count | None = None


_NAMES = StatsSnapshot.__struct_fields__
#: Title, caption, unit, and the two counts whose growth between two snapshots is divided.
_RATIOS = (
    ("Samples a second", "Of each rank, between two snapshots.", "samples/s", "samples", "seconds"),
    ("Time waited for data", "Of the time between two snapshots.", "% of the time", "waited_seconds", "seconds"),
    ("Padding", "Of the bytes of ragged columns.", "% of bytes", "padding_bytes", "padded_bytes"),
    ("Cache hits", "Of the reads between two snapshots.", "% of reads", "cache_hits", "cache_lookups"),
)


def read_stats(path: str | os.PathLike[str]) -> list[StatsSnapshot]:
    """Snapshots from a file of JSON lines.

    Raises:
        SourceError: the file cannot be read, or is empty.
        CorruptError: a line is no snapshot; an incomplete last line is ignored (the job was killed while writing).
    """
    try:
        rows = Path(path).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise SourceError("the snapshots cannot be read", found=error.strerror or error, where=path) from error
    found = []
    for number, row in enumerate(rows, 1):
        try:
            if row.strip():
                found.append(msgspec.json.decode(row, type=StatsSnapshot))
        except (msgspec.DecodeError, RecursionError) as error:
            if number == len(rows) and not row.endswith(b"\n"):
                break
            raise CorruptError(
                "the line is no snapshot of a loader",
                expected="json.dumps(loader.stats())",
                found=str(error),
                where=f"{path}, line {number}",
            ) from error
    if not found:
        raise SourceError("there are no snapshots", expected="lines of json.dumps(loader.stats())", where=path)
    return found


def stats_page(snapshots: Mapping[str, Sequence[StatsSnapshot]], title: str = "") -> Page:
    """The report of the rates, waiting, padding, memory and cache of each rank, in the order of its snapshots."""
    tables = {name: _continued(each) for name, each in snapshots.items()}
    ends = np.array([table[-1] for table in tables.values()])
    total = dict(zip(_NAMES, ends.sum(axis=0).tolist(), strict=True))
    seconds, samples = ends[:, _NAMES.index("seconds")], ends[:, _NAMES.index("samples")]
    long = seconds > _INSTANT
    waited = min(1.0, total["waited_seconds"] / total["seconds"]) if long.any() else 0.0
    facts = {
        "ranks with snapshots": f"{len(tables):,}",
        "samples": f"{total['samples']:,.0f}",
        "steps of a rank": f"{ends[:, 0].max():,.0f}",
        "samples a second, all ranks": f"{(samples[long] / seconds[long]).sum():,.0f}",
    }
    figures = []
    for figure, caption, unit, part, whole in _RATIOS:
        if total[whole] or whole == "seconds":
            percent = unit.startswith("%")
            values = {name: _ratio(table, part, whole, percent) for name, table in tables.items()}
            figures.append(_lines(figure, caption, unit, values))
            if percent:
                facts[figure.lower()] = f"{min(1.0, total[part] / max(total[whole], _INSTANT)):.1%}"
    memory = {name: (_thinned(table)[:, 2], _thinned(table)[:, -1] / 2**20) for name, table in tables.items()}
    if not all(np.isnan(each).all() for _, each in memory.values()):
        caption = "Memory that belongs to a rank's process alone. A lasting slope is a leak."
        figures.append(_lines("Private memory", caption, "MiB", memory))
    limits = ": loading limits this job." if waited > _WAITED else ", so loading does not limit this job."
    return Page(
        title=title or "Rates of a run",
        verdict=None,
        summary=f"Training waited for data for {waited:.0%} of the time{limits}",
        facts=facts,
        findings=[],
        sections=[Section("Rates and waiting", figures)],
    )


def _continued(snapshots: Sequence[StatsSnapshot]) -> Floats:
    """A row for each snapshot, over all loaders of a rank: one that was made to resume counts from 0.

    Examples:
        >>> _continued([StatsSnapshot(5, 50, 1.0, 0.0), StatsSnapshot(2, 20, 0.5, 0.0)])[:, 1].tolist()
        [50.0, 70.0]
    """
    table = np.array([msgspec.structs.astuple(each) for each in snapshots], float)
    for row in range(1, len(table)):
        before = msgspec.structs.astuple(snapshots[row - 1])
        now = msgspec.structs.astuple(snapshots[row])
        if now[0] < before[0] or now[2] < before[2]:  # steps or seconds
            table[row:, :-1] += before[:-1]  # the memory is no count
    return table


def _thinned(table: Floats) -> Floats:
    return table[picks(len(table), _POINTS)]


def _ratio(table: Floats, part: str, whole: str, percent: bool) -> tuple[Floats, Floats]:
    """Times, and the growth of one count by that of another since the snapshot before."""
    table = _thinned(table)
    grown = np.diff(table, axis=0, prepend=0)
    some, of = grown[:, _NAMES.index(part)], grown[:, _NAMES.index(whole)]
    found = np.full(len(table), np.nan)
    np.divide(some, of, out=found, where=of > _INSTANT)
    return table[:, 2], np.clip(100 * found, 0, 100) if percent else found


def _lines(title: str, caption: str, unit: str, values: Mapping[str, tuple[Floats, Floats]]) -> Figure:
    """A line for each rank; of many ranks the least, the median and the most."""
    if len(values) > _RANKS:
        caption += f" Of {len(values):,} ranks: least, median and most."
        times = max((x for x, _ in values.values()), key=lambda x: float(x[-1]))
        table = np.array([np.interp(times, x, y, right=np.nan) for x, y in values.values()])
        columns = [column[~np.isnan(column)] for column in table.T]
        values = {
            name: (
                times,
                np.array([np.quantile(each, at, method="lower") if len(each) else np.nan for each in columns]),
            )
            for name, at in {"least": 0, "median": 0.5, "most": 1}.items()
        }
    series = {
        name: [
            (at, None if np.isnan(each) else float(f"{each:.6g}")) for at, each in zip(x.tolist(), y, strict=True)
        ]
        for name, (x, y) in values.items()
    }
    return lines(title, caption, "seconds", unit, series)
