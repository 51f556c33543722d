"""The report of a plan: arithmetic, and the lengths of some batches if the data have ragged columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns.columns import Ragged
from rankfeed.diagnostics.report.charts import bars, heatmap, lines
from rankfeed.diagnostics.report.page import Cell, Figure, Page, Section, sentences
from rankfeed.diagnostics.report.sampling import edges, picks
from rankfeed.diagnostics.report.shuffle import quality
from rankfeed.diagnostics.verify.plans import PlanVerdict, verify_plan
from rankfeed.plan import Schedule, Tail
from rankfeed.plan.plan import Int64
from rankfeed.plan.schedule import SampleOrder, sorted_by_lane
from rankfeed.topology import Topology

#: Rows and columns of a heat map. Up to COUNTED samples are counted; of more, DRAWN samples of each column.
ROWS, COLUMNS, COUNTED, DRAWN = 32, 60, 1 << 20, 4096
#: Samples in a cell, at least: with fewer it shows little but chance.
_IN_A_CELL = 16
#: Of `Plan.describe`.
_DESCRIBED = ("shuffle", "seed", "lanes")
#: Ranks times steps up to which all deliveries are counted.
_DELIVERIES = 200_000
#: Batches, bytes and columns that are read for their lengths.
_BATCHES, _BYTES, _RAGGED = 48, 256 << 20, 4


@dataclass(frozen=True)
class PlannedJob:
    """A plan and the job that reads it: the subject of a report.

    Attributes:
        plan: the order of an epoch, of ids from 0 to ``num_samples - 1``.
        blocks: samples of each block, as they were given to the plan.
        ranks, batch_size, epoch, start, tail: as of `Schedule`.
        workers: of each rank; they change no batch.
        source: the data; some batches of rank 0 are read if it has ragged columns.
    """

    plan: SampleOrder
    blocks: int | Sequence[int] | npt.NDArray[np.integer]
    ranks: int
    batch_size: int
    workers: int = 0
    epoch: int = 0
    start: int = 0
    tail: Tail = "even"
    source: Any = None

    def schedule(self) -> Schedule:
        """Of rank 0."""
        options: dict[str, Any] = {"batch_size": self.batch_size, "epoch": self.epoch, "start": self.start}
        topology = Topology(rank=0, world_size=self.ranks, local_rank=0, local_world_size=self.ranks)
        return Schedule(self.plan, topology=topology, tail=self.tail, **options)

    def starts(self) -> Int64:
        """Where blocks begin, and the number of samples at the end."""
        sizes = np.atleast_1d(np.asarray(self.blocks, np.int64))
        return np.concatenate([[0], np.cumsum(sizes[sizes > 0])])


def plan_page(job: PlannedJob, title: str, progress: Callable[[float], None]) -> Page:
    """The report of a plan, in constant memory in the number of samples."""
    plan, first, starts = job.plan, job.schedule(), job.starts()
    options: dict[str, Any] = {"ranks": job.ranks, "batch_size": job.batch_size, "epoch": job.epoch}
    small = job.ranks * len(first) <= _DELIVERIES
    found = verify_plan(plan, **options, start=job.start, tail=job.tail, count=small, progress=progress)
    describe = getattr(plan, "describe", None)
    described: dict[str, Any] = describe() if describe else {}
    facts = {
        "samples": f"{plan.num_samples:,}",
        "blocks": f"{len(starts) - 1:,}",
        "ranks": f"{job.ranks:,}",
        "workers of each rank": f"{job.workers:,}",
        "batch of a rank": f"{job.batch_size:,}",
        "batch of all ranks": f"{first.global_batch_size:,}",
        "steps of each rank": f"{len(first):,}",
        "epoch": f"{job.epoch:,}",
        "consumed before": f"{job.start:,}",
        "tail": job.tail,
        **{name: str(described[name]) for name in _DESCRIBED if name in described},
    }
    sections = []
    if len(first):
        sections.append(Section("Who reads what, and when", [_places(job, first), _times(job, first)]))
    if plan.num_samples > 1:
        sections.append(Section("How well it is shuffled", _shuffle(job, starts, first.global_batch_size)))
    if len(first):
        sections.append(Section("Padding, and the end of the epoch", [_last_steps(first), *_padding(job, first)]))
    return Page(
        title=title or f"Plan of {plan.num_samples:,} samples",
        verdict=found.verdict,
        summary=_summary(job, len(first), found),
        facts=facts,
        findings=sentences(found.findings),
        sections=sections,
    )


def _summary(job: PlannedJob, steps: int, found: PlanVerdict) -> str:
    if found.sound is False:
        return "Samples are missing or come twice, or ranks take different steps."
    due = job.plan.num_samples - job.start - found.left_out
    which = f"Each of the {due:,} samples left" if job.start else f"Each of {due:,} samples"
    ranks = f"each of {job.ranks:,} ranks" if job.ranks > 1 else "one rank"
    rest = f"; tail=drop leaves out {found.left_out:,} samples" if found.left_out else ""
    once = f"{which} comes exactly once, in {steps:,} equal steps on {ranks}{rest}."
    return once if found.counted else f"{once} This was examined for {found.deliveries:,} deliveries, not for all."


def _places(job: PlannedJob, first: Schedule) -> Figure:
    """Ranks x steps: where in the data set a batch begins."""
    ranks, steps = picks(job.ranks, ROWS).tolist(), picks(len(first), COLUMNS).tolist()
    rows: list[list[Cell]] = []
    for rank in ranks:
        for step, end in zip(steps, [*steps[1:], len(first)], strict=True):
            position = _first_position(first, rank, step)
            if len(position):
                place = 100 * int(job.plan.sample_ids(job.epoch, position)[0]) / job.plan.num_samples
                rows.append([step, end, str(rank), round(place, 2)])
    some = f" {len(ranks):,} of {job.ranks:,} ranks and {len(steps):,} of {len(first):,} steps are shown."
    caption = (
        "Place in the data set of the first sample of a batch. Equal rows: ranks read the same places. "
        "A slope from light to dark: data are read in stored order."
    )
    caption += "" if (len(ranks), len(steps)) == (job.ranks, len(first)) else some
    columns = ["step from", "step to", "rank", "% of the data set"]
    return heatmap("Where each rank reads", caption, columns, rows, 100)


def _first_position(schedule: Schedule, rank: int, step: int) -> Int64:
    """The first position of a rank's share of a step, if it has one: of any rank, in constant time."""
    low = schedule.position_after(step - 1) if step else schedule.start
    size = schedule.position_after(step) - low
    first, last = (number * size // schedule.world_size for number in (rank, rank + 1))
    return sorted_by_lane(low, low + size, schedule.plan.lanes, first, min(last, first + 1))


def _times(job: PlannedJob, first: Schedule) -> Figure:
    """Parts of the data set x parts of the epoch: how many samples of one are read in the other."""
    total, length = job.plan.num_samples, first.end - first.start
    counted = total <= COUNTED
    cells = max(1, length // _IN_A_CELL) if counted else ROWS * COLUMNS
    rows = min(ROWS, max(2, int(sqrt(cells / 2))))
    parts, times = edges(total, rows), edges(length, max(2, min(COLUMNS, cells // rows))) + first.start
    draw = np.random.default_rng(3)
    table: list[list[Cell]] = []
    expected = []
    for low, high in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        positions = np.arange(low, high) if counted else draw.integers(low, high, min(DRAWN, high - low))
        counts = np.histogram(job.plan.sample_ids(job.epoch, positions), parts)[0]
        even = np.diff(parts) / total * len(positions)
        expected.append(float(even.min()))
        shares = (counts / even).round(3).tolist()
        table += [[low, high, f"{part:,}", share] for part, share in zip(parts[:-1].tolist(), shares, strict=True)]
    chance = 2 * sqrt((1 - 1 / rows) / min(expected))
    caption = (
        "How often a part of the data set is read in a part of the epoch; 1 is an even share. With "
        f"{min(expected):,.0f} samples {'' if counted else 'examined '}in a cell, 95% of the cells of a perfect "
        f"shuffle are between {max(0.0, 1 - chance):.1f} and {1 + chance:.1f}."
    )
    columns = ["position in the epoch from", "position in the epoch to", "samples from", "times an even share"]
    darkest = max(2.0, *(row[3] for row in table if isinstance(row[3], float)))
    return heatmap("When each part of the data set is read", caption, columns, table, darkest)


def _shuffle(job: PlannedJob, starts: Int64, batch: int) -> list[Figure]:
    found = quality(lambda positions: job.plan.sample_ids(job.epoch, positions), starts, batch)
    correlations = {
        "this order": [(lag, round(each, 4)) for lag, each in found.correlations.items()],
        "chance, at most": [(lag, round(found.chance, 4)) for lag in found.correlations],
        "chance, at least": [(lag, round(-found.chance, 4)) for lag in found.correlations],
    }
    rows: list[list[Cell]] = [
        ["distance of neighbours, % of the data set", found.distance * 100, found.perfect_distance * 100],
        ["correlation of neighbours", next(iter(found.correlations.values())), 0],
        ["blocks in a global batch", found.blocks, found.perfect_blocks],
    ]
    return [
        lines(
            "What a sample predicts of later ones",
            "Correlation of the place of a sample in the data set with that of one that comes later. "
            "A perfect shuffle is at 0, but for chance.",
            "positions later",
            "correlation",
            correlations,
            log=True,
        ),
        Figure(
            "Compared with a perfect shuffle",
            f"{found} Means over neighbours and batches of the order.",
            ["figure", "this order", "perfect shuffle"],
            [[name, *(float(f"{each:.4g}") for each in values)] for name, *values in rows],
        ),
    ]


def _last_steps(first: Schedule) -> Figure:
    last = range(max(0, len(first) - 3), len(first))
    shares = [first.shares(step) for step in last]
    least = [min(real for _, real in each) for each in shares]
    padding = [max(rows for rows, _ in each) - real for each, real in zip(shares, least, strict=True)]
    alike = all(len({real for _, real in each}) == 1 for each in shares)
    on = "the same on all ranks" if alike else "on the rank with the fewest samples; ranks differ by one at most"
    series = {"samples": least, "padding rows": padding}
    labels = [f"{step:,}" for step in last]
    return bars("How the epoch ends", f"Last steps, {on}.", "step", "rows of a rank", labels, series, stacked=True)


def _padding(job: PlannedJob, first: Schedule) -> list[Figure]:
    """Share of padding of some batches of rank 0, evenly spaced over its steps."""
    fields = {} if job.source is None else job.source.fields
    names = [name for name, field in fields.items() if field.kind == "ragged"][:_RAGGED]
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in names}
    nbytes = 0
    for step in picks(len(first), _BATCHES).tolist() if names else ():
        columns = job.source.fetch(first.batch(step)[first.valid(step)], names)
        for name in names:
            column = columns[name]
            lengths = column.lengths if isinstance(column, Ragged) else [len(row) for row in column.rows()]
            padded = len(lengths) * int(max(lengths, default=0))
            found[name].append((step, round(100 * (1 - float(sum(lengths)) / padded), 3) if padded else 0.0))
            nbytes += column.nbytes
        if nbytes > _BYTES:
            break
    if not names:
        return []
    means = ", ".join(f"{name} {np.mean([value for _, value in points]):.0f}%" for name, points in found.items())
    caption = (
        f"Share of a padded batch that is padding, in {len(found[names[0]])} batches of rank 0. Mean: {means}."
    )
    return [lines("Padding by batch", caption, "step", "% padding", found)]
