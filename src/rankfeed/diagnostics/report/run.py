"""The page of a run from its ledgers. Only this module of the report knows what a `RunVerdict` consists of."""

from rankfeed.diagnostics.findings import Verdict
from rankfeed.diagnostics.report.charts import bars, spans
from rankfeed.diagnostics.report.page import Cell, Figure, Page, Section, shown
from rankfeed.diagnostics.verify.runs import LoaderRun, RunVerdict

#: Loaders, epochs and launches that are shown.
_LOADERS, _EPOCHS, _LAUNCHES = 4, 32, 50


def run_page(verdict: RunVerdict, title: str = "") -> Page:
    """The report of a run.

    Args:
        verdict: what `rankfeed.verify_run` returned.
        title: of the report; if left out, it names the folder of the ledgers.
    """
    loaders = verdict.loaders
    launches = max((len(loader.launches) for loader in loaders), default=0)
    again, missing = sum(loader.again for loader in loaders), sum(loader.missing for loader in loaders)
    facts = {
        "ledgers": verdict.ledgers,
        "loaders": len(loaders),
        "launches": launches,
        "epochs": max((len(loader.epochs) for loader in loaders), default=0),
        "delivered": sum(epoch.delivered for loader in loaders for epoch in loader.epochs),
        "missing": missing,
        "delivered again after a resume": again,
    }
    if unproven := sum(epoch.unproven_steps for loader in loaders for epoch in loader.epochs):
        facts["batches that may lack samples"] = unproven
    summary = {
        Verdict.SOUND: "No sample is missing up to where the job is.",
        Verdict.DISEASED: f"{missing:,} samples are missing." if missing else "Deliveries disagree.",
        Verdict.NOT_PROVEN: "Not everything could be shown.",
    }[verdict.verdict]
    return Page(
        title=title or f"Run {verdict.folder}",
        verdict=verdict.verdict,
        summary=summary if loaders else "No ledger has a delivery: no process reached its first step.",
        facts=facts,
        findings=verdict.findings,
        sections=[
            Section(loader.data[:80] or "A loader", [_launches(loader), _timeline(loader), _epochs(loader)])
            for loader in loaders[:_LOADERS]
        ],
    )


def _launches(loader: LoaderRun) -> Figure:
    began = min((launch["began_ns"] for launch in loader.launches), default=0)
    rows: list[list[Cell]] = []
    for index, launch in enumerate(loader.launches, 1):
        first, last = ((launch[name] - began) / 1e9 for name in ("began_ns", "ended_ns"))
        note = f"launch {index}: {launch['ranks']} ranks on {', '.join(launch['hosts'][:8])}"
        rows.append([str(index), first, last, _parity(index), note])
    last_rows = rows[-_LAUNCHES:]
    caption = "From the first to the last delivery of a launch, on any of its ranks."
    caption += shown(len(last_rows), len(rows), "launches")
    return spans("When the job ran", caption, "seconds", "launch", last_rows)


def _timeline(loader: LoaderRun) -> Figure:
    """Epochs x positions: the launch that delivered each part, and what is missing."""
    rows: list[list[Cell]] = []
    epochs = loader.epochs[:_EPOCHS]
    for epoch in epochs:
        for part in epoch.passes:
            note = f"launch {part['launch']}, {part['ranks']} ranks"
            rows.append([str(epoch.epoch), part["from"], part["to"], _parity(part["launch"]), note])
        rows += [[str(epoch.epoch), gap.low, gap.high, "missing", str(gap)] for gap in epoch.gaps]
    caption = "Positions of each epoch, by the launch whose delivery counts."
    caption += shown(len(epochs), len(loader.epochs), "epochs")
    return spans("Which launch delivered what", caption, "position", "epoch", rows)


def _parity(launch: int) -> str:
    """Successive launches differ in colour, however many there are."""
    return "odd launches" if launch % 2 else "even launches"


def _epochs(loader: LoaderRun) -> Figure:
    epochs = loader.epochs[:_EPOCHS]
    series = {
        "delivered once": [0 if epoch.unproven_steps else epoch.delivered for epoch in epochs],
        "went into batches that may lack samples": [
            epoch.delivered if epoch.unproven_steps else 0 for epoch in epochs
        ],
        "again after a resume": [epoch.again for epoch in epochs],
        "missing": [epoch.missing for epoch in epochs],
        "not reached or left out": [epoch.dropped + epoch.left_early + epoch.under_way for epoch in epochs],
    }
    caption = "Over all launches." + shown(len(epochs), len(loader.epochs), "epochs")
    return bars("Samples by epoch", caption, "epoch", "samples", [str(epoch.epoch) for epoch in epochs], series)
