"""The page of an audit. Only this module of the report knows what an `AuditReport` consists of."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rankfeed.diagnostics.report.charts import bars, heatmap
from rankfeed.diagnostics.report.page import Cell, Figure, Page, Section, shown

#: Bars of a chart, samples that are listed, and rows of a heat map.
_BARS, _LISTED, _ROWS = 24, 100, 32


def audit_page(report: Any, title: str = "") -> Page:  # the module of AuditReport imports this one
    """The report of an audit.

    Args:
        report: the `AuditReport` that `rankfeed.audit` returned.
        title: of the report.

    Examples:
        >>> import rankfeed as rf
        >>> audit_page(rf.audit([{"sample_id": [0, 1, 2]}], universe=3)).summary
        'epoch 0: 3 samples, 3 different, 0 missing, 0 repeated; 1 step a rank.'
    """
    epochs, first = report.epochs, report.epochs[:_BARS]
    # The epoch with the most wrong samples, or of those, whose ranks differ by the most steps.
    worst = max(
        epochs,
        key=lambda epoch: (
            epoch.repeated + (epoch.missing or 0) + (epoch.unknown or 0),
            max(epoch.steps) - min(epoch.steps),
        ),
    )
    epoch_name = f"epoch {worst.epoch}"
    is_counted = all(epoch.missing is not None for epoch in epochs)
    facts: dict[str, str | int] = {
        "ranks": len(epochs[0].ranks),
        "epochs": len(epochs),
        "deliveries": sum(epoch.samples for epoch in epochs),
        "different samples": max(epoch.unique for epoch in epochs),
        "delivered again": sum(epoch.repeated for epoch in epochs),
        "missing": sum(epoch.missing or 0 for epoch in epochs) if is_counted else "not known",
        "samples identified by": report.facts.identified_by,
    }
    caption = "A sound epoch is one bar of one colour." + shown(len(first), len(epochs), "epochs")
    series = {
        "delivered once": [epoch.unique for epoch in first],
        "delivered again": [epoch.repeated for epoch in first],
        "missing": [epoch.missing or 0 for epoch in first],
    }
    labels = [str(epoch.epoch) for epoch in first]
    by_epoch = bars("Samples by epoch", caption, "epoch", "samples", labels, series)
    sections = [
        Section("What was delivered", [by_epoch, *_repeats(worst)]),
        Section(f"Shares of the ranks, {epoch_name}", [_by_rank(worst, "steps"), _by_rank(worst, "samples")]),
    ]
    if worst.repeats or worst.missing_keys or worst.unknown_keys:
        sections.append(Section(f"Samples, {epoch_name}", [_samples(worst)]))
    return Page(
        title=title or "An audit",
        verdict=report.verdict,
        summary=f"{worst}.",
        facts=facts,
        findings=report.findings,
        sections=sections,
    )


def _groups(ranks: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """Neighbours among the ranks that share a row or a bar."""
    cuts = np.linspace(0, len(ranks), min(len(ranks), most) + 1, dtype=int).tolist()
    return [ranks[low:high] for low, high in pairwise(cuts)]


def _repeats(epoch: Any) -> list[Figure]:
    """Ranks x steps: the part of the deliveries that repeats a sample."""
    if not epoch.repeated:
        return []
    rows: list[list[Cell]] = []
    for group in _groups(epoch.ranks, _ROWS):
        longest = max(rank.steps for rank in group)
        for interval, start in enumerate(range(0, longest, epoch.interval)):
            end = min(start + epoch.interval, longest)
            again = sum(rank.repeated[interval] for rank in group if interval < len(rank.repeated))
            rows.append([start, end, _label(group), round(again / (end - start) / len(group), 3)])
    caption = "Deliveries of samples that had been delivered before, on this or another rank."
    columns = ["step from", "step to", "rank", "in a batch"]
    return [heatmap(f"Where samples repeat, epoch {epoch.epoch}", caption, columns, rows, epoch.batch_size)]


def _label(group: Sequence[Any]) -> str:
    first, last = group[0].rank, group[-1].rank
    return str(first) if first == last else f"{first} to {last}"


def _by_rank(epoch: Any, unit: str) -> Figure:
    groups = _groups(epoch.ranks, _BARS)
    numbers = [[getattr(rank, unit) for rank in group] for group in groups]
    least, most = min(map(min, numbers)), max(map(max, numbers))
    caption = "All the same." if least == most else f"From {least:,} to {most:,}."
    if unit == "steps" and least < most:
        caption += " A collective in the steps beyond the least waits forever."
    series = {
        "every rank": [min(counts) for counts in numbers],
        "the rank with the most": [max(counts) - min(counts) for counts in numbers],
    }
    return bars(f"{unit.capitalize()} of each rank", caption, "rank", unit, list(map(_label, groups)), series)


def _samples(epoch: Any) -> Figure:
    rows: list[list[Cell]] = [
        [sample.key, f"came {sample.times} times", "; ".join(map(str, sample.places))] for sample in epoch.repeats
    ]
    rows += [[key, "did not come", ""] for key in epoch.missing_keys]
    rows += [[key, "is not in the universe", ""] for key in epoch.unknown_keys]
    caption = (
        f"Examples of {epoch.repeated:,} repeated deliveries, {epoch.missing or 0:,} missing samples and "
        f"{epoch.unknown or 0:,} unknown ones."
    )
    return Figure("Examples", caption, ["sample", "what", "where"], rows[:_LISTED])
