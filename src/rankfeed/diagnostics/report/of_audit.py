"""What an audit found, as a page."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rankfeed.diagnostics.audit.epochs import EpochReport, RankEpoch
from rankfeed.diagnostics.audit.report import AuditReport
from rankfeed.diagnostics.report.binning import ROWS, Int64, edges, names_of, place_in
from rankfeed.diagnostics.report.page import Bars, Figure, Listing, Mark, Page, Part, Series, Span, Timeline, Word

#: Bars beside each other, signs on a chart, samples and epochs that are listed.
_BARS, _MARKS, _LISTED, _EPOCHS = 24, 200, 100, 24


def of_audit(report: AuditReport, *, title: str = "An audit") -> Page:
    """The page of an audit.

    Args:
        report: what was found.
        title: what was audited.

    Examples:
        >>> import rankfeed as rf
        >>> page = of_audit(rf.audit([{"sample_id": [0, 1, 1]}], universe=3))
        >>> page.word, page.verdict
        ('bad', '2 findings: not every sample came once an epoch, in equal steps.')
    """
    worst = max(report.epochs, key=lambda each: _faults(each, report.facts.cut))
    findings = [str(each) for each in report.findings if each.severity != "note"]
    last = report.epochs[-1]
    facts = {
        "ranks": f"{report.world_size:,}",
        "epochs": f"{len(report.epochs):,}",
        "deliveries": f"{sum(each.samples for each in report.epochs):,}",
        "different samples": f"{max(each.unique for each in report.epochs):,}",
        "delivered again": f"{sum(each.repeated for each in report.epochs):,}",
        "missing": "not known"
        if last.missing is None
        else f"{sum(each.missing or 0 for each in report.epochs):,}",
        "samples known by": {"ids": "their ids", "content": "their content", "none": "nothing"}[report.facts.keys],
    }
    if report.facts.cut:
        facts["ended"] = "before the end of the epoch (max_steps)"
    figures: list[Figure] = [_delivered(report), _who(worst), _sizes(worst)]
    steps: list[Figure] = [_by_rank(worst, "steps"), _by_rank(worst, "samples")]
    parts = [Part("What was delivered", figures), Part(f"Shares of the ranks, epoch {worst.epoch}", steps)]
    if worst.repeats or worst.missing_keys or worst.unknown_keys:
        parts.append(Part(f"Samples to look at, epoch {worst.epoch}", [_samples(worst)]))
    sentence = {
        "sound": "Every sample came once an epoch, in equal steps on all ranks.",
        "diseased": f"{len(findings)} finding{'s' * (len(findings) != 1)}: not every sample came once an epoch, "
        "in equal steps.",
    }.get(report.verdict, "Not proven: see the findings.")
    words: dict[str, Word] = {"sound": "good", "diseased": "bad"}
    word = words.get(report.verdict, "look")
    return Page(title=title, word=word, verdict=sentence, facts=facts, findings=findings, parts=parts)


def _faults(epoch: EpochReport, cut: bool) -> tuple[int, int]:
    """How many samples are wrong, and by how many steps ranks differ."""
    missing = 0 if cut else epoch.missing or 0
    return epoch.repeated + missing + (epoch.unknown or 0), max(epoch.steps) - min(epoch.steps)


def _delivered(report: AuditReport) -> Bars:
    epochs = report.epochs[:_EPOCHS]
    shown = (
        "" if len(epochs) == len(report.epochs) else f" Shown are the first {len(epochs)} of {len(report.epochs)}."
    )
    return Bars(
        title="Samples by epoch",
        caption="A sound epoch is one bar of one colour: every sample once." + shown,
        axis="epoch",
        labels=[str(each.epoch) for each in epochs],
        series=[
            Series("delivered the first time", [float(each.unique) for each in epochs]),
            Series("delivered again", [float(each.repeated) for each in epochs]),
            Series("missing", [float(each.missing or 0) for each in epochs]),
        ],
        unit="samples",
        stacked=True,
    )


def _who(epoch: EpochReport) -> Timeline:
    """Ranks x steps: how long each rank had batches, and where repeated samples were found."""
    ranks = edges(len(epoch.ranks), ROWS)
    most = max(epoch.steps)
    names = _rank_names(epoch.ranks, ranks)
    spans, marks = [], []
    for row, (low, high) in enumerate(pairwise(ranks.tolist())):
        least = min(each.steps for each in epoch.ranks[low:high])
        spans.append(Span(row, 0.0, float(least), f"rank {names[row]}: {least:,} steps"))
        if least < most:
            marks.append(Mark(row, float(least), "killed", f"ends here; others go on to step {most:,}"))
    found = {
        (int(place_in(ranks, [place])[0]), interval * epoch.interval, count)
        for place, each in enumerate(epoch.ranks)
        for interval, count in enumerate(each.repeated)
        if count
    }
    every = [Mark(row, float(step), "again", f"{count:,} again from here") for row, step, count in sorted(found)]
    marks += every[:: max(1, -(-len(every) // max(1, _MARKS - len(marks))))]
    named = " Crosses: steps that deliver samples again."
    several = (
        "" if len(names) == len(epoch.ranks) else " Several ranks share a row: the one with the fewest steps."
    )
    return Timeline(
        title=f"Who had batches when, epoch {epoch.epoch}",
        caption="A row that ends early is a rank that a collective would wait for."
        + several
        + (named if found else ""),
        axis="step",
        row_axis="rank",
        rows=names,
        spans=spans,
        marks=marks[:_MARKS],
    )


def _rank_names(ranks: Sequence[RankEpoch], cuts: Int64) -> list[str]:
    numbers = [each.rank for each in ranks]
    return (
        names_of(cuts)
        if numbers == list(range(len(numbers)))
        else [str(numbers[low]) for low in cuts[:-1].tolist()]
    )


def _by_rank(epoch: EpochReport, what: str) -> Bars:
    cuts = edges(len(epoch.ranks), _BARS)
    numbers = [getattr(each, what) for each in epoch.ranks]
    groups = [numbers[low:high] for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)]
    least = [float(min(group)) for group in groups]
    most = [float(max(group)) for group in groups]
    one_each = len(groups) == len(numbers)
    series = [Series(what, least)] if one_each else [Series("least", least), Series("most", most)]
    even = "all the same" if min(numbers) == max(numbers) else f"from {min(numbers):,} to {max(numbers):,}"
    return Bars(
        title=f"{what.capitalize()} of each rank",
        caption=f"{even.capitalize()}." + ("" if one_each else " Several ranks share a bar."),
        axis="rank",
        labels=_rank_names(epoch.ranks, cuts),
        series=series,
        unit=what,
    )


def _sizes(epoch: EpochReport) -> Bars:
    counts: dict[int, int] = {}
    for each in epoch.ranks:
        for size, count in each.batch_sizes.items():
            counts[size] = counts.get(size, 0) + count
    sizes = np.array(sorted(counts), np.int64)
    cuts = sizes[edges(len(sizes), 12)[:-1]] if len(sizes) else sizes
    totals = [0.0] * len(cuts)
    for size in sizes.tolist():
        totals[int(np.searchsorted(cuts, size, side="right")) - 1] += counts[size]
    together = len(cuts) < len(sizes)
    return Bars(
        title=f"Batches by size, epoch {epoch.epoch}",
        caption="How many batches there were of each number of samples, on all ranks together.",
        axis="samples in a batch",
        labels=[f"{size:,}" + (" –" if together else "") for size in cuts.tolist()],
        series=[Series("batches", [*totals])],
        unit="batches",
    )


def _samples(epoch: EpochReport) -> Listing:
    rows = [[each.key, f"came {each.times} times", "; ".join(map(str, each.places))] for each in epoch.repeats]
    rows += [[key, "did not come", ""] for key in epoch.missing_keys]
    rows += [[key, "should not have come", ""] for key in epoch.unknown_keys]
    return Listing(
        title="Examples",
        caption=f"The first of those that came more than once ({epoch.repeated:,} deliveries too many), that did "
        f"not come ({epoch.missing or 0:,}) and that should not have ({epoch.unknown or 0:,}).",
        header=["sample", "what", "where"],
        rows=rows[:_LISTED],
        wide=True,
    )
