"""The report of a run from its ledgers. Only this module of the report knows what a `RunVerdict` consists of."""

from rankfeed.diagnostics.findings import Verdict
from rankfeed.diagnostics.report.charts import bars, spans
from rankfeed.diagnostics.report.page import Cell, Figure, Page, Section, sentences
from rankfeed.diagnostics.verify.runs import LoaderRun, RunVerdict

#: Loaders, epochs, launches and notes that are shown.
_LOADERS, _EPOCHS, _LAUNCHES, _NOTES = 4, 32, 50, 50


def run_page(verdict: RunVerdict, title: str = "") -> Page:
    """The report of what `verify_run` found."""
    loaders = verdict.loaders
    launches = max((len(each.launches) for each in loaders), default=0)
    again, missing = sum(each.again for each in loaders), sum(each.missing for each in loaders)
    facts = {
        "ledgers": f"{verdict.ledgers:,}",
        "loaders": f"{len(loaders):,}",
        "launches": f"{launches:,}",
        "epochs": f"{max((len(each.epochs) for each in loaders), default=0):,}",
        "delivered": f"{sum(epoch.delivered for each in loaders for epoch in each.epochs):,}",
        "missing": f"{missing:,}",
        "delivered again after a resume": f"{again:,}",
    }
    sections = [
        Section(each.data[:80] or "A loader", [_launches(each), _timeline(each), _epochs(each)])
        for each in loaders[:_LOADERS]
    ]
    notes: list[list[Cell]] = [[str(each)] for each in verdict.findings if each.severity == "note"]
    if notes:
        sections.append(Section("Notes", [Figure("From the ledgers", "No faults.", ["note"], notes[:_NOTES])]))
    over = f"over {launches:,} launch{'es' * (launches != 1)}"
    repeated = f"; {again:,} samples came again after a resume" if again else ""
    summary = {
        Verdict.SOUND: f"No sample is missing up to where the job is, {over}{repeated}.",
        Verdict.DISEASED: f"{missing:,} samples are missing, {over}."
        if missing
        else f"Deliveries disagree, {over}.",
        Verdict.NOT_PROVEN: f"Not everything could be shown, {over}{repeated}.",
    }[verdict.verdict]
    if not loaders:
        summary = "No ledger has a delivery: no process reached its first step."
    return Page(
        title=title or f"Run {verdict.folder}",
        verdict=verdict.verdict,
        summary=summary,
        facts=facts,
        findings=sentences(verdict.findings),
        sections=sections,
    )


def _launches(loader: LoaderRun) -> Figure:
    began = min((each["began_ns"] for each in loader.launches), default=0)
    rows = []
    for number, each in enumerate(loader.launches, 1):
        first, last = ((each[name] - began) / 1e9 for name in ("began_ns", "ended_ns"))
        hosts = ", ".join(each["hosts"][:8])
        rows.append(
            (str(number), first, last, _parity(number), f"launch {number}: {each['ranks']} ranks on {hosts}")
        )
    some = "" if len(rows) <= _LAUNCHES else f" The last {_LAUNCHES} of {len(rows):,} launches are shown."
    caption = "From the first to the last delivery of a launch, on any of its ranks." + some
    return spans("When the job ran", caption, "seconds", "launch", rows[-_LAUNCHES:])


def _timeline(loader: LoaderRun) -> Figure:
    """Epochs x positions: the launch that delivered each part, and what is missing."""
    rows = []
    for epoch in loader.epochs[:_EPOCHS]:
        for each in epoch.passes:
            note = f"launch {each['launch']}, {each['ranks']} ranks"
            rows.append((str(epoch.epoch), each["from"], each["to"], _parity(each["launch"]), note))
        rows += [(str(epoch.epoch), gap.low, gap.high, "missing", str(gap)) for gap in epoch.gaps]
    caption = "Positions of each epoch, by the launch whose delivery counts (point at a bar for its number)."
    return spans(
        "Which launch delivered what", caption + _some(loader), "position", "epoch", rows, crosses="missing"
    )


def _parity(launch: int) -> str:
    """Successive launches differ in colour, however many there are."""
    return "odd launches" if launch % 2 else "even launches"


def _epochs(loader: LoaderRun) -> Figure:
    epochs = loader.epochs[:_EPOCHS]
    series = {
        "delivered once": [each.delivered for each in epochs],
        "again after a resume": [each.again for each in epochs],
        "missing": [each.missing for each in epochs],
        "not reached or left out": [each.dropped + each.left_early + each.under_way for each in epochs],
    }
    labels = [str(each.epoch) for each in epochs]
    caption = "Over all launches." + _some(loader)
    return bars("Samples by epoch", caption, "epoch", "samples", labels, series, stacked=True)


def _some(loader: LoaderRun) -> str:
    many = len(loader.epochs)
    return "" if many <= _EPOCHS else f" The first {_EPOCHS} of {many:,} epochs are shown."
