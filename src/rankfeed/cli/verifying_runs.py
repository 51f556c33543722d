"""What the command verify says of a run."""

import sys
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from rankfeed.cli.output import NAME, clean, grid, out, progress_bar, say, show
from rankfeed.diagnostics.verify.run_verdict import LoaderRun, RunVerdict
from rankfeed.diagnostics.verify.runs import verify_run
from rankfeed.errors import ArgumentError, StateError
from rankfeed.plan import Plan

#: Ids that are listed of the missing samples of an epoch.
_IDS = 1000


def show_run(folder: str, *, data: str | None, opening: dict[str, Any], ids: bool, as_json: bool) -> None:
    """Say what a job delivered; exit with 1 where something is missing or wrong.

    Args:
        folder: of ledgers.
        data: the data set that was read, if it is to be compared.
        opening: how that is opened.
        ids: whether ids of missing samples are told.
        as_json: for machines.
    """
    with progress_bar("reading ledgers") as progress:
        verdict = verify_run(folder, progress=progress)
    blocks = None
    if data is not None:
        blocks = _compared(verdict, data, opening)
    told = verdict.as_dict()
    if ids:
        for loader, as_told in zip(verdict.loaders, told["loaders"], strict=True):
            for epoch, one in zip(loader.epochs, as_told["epochs"], strict=True):
                one["missing_ids"] = _ids(loader, epoch.epoch, epoch.gaps, blocks)
    if as_json:
        show(told, as_json=True)
    else:
        _for_people(verdict, told)
    if verdict.verdict.exit_code:
        sys.exit(verdict.verdict.exit_code)


def _compared(verdict: RunVerdict, data: str, opening: dict[str, Any]) -> Any:
    """The blocks of a data set, which has to be that of a loader of the run.

    Raises:
        StateError: it is of none.
    """
    from rankfeed.sources import open as open_source

    source = open_source(data, **opening)
    known = [loader.source for loader in verdict.loaders]
    if source.fingerprint not in known:
        raise StateError(
            "the run read other data",
            expected=" or ".join(f"{loader.data} ({loader.source})" for loader in verdict.loaders),
            found=source.fingerprint,
            where=data,
            remedy="give the data set as it was when the job ran",
        )
    return source.fingerprint, source.blocks


def _ids(loader: LoaderRun, epoch: int, gaps: list[Any], blocks: Any) -> list[int]:
    """Ids of the missing samples of an epoch, the first thousand of them."""
    if not gaps:
        return []
    plan = _plan_of(loader, blocks)
    positions = (each for gap in gaps for some in gap.positions() for each in some.tolist())
    found: list[int] = plan.sample_ids(epoch, list(islice(positions, _IDS))).tolist()
    return found


def _plan_of(loader: LoaderRun, blocks: Any) -> Plan:
    facts = loader.plan
    sizes: Any = int(facts["samples"])
    if facts["shuffle"] == "window":
        if blocks is None or blocks[0] != loader.source:
            raise ArgumentError(
                "the order of this loader depends on the blocks of its data",
                found=loader.data,
                remedy="give the data set with --data",
            )
        sizes = blocks[1]
    return Plan(
        sizes,
        shuffle=str(facts["shuffle"]),  # type: ignore[arg-type]
        seed=int(facts["seed"]),
        window=int(facts.get("window", 1)),
        lanes=int(facts["lanes"]),
    )


def _for_people(verdict: RunVerdict, told: dict[str, Any]) -> None:
    say(f"{verdict.folder}: {verdict.ledgers} ledgers", style="bold")
    for loader, one in zip(verdict.loaders, told["loaders"], strict=True):
        say(f"\n{loader.data}", style=NAME)
        table = grid()
        for number, launch in enumerate(loader.launches):
            table.add_row(clean(f"launch {number + 1}", NAME), clean(_launch(launch)))
        out(table)
        for epoch, as_told in zip(loader.epochs, one["epochs"], strict=True):
            say(str(epoch), style="" if not epoch.missing else "red")
            if as_told.get("missing_ids"):
                say("  missing: " + " ".join(map(str, as_told["missing_ids"])))
    for finding in verdict.findings:
        say(str(finding), style="red" if finding.severity == "error" else "")
    if verdict.sound:
        say("nothing is missing up to where the job is", style="green")


def _launch(launch: dict[str, Any]) -> str:
    began, ended = (
        datetime.fromtimestamp(launch[name] / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
        for name in ("began_ns", "ended_ns")
    )
    hosts = ", ".join(launch["hosts"][:4]) + (", ..." if len(launch["hosts"]) > 4 else "")
    return f"{launch['ledgers']} of {launch['ranks']} ranks on {hosts}, {began} to {ended} UTC"
