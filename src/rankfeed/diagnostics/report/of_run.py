"""What a job delivered over all its launches, from the ledgers of its ranks, as a page."""

from collections.abc import Sequence

from rankfeed.diagnostics.report.binning import ROWS, picks
from rankfeed.diagnostics.report.page import Bars, Figure, Listing, Mark, Page, Part, Series, Span, Timeline, Word
from rankfeed.diagnostics.verify.ledgers import Launch, LedgerPass, ParsedLedger, RankProcess, launches_of
from rankfeed.diagnostics.verify.run_verdict import EpochRun, LoaderRun, RunVerdict

#: Loaders and epochs that are drawn, signs on a chart, notes, and launches.
_LOADERS, _EPOCHS, _MARKS, _LISTED, _LAUNCHES = 4, 32, 400, 50, 50


def of_run(verdict: RunVerdict, read: Sequence[ParsedLedger]) -> Page:
    """The page of a job.

    Args:
        verdict: what `verify_run` found.
        read: the ledgers of the same folder.

    Examples:
        >>> import tempfile, rankfeed as rf
        >>> from rankfeed.diagnostics import verify_run
        >>> from rankfeed.diagnostics.verify.ledgers import read_folder
        >>> folder = tempfile.mkdtemp()
        >>> for batch in rf.Loader(rf.from_dataset([{"x": i} for i in range(10)]), batch_size=4, audit=folder):
        ...     pass
        >>> page = of_run(verify_run(folder), read_folder(folder, lambda share: None)[0])
        >>> page.word, page.verdict
        ('good', 'Nothing is missing up to where the job is, over 1 launch.')
    """
    streams: dict[str, list[LedgerPass]] = {}
    owner: dict[str, ParsedLedger] = {}
    for each in read:
        for went in each.passes:
            if owner.setdefault(went.content.process, each) is each:  # not a copy of another ledger
                streams.setdefault(went.stream, []).append(went)
    parts = []
    for loader, passes in list(zip(verdict.loaders, streams.values(), strict=False))[:_LOADERS]:
        figures: list[Figure] = [_when(passes), _what_counts(loader), _epochs(loader)]
        parts.append(Part(_shortened(loader.data) or "A loader", figures))
    launches = max((len(loader.launches) for loader in verdict.loaders), default=0)
    over = f"over {launches:,} launch{'es' * (launches != 1)}"
    again = sum(loader.again for loader in verdict.loaders)
    missing = sum(loader.missing for loader in verdict.loaders)
    facts = {
        "ledgers": f"{verdict.ledgers:,}",
        "loaders": f"{len(verdict.loaders):,}",
        "launches": f"{launches:,}",
        "epochs": f"{max((len(loader.epochs) for loader in verdict.loaders), default=0):,}",
        "delivered": f"{sum(epoch.delivered for loader in verdict.loaders for epoch in loader.epochs):,}",
        "missing": f"{missing:,}",
        "delivered again after a resume": f"{again:,}",
    }
    notes = [str(each) for each in verdict.findings if each.severity == "note"]
    if notes:
        rows = [[note] for note in notes[:_LISTED]]
        told = Listing(
            title="What else the ledgers say", caption="No faults.", header=["note"], rows=rows, wide=True
        )
        parts.append(Part("Notes", [told]))
    if not verdict.loaders:
        sentence = "No ledger says that anything was delivered: no process came to its first step."
    elif verdict.sound:
        sentence = f"Nothing is missing up to where the job is, {over}"
        sentence += f"; {again:,} samples came again after a resume." if again else "."
    elif verdict.sound is None:
        sentence = f"Not proven, {over}: see the findings."
    else:
        wrong = f"{missing:,} samples are missing" if missing else "Samples were delivered more than once"
        sentence = f"{wrong}, {over}."
    words: dict[str, Word] = {"sound": "good", "diseased": "bad"}
    return Page(
        title=f"Run: {verdict.folder}",
        word=words.get(verdict.verdict, "look"),
        verdict=sentence,
        facts=facts,
        findings=[str(each) for each in verdict.findings if each.severity != "note"],
        parts=parts,
    )


