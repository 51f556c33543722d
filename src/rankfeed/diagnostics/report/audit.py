"""The report of an audit. Only this module of the report knows what an `AuditReport` consists of."""

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
    epochs = report.epochs
    worst = max(epochs, key=_faults)
    number = f"epoch {worst.epoch}"
    known = all(each.missing is not None for each in epochs)
    facts: dict[str, str | int] = {
        "ranks": len(epochs[0].ranks),
        "epochs": len(epochs),
        "deliveries": sum(each.samples for each in epochs),
        "different samples": max(each.unique for each in epochs),
        "delivered again": sum(each.repeated for each in epochs),
        "missing": sum(each.missing or 0 for each in epochs) if known else "not known",
        "samples identified by": report.facts.identified_by,
    }
    sections = [
        Section("What was delivered", [_by_epoch(epochs), *_repeats(worst)]),
        Section(f"Shares of the ranks, {number}", [_by_rank(worst, "steps"), _by_rank(worst, "samples")]),
    ]
    if worst.repeats or worst.missing_keys or worst.unknown_keys:
        sections.append(Section(f"Samples, {number}", [_samples(worst)]))
    return Page(
        title=title or "An audit",
        verdict=report.verdict,
        summary=f"{worst}.",
        facts=facts,
        findings=report.findings,
        sections=sections,
    )


def _faults(epoch: Any) -> tuple[int, int]:
    """How many samples are wrong, and by how many steps ranks differ."""
    return epoch.repeated + (epoch.missing or 0) + (epoch.unknown or 0), max(epoch.steps) - min(epoch.steps)


def _by_epoch(epochs: Sequence[Any]) -> Figure:
    first = epochs[:_BARS]
    caption = "A sound epoch is one bar of one colour." + shown(len(first), len(epochs), "epochs")
    series = {
        "delivered once": [each.unique for each in first],
        "delivered again": [each.repeated for each in first],
        "missing": [each.missing or 0 for each in first],
    }
    return bars("Samples by epoch", caption, "epoch", "samples", [str(each.epoch) for each in first], series)


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
        longest = max(each.steps for each in group)
        for number, start in enumerate(range(0, longest, epoch.interval)):
            end = min(start + epoch.interval, longest)
            again = sum(each.repeated[number] for each in group if number < len(each.repeated))
            rows.append([start, end, _label(group), round(again / (end - start) / len(group), 3)])
    caption = "Deliveries of samples that had been delivered before, on this or another rank."
    columns = ["step from", "step to", "rank", "in a batch"]
    return [heatmap(f"Where samples repeat, epoch {epoch.epoch}", caption, columns, rows, epoch.batch_size)]


def _label(group: Sequence[Any]) -> str:
    first, last = group[0].rank, group[-1].rank
    return str(first) if first == last else f"{first} to {last}"


def _by_rank(epoch: Any, what: str) -> Figure:
    groups = _groups(epoch.ranks, _BARS)
    numbers = [[getattr(each, what) for each in group] for group in groups]
    least, most = min(map(min, numbers)), max(map(max, numbers))
    caption = "All the same." if least == most else f"From {least:,} to {most:,}."
    if what == "steps" and least < most:
        caption += " A collective in the steps beyond the least waits forever."
    series = {
        "every rank": [min(each) for each in numbers],
        "the rank with the most": [max(each) - min(each) for each in numbers],
    }
    return bars(f"{what.capitalize()} of each rank", caption, "rank", what, list(map(_label, groups)), series)


def _samples(epoch: Any) -> Figure:
    rows: list[list[Cell]] = [
        [each.key, f"came {each.times} times", "; ".join(map(str, each.places))] for each in epoch.repeats
    ]
    rows += [[key, "did not come", ""] for key in epoch.missing_keys]
    rows += [[key, "is not in the universe", ""] for key in epoch.unknown_keys]
    caption = (
        f"Examples of {epoch.repeated:,} repeated deliveries, {epoch.missing or 0:,} missing samples and "
        f"{epoch.unknown or 0:,} unknown ones."
    )
    return Figure("Examples", caption, ["sample", "what", "where"], rows[:_LISTED])
