"""What a plan will do, as a page: arithmetic alone, nothing is read."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankfeed.diagnostics.report.binning import COLUMNS, ROWS, Int64, edges, name_of, names_of, picks, place_in
from rankfeed.diagnostics.report.page import Bars, Figure, Grid, Lines, Mark, Page, Part, Series, Word
from rankfeed.diagnostics.report.shuffle import numpys
from rankfeed.diagnostics.report.shuffle_figures import shuffle_figures
from rankfeed.diagnostics.verify.plans import PlanVerdict
from rankfeed.plan import Schedule, Tail
from rankfeed.plan.schedule import SampleOrder, sorted_by_lane
from rankfeed.topology import Topology

#: Samples of an epoch that are all looked at; of longer ones, positions that stand for a stretch of time.
COUNTED, LOOKED_AT = 1 << 20, 4096
#: Batches whose blocks are counted, and signs on one chart.
_BATCHES, _MARKS = 256, 200


@dataclass(frozen=True)
class Asked:
    """A job: how a plan is read. Arguments as of `Schedule`; ``workers`` of each rank, which change no batch."""

    ranks: int
    batch_size: int
    workers: int = 0
    epoch: int = 0
    start: int = 0
    tail: Tail = "even"

    def schedule(self, plan: SampleOrder, rank: int) -> Schedule:
        """Of one rank."""
        return Schedule(
            plan,
            batch_size=self.batch_size,
            topology=Topology(rank=rank, world_size=self.ranks, local_rank=rank, local_world_size=self.ranks),
            epoch=self.epoch,
            start=self.start,
            tail=self.tail,
        )


def of_plan(
    plan: SampleOrder,
    blocks: int | Sequence[int] | npt.NDArray[np.integer],
    asked: Asked,
    verdict: PlanVerdict,
    *,
    title: str = "A plan",
    padding: Mapping[str, Sequence[float]] | None = None,
) -> Page:
    """The page of a plan, in constant memory in the number of samples.

    Args:
        plan: the order of an epoch, of ids from 0 to ``num_samples - 1``.
        blocks: samples of each block, as they were given to the plan.
        asked: how it is read.
        verdict: what `verify_plan` found.
        title: what the data are called.
        padding: by ragged column, the share of padding of some batches (see `padding_of`).

    Raises:
        PlanError: there is no such schedule.

    Examples:
        >>> from rankfeed.plan import Plan
        >>> from rankfeed.diagnostics import verify_plan
        >>> page = of_plan(Plan(100), 100, Asked(2, 8), verify_plan(Plan(100), ranks=2, batch_size=8))
        >>> page.word, page.verdict
        ('good', 'Each of 100 samples comes exactly once, in 7 equal steps on each of 2 ranks.')
    """
    sizes = np.atleast_1d(np.asarray(blocks, np.int64))
    starts = np.concatenate([[0], np.cumsum(sizes[sizes > 0])])
    first = asked.schedule(plan, 0)
    word, sentence = _verdict(plan, asked, first, verdict)
    facts = {
        "samples": f"{plan.num_samples:,}",
        "blocks": f"{len(sizes):,}",
        "ranks": f"{asked.ranks:,}",
        "workers of each rank": f"{asked.workers:,}",
        "batch of a rank": f"{asked.batch_size:,}",
        "batch of all ranks": f"{first.global_batch_size:,}",
        "steps of each rank": f"{len(first):,}",
        "epoch": f"{asked.epoch:,}",
        "end of the epoch": f"tail={asked.tail}",
    } | {
        name: str(fact)
        for name, fact in getattr(plan, "describe", dict)().items()
        if name in ("shuffle", "seed", "lanes")
    }
    if asked.start:
        facts["consumed before"] = f"{asked.start:,}"
    parts = []
    if len(first):
        reading: list[Figure] = [_places(plan, asked, first), _times(plan, asked, first, starts)]
        if len(starts) > 2:
            reading.append(_open_blocks(plan, asked, first, starts))
        parts.append(Part("Who reads what, and when", reading))
    if plan.num_samples > 1:
        mixed = shuffle_figures(plan, asked.epoch, starts, first.global_batch_size)
        parts.append(Part("How well it is shuffled", mixed))
    padded: list[Figure] = [_last_steps(first)] if len(first) else []
    if padding:
        padded.append(_padding(padding))
    if padded:
        parts.append(Part("Padding, and the end of the epoch", padded))
    found = [] if verdict.sound is not False else [f"{verdict.missing:,} missing, {verdict.repeated:,} repeated"]
    return Page(title=title, word=word, verdict=sentence, facts=facts, findings=found, parts=parts)


def _verdict(plan: SampleOrder, asked: Asked, first: Schedule, verdict: PlanVerdict) -> tuple[Word, str]:
    due = plan.num_samples - asked.start - verdict.left_out
    which = f"Each of {due:,} samples" if not asked.start else f"Each of the {due:,} samples that were left"
    ranks = f"each of {asked.ranks:,} ranks" if asked.ranks > 1 else "one rank"
    once = f"{which} comes exactly once, in {len(first):,} equal steps on {ranks}"
    if verdict.sound is False:
        return "bad", "This plan does not hold: samples are missing or come twice, or ranks take different steps."
    if not verdict.counted:
        once += f" (as far as {verdict.deliveries:,} deliveries that were looked at tell)"
    if verdict.left_out:
        return "look", f"{once}; tail=drop leaves out {verdict.left_out:,} samples."
    return "good", once + "."


def _places(plan: SampleOrder, asked: Asked, first: Schedule) -> Grid:
    """Ranks x steps: where in the data set a batch begins."""
    ranks, steps = picks(asked.ranks, ROWS), picks(len(first), COLUMNS)
    begins = [[_positions(first, rank, step, 1) for step in steps.tolist()] for rank in ranks.tolist()]
    ids = iter(plan.sample_ids(asked.epoch, np.concatenate([each for row in begins for each in row])).tolist())
    values = [[next(ids) / plan.num_samples * 100 if len(each) else None for each in row] for row in begins]
    shown = len(ranks) == asked.ranks and len(steps) == len(first)
    which = (
        ""
        if shown
        else f" Shown are {len(ranks)} of {asked.ranks:,} ranks and {len(steps)} of {len(first):,} steps."
    )
    return Grid(
        title="Where each rank reads",
        caption="How far into the data set the first sample of each batch lies. Rows alike: ranks that read the "
        "same places; a slope from light to dark: data read in their own order." + which,
        row_axis="rank",
        column_axis="step",
        rows=[str(rank) for rank in ranks.tolist()],
        columns=[name_of(step) for step in steps.tolist()],
        values=values,
        unit="% of the way through",
        low=0.0,
        high=100.0,
    )


def _times(plan: SampleOrder, asked: Asked, first: Schedule, starts: Int64) -> Grid:
    """Blocks x time: how many samples of each part of the data set are read in each part of the epoch."""
    parts = edges(len(starts) - 1, ROWS)
    by_block = len(starts) > 2
    bounds = starts[parts] if by_block else edges(plan.num_samples, ROWS)
    names = names_of(parts if by_block else bounds)
    times = edges(first.end - first.start, COLUMNS) + first.start
    counted = plan.num_samples <= COUNTED
    draw = np.random.default_rng(3)
    counts = np.zeros((len(names), len(times) - 1))
    delivered = np.zeros(plan.num_samples if counted else 0, np.int32)
    marks: list[Mark] = []
    for column, (low, high) in enumerate(zip(times[:-1].tolist(), times[1:].tolist(), strict=True)):
        some = np.arange(low, high) if counted else draw.integers(low, high, min(LOOKED_AT, high - low))
        ids = plan.sample_ids(asked.epoch, some)
        row = place_in(bounds, ids)
        share = np.bincount(row, minlength=len(names)) / max(1, len(some))
        counts[:, column] = share / (np.diff(bounds) / plan.num_samples)
        if counted:
            np.add.at(delivered, ids, 1)
            marks += [
                Mark(int(each), column, "again", "delivered again") for each in np.unique(row[delivered[ids] > 1])
            ]
    if counted and not first.start and first.end == plan.num_samples:
        gaps = np.unique(place_in(bounds, np.flatnonzero(delivered == 0)))
        marks += [Mark(int(each), len(times) - 2, "gap", "not delivered in this epoch") for each in gaps]
    seen = "all samples" if counted else f"{LOOKED_AT:,} samples drawn from each column"
    what = "blocks" if by_block else "samples"
    return Grid(
        title="When each part of the data set is read",
        caption=f"1 is an even share; a perfect shuffle shows 1 everywhere, but for chance. Counted are {seen}. "
        f"Rows are stretches of {what}, columns stretches of the epoch.",
        row_axis=what,
        column_axis="step",
        rows=names,
        columns=[name_of(_step_of(first, low)) for low in times[:-1].tolist()],
        values=[[float(value) for value in row] for row in counts.round(4)],
        unit="times an even share",
        low=0.0,
        high=max(2.0, float(counts.max())),
        marks=marks[:_MARKS],
    )


def _open_blocks(plan: SampleOrder, asked: Asked, first: Schedule, starts: Int64) -> Bars:
    """How many blocks a rank's batch is read from."""
    draw = np.random.default_rng(4)
    drawn = numpys(plan.num_samples)
    found: list[int] = []
    theirs: list[int] = []
    for rank in picks(asked.ranks, 16).tolist():
        for step in np.unique(draw.integers(0, len(first), _BATCHES // min(16, asked.ranks))).tolist():
            positions = _positions(first, rank, step, LOOKED_AT)
            for blocks, ids in (found, plan.sample_ids(asked.epoch, positions)), (theirs, drawn(positions)):
                blocks.append(len(np.unique(place_in(starts, ids))))
    least = min(*found, *theirs)
    cuts = least + edges(max(*found, *theirs) + 1 - least, 12)
    counts = [np.bincount(place_in(cuts, each), minlength=len(cuts) - 1).tolist() for each in (found, theirs)]
    return Bars(
        title="Blocks that a rank's batch is read from",
        caption=f"Few: reading is cheap. Many: batches are mixed well. {len(found)} batches looked at, beside as "
        "many of a shuffle of all samples by numpy."
        + (f" Of each the first {LOOKED_AT:,} samples count." if asked.batch_size > LOOKED_AT else ""),
        axis="different blocks in a batch",
        labels=names_of(cuts),
        series=[Series("this plan", counts[0]), Series("numpy", counts[1])],
        unit="batches",
    )


def _step_of(schedule: Schedule, position: int) -> int:
    """The step that a position of the epoch belongs to."""
    return bisect_right(range(len(schedule)), position, key=schedule.position_after)


def _positions(schedule: Schedule, rank: int, step: int, most: int) -> Int64:
    """The first positions of a rank's share of a step, without those that only fill: of any rank, at no cost."""
    low = schedule.position_after(step - 1) if step else schedule.start
    size = schedule.position_after(step) - low
    first, last = (number * size // schedule.world_size for number in (rank, rank + 1))
    return sorted_by_lane(low, low + size, schedule.plan.lanes, first, min(last, first + most))


def _last_steps(first: Schedule) -> Bars:
    last = range(max(0, len(first) - 3), len(first))
    shares = [first.shares(step) for step in last]
    least = [min(real for _, real in each) for each in shares]
    filled = [max(rows for rows, _ in each) - real for each, real in zip(shares, least, strict=True)]
    alike = all(len({real for _, real in each}) == 1 for each in shares)
    return Bars(
        title="How the epoch ends",
        caption="Rows of the last steps"
        + (
            ", the same on all ranks."
            if alike
            else ", on the rank with the fewest samples; ranks differ by one at most."
        ),
        axis="step",
        labels=[f"{step:,}" for step in last],
        series=[Series("samples", [*map(float, least)]), Series("rows that only fill", [*map(float, filled)])],
        unit="rows of a rank",
        stacked=True,
    )


def _padding(padding: Mapping[str, Sequence[float]]) -> Bars | Lines:
    most = dict(list(padding.items())[:4])
    count = max(map(len, most.values()))
    mean = ", ".join(f"{name} {sum(each) / max(1, len(each)):.0%}" for name, each in most.items())
    return Lines(
        title="Padding by batch",
        caption=f"Share of a padded batch that is padding, in {count} batches of rank 0 that were read. On "
        f"average: {mean}.",
        axis="batch that was looked at",
        x=[float(place) for place in range(count)],
        series=[Series(name, [round(100 * value, 2) for value in each]) for name, each in most.items()],
        unit="% padding",
    )
