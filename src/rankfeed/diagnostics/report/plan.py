"""The page of a plan: which rank reads what and when, the last steps, and the padding of ragged columns."""

from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from typing import Any, cast

import numpy as np

from rankfeed.diagnostics.report.charts import bars, heatmap, lines
from rankfeed.diagnostics.report.page import Cell, Figure, Page, Section, shown
from rankfeed.diagnostics.verify.plans import poor_mixture, reading_of, verify_plan
from rankfeed.plan import Schedule, Tail, measure_quality
from rankfeed.sources.source import Source

#: Rows and columns of a heat map, the most samples of a column that are examined, and the least of a cell: with
#: fewer it shows little but chance.
_ROWS, _COLUMNS, _DRAWN, _IN_A_CELL = 32, 60, 4096, 16
#: Ranks times steps up to which all deliveries are counted.
_DELIVERIES = 200_000
#: Batches that are examined, columns whose padding is drawn, and the least number of samples of which a shuffle
#: can be judged.
_BATCHES, _RAGGED, _ENOUGH = 48, 4, 100


def plan_page(
    schedule: Schedule,
    *,
    workers: int = 0,
    source: Source | None = None,
    title: str = "",
    progress: Callable[[float], None] = lambda share: None,
) -> Page:
    """The report of a plan and of the ranks that read it, in constant memory in the number of samples.

    Args:
        schedule: the steps of any rank.
        workers: of each rank; they change no batch.
        source: the data; some batches of the rank are read if it has ragged columns.
        title: of the report; if left out, it names the number of samples.
        progress: called with the share of the deliveries that are counted.

    Raises:
        SourceError: the data cannot be read.

    Examples:
        >>> import rankfeed as rf
        >>> schedule = rf.Schedule(rf.Plan(100), batch_size=5, topology=rf.Topology(world_size=2))
        >>> print(plan_page(schedule).summary.partition(";")[0])
        100 deliveries counted: 0 missing, 0 repeated
    """
    plan: Any = schedule.plan
    ranks, steps, tail = schedule.world_size, len(schedule), cast(Tail, schedule.tail)
    options = {"batch_size": schedule.batch_size, "epoch": schedule.epoch, "start": schedule.start}
    count = ranks * steps <= _DELIVERIES
    deliveries = verify_plan(plan, ranks=ranks, tail=tail, count=count, progress=progress, **options)
    facts = {
        "samples": plan.num_samples,
        "blocks": plan.num_blocks,
        "ranks": ranks,
        "workers of each rank": workers,
        "batch of a rank": schedule.batch_size,
        "batch of all ranks": schedule.global_batch_size,
        "steps of each rank": steps,
        "epoch": schedule.epoch,
        "consumed before": schedule.start,
        "tail": tail,
        "shuffle": plan.shuffle,
        "seed": plan.seed,
        "lanes": plan.lanes,
    }
    findings, sections = deliveries.findings, []
    if steps:
        sizes = {"batch_size": schedule.batch_size, "world_size": ranks, "epoch": schedule.epoch}
        quality, reading = measure_quality(plan, **sizes), reading_of(plan, source, **sizes)
        facts |= {
            "classes of a rank's batch, sorted data": f"{quality.classes:.0%} of a global shuffle",
            "blocks of a rank's batch": f"{quality.blocks:.1f}",
            "blocks that a rank reads": "not known" if reading.share is None else f"{reading.share:.1%}",
            "blocks that a rank decodes": reading.decoded,
        }
        findings += poor_mixture(plan, quality)
        sections.append(Section("Who reads what", [_places(schedule), _last_steps(schedule)]))
    if steps and plan.num_samples >= _ENOUGH:
        sections.append(Section("How well it is shuffled", [_times(schedule)]))
    fields = {} if source is None else source.fields
    ragged = [name for name, field in fields.items() if field.kind == "ragged"][:_RAGGED]
    if steps and source is not None and ragged:
        sections.append(Section("Padding", [_padding(schedule, source, ragged)]))
    return Page(
        title=title or f"Plan of {plan.num_samples:,} samples",
        verdict=deliveries.verdict,
        summary=str(deliveries),
        facts=facts,
        findings=findings,
        sections=sections,
    )


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of [0, count), evenly spaced, the first and the last among them."""
    spread: list[int] = np.linspace(0, count - 1, min(count, most), dtype=np.int64).tolist()
    return spread


def _places(first: Schedule) -> Figure:
    """Ranks x steps: where in the data set a batch begins."""
    plan = first.plan
    ranks, steps = _spread(first.world_size, _ROWS), _spread(len(first), _COLUMNS)
    rows: list[list[Cell]] = []
    for rank in ranks:
        for step, end in pairwise([*steps, len(first)]):
            low = first.position_after(step - 1) if step else first.start
            size = first.position_after(step) - low
            begin, stop = (index * size // first.world_size for index in (rank, rank + 1))
            if stop - begin < size:  # a whole step has an order of its own
                stop = min(stop, begin + 1)
            ids = plan.step_ids(first.epoch, np.array([low]), size, begin, stop)[0, :1]
            if len(ids):
                place = 100 * int(ids[0]) / plan.num_samples
                rows.append([step, end, str(rank), round(place, 2)])
    caption = (
        "Place in the data set of the first sample of a batch. Equal rows: ranks read the same places. A slope "
        "from light to dark: data are read in stored order."
    )
    caption += shown(len(ranks), first.world_size, "ranks") + shown(len(steps), len(first), "steps")
    columns = ["step from", "step to", "rank", "% of the data set"]
    return heatmap("Where each rank reads", caption, columns, rows, 100)


def _times(first: Schedule) -> Figure:
    """Parts of the data set x parts of the epoch: how many samples of one are read in the other."""
    total, length = first.plan.num_samples, first.end - first.start
    cells = max(1, length // _IN_A_CELL)
    rows = min(_ROWS, total, max(2, int(sqrt(cells / 2))))
    parts = np.linspace(0, total, rows + 1, dtype=np.int64)
    times = np.linspace(first.start, first.end, min(_COLUMNS, length, max(2, cells // rows)) + 1, dtype=np.int64)
    draw = np.random.default_rng(3)
    table: list[list[Cell]] = []
    least = float("inf")
    for low, high in pairwise(times.tolist()):
        positions = np.arange(low, high) if high - low <= _DRAWN else draw.integers(low, high, _DRAWN)
        counts = np.histogram(first.plan.sample_ids(first.epoch, positions), parts)[0]
        even = np.diff(parts) / total * len(positions)
        least = min(least, even.min())
        shares = (counts / even).round(3).tolist()
        table += [[low, high, f"{part:,}", share] for part, share in zip(parts.tolist(), shares, strict=False)]
    chance = 2 * sqrt((1 - 1 / rows) / least)
    caption = (
        "How often a part of the data set is read in a part of the epoch; 1 is an even share. With "
        f"{least:,.0f} samples examined in a cell, 95% of the cells of a perfect shuffle are between "
        f"{max(0.0, 1 - chance):.1f} and {1 + chance:.1f}."
    )
    columns = ["position in the epoch from", "position in the epoch to", "samples from", "times an even share"]
    darkest = max(2.0, *(row[3] for row in table if isinstance(row[3], float)))
    return heatmap("When each part of the data set is read", caption, columns, table, darkest)


def _last_steps(first: Schedule) -> Figure:
    steps = range(max(0, len(first) - 3), len(first))
    shares = [first.shares(step) for step in steps]
    least = [min(real for _, real in share) for share in shares]
    padding = [max(rows for rows, _ in share) - real for share, real in zip(shares, least, strict=True)]
    caption = "Last steps, on the rank with the fewest samples; ranks differ by one at most."
    labels, series = [f"{step:,}" for step in steps], {"samples": least, "padding rows": padding}
    return bars("How the epoch ends", caption, "step", "rows of a rank", labels, series)


def _padding(schedule: Schedule, source: Source, names: list[str]) -> Figure:
    """Share of padding of some batches of a rank, evenly spaced over its steps."""
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    steps = _spread(len(schedule), _BATCHES)
    for step in steps:
        columns = source.fetch(schedule.batch(step)[schedule.valid(step)], names)
        for name in names:
            lengths = [len(row) for row in columns[name].rows()]
            padded = len(lengths) * max(lengths, default=0)
            series[name].append((step, 100 * (1 - sum(lengths) / max(1, padded))))
    caption = f"Share of a padded batch that is padding, in {len(steps)} batches of rank {schedule.rank}."
    return lines("Padding by batch", caption, "step", "% padding", series)