def _shortened(text: str, most: int = 80) -> str:
    """The beginning of a name, for a heading."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _when(passes: Sequence[LedgerPass]) -> Timeline:
    """Ranks x time: launches, ends and resumes, and what was delivered again."""
    launches = launches_of(passes)
    began = min(each.content.time_ns for each in passes)
    ranks = sorted({rank for launch in launches for rank in launch.processes})
    chosen = [ranks[place] for place in picks(len(ranks), ROWS).tolist()]
    rows = {rank: row for row, rank in enumerate(chosen)}
    spans: list[Span] = []
    marks: list[Mark] = []
    furthest: dict[int, int] = {}
    for number, launch in enumerate(launches):
        for rank, members in launch.processes.items():
            if rank in rows and number >= len(launches) - _LAUNCHES:
                _draw(members[0], number, rows[rank], began, furthest, spans, marks)
        furthest = _furthest(launch, furthest)
    shown = "" if len(chosen) == len(ranks) else f" Shown are {len(chosen)} of {len(ranks):,} ranks."
    if len(launches) > _LAUNCHES:
        shown += f" Shown are the last {_LAUNCHES} of {len(launches):,} launches."
    return Timeline(
        title="Who delivered when",
        caption="A bar for each launch of a rank. The part at its beginning that is higher was delivered before, "
        "and again after a resume (its length by the number of samples)." + shown,
        axis="seconds",
        row_axis="rank",
        rows=[str(rank) for rank in chosen],
        spans=spans,
        marks=marks[:_MARKS],
    )


def _draw(
    member: RankProcess,
    launch: int,
    row: int,
    began: int,
    furthest: dict[int, int],
    spans: list[Span],
    marks: list[Mark],
) -> None:
    """The spans and signs of a rank in a launch."""
    first, last = (member.first_ns - began) / 1e9, max(member.first_ns, member.last_ns) / 1e9 - began / 1e9
    steps = sum(each.steps for each in member.passes)
    who = f"launch {launch + 1}, {member.host} pid {member.pid}"
    spans.append(Span(row, first, last, f"{who}: {steps:,} steps in {len(member.passes)} passes"))
    if launch:
        marks.append(Mark(row, first, "resumed", f"{who} goes on"))
    known = dict(furthest)
    for went in member.passes:
        content = went.content
        end, before = went.positions(launch).reached(went.steps), known.get(content.epoch, 0)
        if end > content.start and before > content.start:
            share = min(1.0, (before - content.start) / (end - content.start))
            low = (content.time_ns - began) / 1e9
            high = low + max(0, went.last_ns - content.time_ns) / 1e9 * share
            what = f"{who}: epoch {content.epoch} from position {content.start:,} again, to {min(before, end):,}"
            spans.append(Span(row, low, high, what, again=True))
        known[content.epoch] = max(before, end)
    final = member.passes[-1]
    if final.positions(launch).reached(final.steps) < int(final.content.plan["samples"]):
        marks.append(
            Mark(row, last, "killed", f"{who} ends in epoch {final.content.epoch} after {final.steps:,} steps")
        )


def _furthest(launch: Launch, before: dict[int, int]) -> dict[int, int]:
    """By epoch, the position that launches so far came to on some rank."""
    found = dict(before)
    for member in launch.all():
        for went in member.passes:
            epoch = went.content.epoch
            found[epoch] = max(found.get(epoch, 0), went.positions(0).reached(went.steps))
    return found


def _what_counts(loader: LoaderRun) -> Timeline:
    """Epochs x positions: which launch delivered what in the end, and what is missing."""
    epochs = loader.epochs[:_EPOCHS]
    spans = [
        Span(row, float(each["from"]), float(each["to"]), f"launch {each['launch']}, {each['ranks']} ranks")
        for row, epoch in enumerate(epochs)
        for each in epoch.passes
    ]
    marks = [mark for row, epoch in enumerate(epochs) for mark in _signs(row, epoch)]
    return Timeline(
        title="What counts in the end",
        caption="Of each epoch, the samples in their order, and where a launch went on from." + _of_all(loader),
        axis="position in the epoch",
        row_axis="epoch",
        rows=[str(epoch.epoch) for epoch in epochs],
        spans=spans,
        marks=marks[:_MARKS],
    )


def _signs(row: int, epoch: EpochRun) -> list[Mark]:
    resumed = [
        Mark(row, float(each["from"]), "resumed", f"launch {each['launch']} goes on") for each in epoch.passes[1:]
    ]
    return resumed + [Mark(row, (gap.low + gap.high) / 2, "gap", str(gap)) for gap in epoch.gaps]


def _epochs(loader: LoaderRun) -> Bars:
    epochs = loader.epochs[:_EPOCHS]
    counts = {
        "delivered once": [epoch.delivered for epoch in epochs],
        "again after a resume": [epoch.again for epoch in epochs],
        "missing": [epoch.missing for epoch in epochs],
        "not reached, or left out": [epoch.dropped + epoch.left_early + epoch.under_way for epoch in epochs],
    }
    return Bars(
        title="Samples by epoch",
        caption="Over all launches." + _of_all(loader),
        axis="epoch",
        labels=[str(epoch.epoch) for epoch in epochs],
        series=[Series(name, [float(count) for count in each]) for name, each in counts.items()],
        unit="samples",
        stacked=True,
    )


def _of_all(loader: LoaderRun) -> str:
    many = len(loader.epochs)
    return "" if many <= _EPOCHS else f" Shown are the first {_EPOCHS} of {many:,} epochs."
