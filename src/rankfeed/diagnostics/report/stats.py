"""The page of a run's rates and waiting times, from snapshots of ``loader.stats()`` that a job wrote to files."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from rankfeed.diagnostics.findings import Finding, rows_not_proven, verdict_of
from rankfeed.diagnostics.report.charts import lines
from rankfeed.diagnostics.report.page import Figure, Page, Section
from rankfeed.errors import CorruptError, SourceError
from rankfeed.storage.commit import decodable
from rankfeed.storage.file_errors import os_errors

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
    unproven_samples: Count = 0
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
    """Snapshots from a file of JSON lines; an incomplete last line is ignored (the job was killed while writing).

    Raises:
        SourceError: the file cannot be read, or is empty.
        CorruptError: a line is no snapshot.
    """
    with os_errors(SourceError, "the snapshots cannot be read", path):
        content = Path(path).read_bytes()
    expected = "lines of json.dumps(loader.stats())"
    try:
        snapshots = msgspec.json.Decoder(StatsSnapshot).decode_lines(content[: content.rfind(b"\n") + 1])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptError("a line is no snapshot", expected=expected, found=str(error), where=path) from error
    if not snapshots:
        raise SourceError("there are no snapshots", expected=expected, where=path)
    return snapshots


def stats_page(snapshots: Mapping[str, Sequence[StatsSnapshot]], title: str = "") -> Page:
    """The report of rates, waiting, padding, memory and cache.

    Args:
        snapshots: of each rank, in their order (see `read_stats`).
        title: of the report.
    """
    tables = {name: _continued(rank_snapshots) for name, rank_snapshots in snapshots.items()}
    ends = np.array([table[-1] for table in tables.values()])
    total = dict(zip(_NAMES, ends.sum(axis=0).tolist(), strict=True))
    waited = min(1.0, total["waited_seconds"] / max(total["seconds"], _INSTANT))
    facts: dict[str, str | int] = {
        "ranks with snapshots": len(tables),
        "samples": int(total["samples"]),
        "steps of a rank": int(ends[:, 0].max()),
        "samples a second, all ranks": round((ends[:, 1] / np.maximum(ends[:, 2], _INSTANT)).sum()),
    }
    findings: list[Finding] = []
    if unproven := int(total["unproven_samples"]):
        facts["samples in batches that may lack some"] = unproven
        findings.append(rows_not_proven("a collate_fn or batch_transform", f"{unproven:,} samples"))
    figures = []
    for figure, caption, unit, part, whole in _RATIOS:
        if total[whole] or whole == "seconds":
            percent = unit.startswith("%")
            values = {name: _ratio(table, part, whole, percent) for name, table in tables.items()}
            figures.append(_lines(figure, caption, unit, values))
            if percent:
                facts[figure.lower()] = f"{min(1.0, total[part] / max(total[whole], _INSTANT)):.1%}"
    memory = {name: (table[:, 2], table[:, -1] / 2**20) for name, table in tables.items()}
    if not all(np.isnan(values).all() for _, values in memory.values()):
        caption = "Memory that belongs to a rank's process alone. A lasting slope is a leak."
        figures.append(_lines("Private memory", caption, "MiB", memory))
    limits = ": loading limits this job." if waited > _WAITED else ", so loading does not limit this job."
    verdict = verdict_of(findings) if findings else None  # rates prove nothing
    if waited > _WAITED:
        shares = {name: table[-1, 3] / max(table[-1, 2], _INSTANT) for name, table in tables.items()}
        most = max(shares, key=lambda name: shares[name])
        findings.append(
            Finding(
                "waits-for-data",
                "warning",
                f"training waited for data for {waited:.0%} of the time",
                (f"{most} waited most: {min(1.0, shares[most]):.0%} of its time",),
                "the stage with the most seconds in loader.stats() limits it: more workers, processes for "
                'transforms in Python (worker_kind="process"), or data written for reading in place '
                "(rankfeed.write)",
            )
        )
    return Page(
        title=title or "Rates of a run",
        verdict=verdict,
        summary=f"Training waited for data for {waited:.0%} of the time{limits}",
        facts=facts,
        findings=findings,
        sections=[Section("Rates and waiting", figures)],
    )


def _continued(snapshots: Sequence[StatsSnapshot]) -> Floats:
    """A row for each snapshot that is drawn; a loader that was made to resume counts from 0."""
    table = np.array([msgspec.structs.astuple(snapshot) for snapshot in snapshots], float)
    counts = table[:, :-1]  # the memory is no count
    restarted = (np.diff(counts[:, [0, 2]], axis=0) < 0).any(axis=1, keepdims=True)  # steps or seconds
    counts[1:] += np.cumsum(restarted * counts[:-1], axis=0)
    return table[np.linspace(0, len(table) - 1, min(len(table), _POINTS), dtype=int)]


def _ratio(table: Floats, part: str, whole: str, percent: bool) -> tuple[Floats, Floats]:
    """Times, and the growth of one count by that of another since the snapshot before."""
    grown = np.diff(table, axis=0, prepend=0)
    numerator, denominator = grown[:, _NAMES.index(part)], grown[:, _NAMES.index(whole)]
    ratios = np.full(len(table), np.nan)
    np.divide(numerator, denominator, out=ratios, where=denominator > _INSTANT)
    return table[:, 2], np.clip(100 * ratios, 0, 100) if percent else ratios


def _lines(title: str, caption: str, unit: str, values: Mapping[str, tuple[Floats, Floats]]) -> Figure:
    """A line for each rank; of many ranks the least, the median and the most."""
    if len(values) > _RANKS:
        caption += f" Of {len(values):,} ranks: least, median and most."
        times = max((x for x, _ in values.values()), key=lambda x: float(x[-1]))
        table = np.array([np.interp(times, x, y, right=np.nan) for x, y in values.values()])
        with warnings.catch_warnings(action="ignore"):  # times without any value
            quantiles = np.nanquantile(table, [0, 0.5, 1], axis=0, method="lower")
        values = {name: (times, line) for name, line in zip(("least", "median", "most"), quantiles, strict=True)}
    series = {name: zip(x.tolist(), y.tolist(), strict=True) for name, (x, y) in values.items()}
    return lines(title, caption, "seconds", unit, series)
