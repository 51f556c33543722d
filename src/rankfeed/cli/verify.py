"""The command `verify`: whether data are undamaged, a plan holds, or a job delivered what it should."""

from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer

from rankfeed.cli import options
from rankfeed.cli.output import NAME, Json, clean, grid, out, progress_bar, say, show, show_findings
from rankfeed.cli.render import count_of, format_bytes
from rankfeed.diagnostics.findings import Finding, Verdict, verdict_of
from rankfeed.errors import ArgumentError, StateError
from rankfeed.plan.plan import DEFAULT_WINDOW

#: Missing sample ids that are listed of an epoch.
_LISTED_IDS = 1000


_TARGET_HELP = "A dataset, or a folder of ledgers; or give --samples."
_Resume = Annotated[bool, typer.Option(help="Continue an interrupted check of the same data.")]
_RunData = Annotated[str | None, typer.Option("--data", metavar="DATA", help="Dataset to compare LEDGERS with.")]
_Ids = Annotated[bool, typer.Option("--ids", help="List sample ids that are missing in LEDGERS.")]


def verify(
    target: Annotated[list[str] | None, typer.Argument(metavar="DATA|LEDGERS", help=_TARGET_HELP)] = None,
    samples: options.Samples = None,
    blocks: options.Blocks = 1,
    ranks: options.Ranks = 1,
    workers: options.Workers = 0,
    batch_size: options.BatchSize = 1,
    shuffle: options.ShuffleKind = "global",
    seed: options.Seed = 0,
    window: options.Window = DEFAULT_WINDOW,
    lanes: options.Lanes = None,
    tail: options.TailKind = "even",
    epoch: options.Epoch = 0,
    start: options.Start = 0,
    format: options.Format = None,
    option: options.FormatOptions = None,
    cache_dir: options.CacheDir = None,
    allow_pickle: options.AllowPickle = False,
    resume: _Resume = True,
    run_data: _RunData = None,
    ids: _Ids = False,
    json: Json = False,
) -> None:
    """Verify a dataset and a plan, or what a job delivered.

    DATA are read completely: compared with their checksums, or decoded if they have none. Then every delivery of
    the plan is counted over all ranks and steps; of a plan too large to count, steps and positions are sampled.
    --workers is accepted as in `plan`, and changes nothing.

    LEDGERS is a folder that Loader(audit=FOLDER) wrote, of a finished, killed or running job.

    Exit status: 0 sound; 1 something is damaged, missing or repeated; 3 not proven: data without checksums,
    a plan that was only sampled, a ledger that is absent.

    Example: rankfeed verify data/ --ranks 8 --batch-size 32
    Example: rankfeed verify --samples 1e6 --ranks 8 --batch-size 32
    Example: rankfeed verify run/ledger --data data/
    """
    from rankfeed.diagnostics import verify_data, verify_plan
    from rankfeed.diagnostics.verify.ledgers import is_run

    opening: dict[str, Any] = {"format": format, "cache_dir": cache_dir, "allow_pickle": allow_pickle}
    opening |= options.parse_options(option or ())
    if target is not None and len(target) == 1 and is_run(target[0]):
        verdict = _verify_run(target[0], data=run_data, opening=opening, ids=ids, as_json=json)
        raise typer.Exit(verdict.exit_code)
    document: dict[str, Any] = {}
    findings: list[Finding] = []
    if target:
        with progress_bar("reading data") as progress:
            files = verify_data(options.dataset_path(target), resume=resume, progress=progress, **opening)
        document["files"] = files.as_dict() | {"bytes": files.nbytes}
        findings += files.findings
        if not json:
            resumed = f", {files.resumed:,} of them by an earlier call" if files.resumed else ""
            read = f"{format_bytes(files.nbytes)} in {count_of(files.pieces, 'piece')}{resumed}"
            lines = {"format": files.format, "read": read, "checked": files.how, "damaged": files.count}
            show(lines, as_json=False, title=" ".join(target))
    if not target or files.sound is not False:
        sizes = (
            options.open_dataset(
                target, format=format, options=option, cache_dir=cache_dir, allow_pickle=allow_pickle
            ).blocks
            if target
            else options.block_sizes(None, samples, blocks)
        )
        plan = options.make_plan(sizes, shuffle, seed, window, lanes)
        with progress_bar("counting deliveries") as progress:
            deliveries = verify_plan(
                plan, ranks=ranks, batch_size=batch_size, epoch=epoch, start=start, tail=tail, progress=progress
            )
        document |= deliveries.as_dict()
        findings += deliveries.findings
        if not json:
            show(_plan_for_people(deliveries), as_json=False, title=f"plan of {count_of(ranks, 'rank')}")
    verdict = verdict_of(findings)
    if json:
        told = [finding.as_dict() for finding in findings]
        show({**document, "sound": verdict.sound, "verdict": verdict, "findings": told}, as_json=True)
    else:
        show_findings(findings, verdict, f"verdict: {verdict}")
    raise typer.Exit(verdict.exit_code)


