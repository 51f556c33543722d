"""The report of an audit. Only this module of the report knows what an `AuditReport` consists of."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rankfeed.diagnostics.findings import Verdict
from rankfeed.diagnostics.report.charts import bars, heatmap
from rankfeed.diagnostics.report.page import Cell, Figure, Page, Section, sentences
from rankfeed.diagnostics.report.sampling import edges

_SUMMARIES = {
    Verdict.SOUND: "Every sample came once an epoch, in equal steps on all ranks.",
    Verdict.DISEASED: "The deliveries are wrong: see the findings.",
    Verdict.NOT_PROVEN: "Nothing wrong was found, but not everything could be shown.",
}
#: Bars of a chart, samples and epochs that are listed, and rows of a heat map.
_BARS, _LISTED, _EPOCHS, _ROWS = 24, 100, 24, 32


def audit_page(report: Any, title: str = "") -> Page:
    """The report of an `AuditReport`, whose type is not imported, since its module imports this one."""
    epochs = report.epochs
    worst = max(epochs, key=_faults)
    known = epochs[-1].missing is not None
    facts = {
        "ranks": f"{len(epochs[0].ranks):,}",
        "epochs": f"{len(epochs):,}",
        "deliveries": f"{sum(each.samples for each in epochs):,}",
        "different samples": f"{max(each.unique for each in epochs):,}",
        "delivered again": f"{sum(each.repeated for each in epochs):,}",
        "missing": f"{sum(each.missing or 0 for each in epochs):,}" if known else "not known",
        "samples identified by": {"ids": "their ids", "content": "their content"}.get(
            report.facts.keys, "nothing"
        ),
        **({"ended": "before the end of the epoch (max_steps)"} if report.facts.cut else {}),
    }
    sections = [
        Section("What was delivered", [_by_epoch(epochs), *_repeats(worst), _sizes(worst)]),
        Section(
            f"Shares of the ranks, epoch {worst.epoch}", [_by_rank(worst, "steps"), _by_rank(worst, "samples")]
        ),
    ]
    if worst.repeats or worst.missing_keys or worst.unknown_keys:
        sections.append(Section(f"Samples, epoch {worst.epoch}", [_samples(worst)]))
    return Page(
        title=title or "An audit",
        verdict=report.verdict,
        summary=_SUMMARIES[report.verdict],
        facts=facts,
        findings=sentences(report.findings),
        sections=sections,
    )


def _faults(epoch: Any) -> tuple[int, int]:
    """How many samples are wrong, and by how many steps ranks differ."""
    steps = [each.steps for each in epoch.ranks]
    return epoch.repeated + (epoch.missing or 0) + (epoch.unknown or 0), max(steps) - min(steps)


def _by_epoch(epochs: Sequence[Any]) -> Figure:
    shown = epochs[:_EPOCHS]
    some = "" if len(shown) == len(epochs) else f" The first {len(shown)} of {len(epochs):,} epochs are shown."
    caption = "All deliveries are counted. A sound epoch is one bar of one colour." + some
    series = {
        "delivered once": [each.unique for each in shown],
        "delivered again": [each.repeated for each in shown],
        "missing": [each.missing or 0 for each in shown],
    }
    labels = [str(each.epoch) for each in shown]
    return bars("Samples by epoch", caption, "epoch", "samples", labels, series, stacked=True)


def _repeats(epoch: Any) -> list[Figure]:
    """Ranks x steps: the part of the deliveries that repeats a sample; of many ranks several share a row."""
    if not epoch.repeated:
        return []
    ranks = epoch.ranks
    rows: list[list[Cell]] = []
    for low, high in pairwise(edges(len(ranks), _ROWS).tolist()):
        group = ranks[low:high]
        longest = max(each.steps for each in group)
        for number, start in enumerate(range(0, longest, epoch.interval)):
            end = min(start + epoch.interval, longest)
            again = sum(each.repeated[number] for each in group if number < len(each.repeated))
            share = sum(
                each.samples * (min(end, each.steps) - start) / each.steps for each in group if each.steps > start
            )
            rows.append([start, end, str(ranks[low].rank), round(min(100.0, 100 * again / max(share, 1)), 2)])
    several = " Several ranks share a row, labelled with the first of them." if len(ranks) > _ROWS else ""
    caption = "Deliveries of samples that had been delivered before, on this or another rank." + several
    columns = ["step from", "step to", "rank", "% of deliveries"]
    return [heatmap(f"Where samples repeat, epoch {epoch.epoch}", caption, columns, rows, 100)]


def _by_rank(epoch: Any, what: str) -> Figure:
    ranks = [each.rank for each in epoch.ranks]
    numbers = [getattr(each, what) for each in epoch.ranks]
    cuts = edges(len(ranks), _BARS).tolist()
    groups = [numbers[low:high] for low, high in pairwise(cuts)]
    caption = "All the same." if min(numbers) == max(numbers) else f"From {min(numbers):,} to {max(numbers):,}."
    if what == "steps" and min(numbers) < max(numbers):
        caption += " A collective in the steps beyond the least waits forever."
    series = {what: numbers}
    if len(groups) < len(ranks):
        caption += " Several ranks share a pair of bars, labelled with the first of them."
        series = {"least": [min(each) for each in groups], "most": [max(each) for each in groups]}
    labels = [str(ranks[low]) for low in cuts[:-1]]
    return bars(f"{what.capitalize()} of each rank", caption, "rank", what, labels, series)


def _sizes(epoch: Any) -> Figure:
    counts: Counter[int] = Counter()
    for each in epoch.ranks:
        counts.update(each.batch_sizes)
    shown = sorted(size for size, _ in counts.most_common(_BARS))
    some = (
        "" if len(shown) == len(counts) else f" The {len(shown)} most frequent of {len(counts):,} sizes are shown."
    )
    labels, series = [f"{size:,}" for size in shown], {"batches": [counts[size] for size in shown]}
    caption = "Batches of each number of samples, on all ranks together." + some
    return bars(f"Batches by size, epoch {epoch.epoch}", caption, "samples in a batch", "batches", labels, series)


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