def _plan_for_people(verdict: Any) -> dict[str, Any]:
    least, most = verdict.steps
    counted = "each one counted" if verdict.counted else "a sample of them: the plan is too large to count"
    uneven = {
        0: "at each step all ranks have equally many samples",
        1: "at some steps a rank has one sample more than another",
    }
    return {
        "deliveries": f"{verdict.deliveries:,} ({counted})",
        "steps": f"{least:,} on each rank" if least == most else f"{least:,} to {most:,}: the ranks differ",
        "uneven": f"{verdict.uneven} ({uneven.get(verdict.uneven, 'largest difference between ranks at a step')})",
        "missing": verdict.missing,
        "repeated": verdict.repeated,
        "left out": f"{verdict.left_out:,}" + (" (tail=drop)" if verdict.left_out else ""),
    }


def _verify_run(folder: str, *, data: str | None, opening: dict[str, Any], ids: bool, as_json: bool) -> Verdict:
    from rankfeed.diagnostics import verify_run

    with progress_bar("reading ledgers") as progress:
        verdict = verify_run(folder, progress=progress)
    source = None if data is None else _source_of_run(verdict, data, opening)
    document = verdict.as_dict()
    if ids:
        for loader, loader_document in zip(verdict.loaders, document["loaders"], strict=True):
            for epoch, epoch_document in zip(loader.epochs, loader_document["epochs"], strict=True):
                epoch_document["missing_ids"] = _missing_ids(loader, epoch, source)
    if as_json:
        show(document, as_json=True)
        return verdict.verdict
    say(f"{verdict.folder}: {count_of(verdict.ledgers, 'ledger')}", style="bold")
    for loader, loader_document in zip(verdict.loaders, document["loaders"], strict=True):
        say(f"\n{loader.data}", style=NAME)
        table = grid()
        for number, launch in enumerate(loader.launches, 1):
            table.add_row(clean(f"launch {number}", NAME), clean(_describe_launch(launch)))
        out(table)
        for epoch, epoch_document in zip(loader.epochs, loader_document["epochs"], strict=True):
            say(str(epoch), style="red" if epoch.missing else "")
            if epoch_document.get("missing_ids"):
                say("  missing: " + " ".join(map(str, epoch_document["missing_ids"])))
    show_findings(verdict.findings, verdict.verdict, f"verdict: {verdict.verdict}")
    return verdict.verdict


def _source_of_run(verdict: Any, data: str, opening: dict[str, Any]) -> Any:
    """Open a dataset that a loader of the run read."""
    from rankfeed.sources import open as open_source

    source = open_source(data, **opening)
    if source.fingerprint not in [loader.source for loader in verdict.loaders]:
        raise StateError(
            "the run read other data",
            expected=" or ".join(f"{loader.data} ({loader.source})" for loader in verdict.loaders),
            found=source.fingerprint,
            where=data,
            remedy="give the dataset as it was when the job ran",
        )
    return source


def _missing_ids(loader: Any, epoch: Any, source: Any) -> list[int]:
    """Ids of the first missing samples of an epoch."""
    if not epoch.gaps:
        return []
    facts = loader.plan
    sizes: Any = int(facts["samples"])
    if facts["shuffle"] == "window":
        if source is None or source.fingerprint != loader.source:
            raise ArgumentError(
                "the order of this loader depends on the blocks of its data",
                found=loader.data,
                remedy="give the dataset with --data",
            )
        sizes = source.blocks
    window = int(facts.get("window", 1))
    plan = options.make_plan(sizes, facts["shuffle"], int(facts["seed"]), window, int(facts["lanes"]))
    positions = (each for gap in epoch.gaps for some in gap.positions() for each in some.tolist())
    found: list[int] = plan.sample_ids(epoch.epoch, list(islice(positions, _LISTED_IDS))).tolist()
    return found


def _describe_launch(launch: dict[str, Any]) -> str:
    began, ended = (
        datetime.fromtimestamp(launch[name] / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
        for name in ("began_ns", "ended_ns")
    )
    hosts = ", ".join(launch["hosts"][:4]) + (", ..." if len(launch["hosts"]) > 4 else "")
    return f"{launch['ledgers']} of {count_of(launch['ranks'], 'rank')} on {hosts}, {began} to {ended} UTC"
