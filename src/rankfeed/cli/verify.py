"""The command `verify`: whether data are undamaged, a plan holds, or a job delivered what it should."""

from itertools import chain, islice
from typing import Annotated, Any

import typer

from rankfeed.cli import options
from rankfeed.cli.output import Json, count_of, format_bytes, progress_bar, say, show, show_findings
from rankfeed.diagnostics.findings import Finding, Verdict, verdict_of
from rankfeed.errors import ArgumentError, StateError
from rankfeed.plan import Plan

#: Missing sample ids that are listed of an epoch.
_LISTED_IDS = 1000
_TARGET_HELP = "A dataset, or a folder of ledgers; or give --samples."
_RUN_DATA_HELP = "Dataset to compare LEDGERS with."


@options.expand_options
def verify(
    target: Annotated[list[str] | None, typer.Argument(metavar="DATA|LEDGERS", help=_TARGET_HELP)] = None,
    *,
    plan_options: options.PlanOptions,
    dataset_options: options.DatasetOptions,
    allow_pickle: options.AllowPickle = False,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted check of the same data.")] = True,
    run_data: Annotated[str | None, options.option("DATA", _RUN_DATA_HELP, "--data")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="List sample ids that are missing in LEDGERS.")] = False,
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

    if target is not None and len(target) == 1 and is_run(target[0]):
        source = None if run_data is None else dataset_options.open([run_data], allow_pickle=allow_pickle)
        raise typer.Exit(_verify_run(target[0], source, ids=ids, as_json=json).exit_code)
    plan_options.check_data(target)
    document: dict[str, Any] = {}
    findings: list[Finding] = []
    if target:
        with progress_bar("reading data") as progress:
            arguments = dataset_options.as_arguments(allow_pickle=allow_pickle)
            files = verify_data(options.dataset_path(target), resume=resume, progress=progress, **arguments)
        document["files"] = files.as_dict() | {"bytes": files.nbytes}
        findings += files.findings
        if not json:
            resumed = f", {files.resumed:,} of them by an earlier call" if files.resumed else ""
            read = f"{format_bytes(files.nbytes)} in {count_of(files.pieces, 'piece')}{resumed}"
            lines = {"format": files.format, "read": read, "checked": files.how, "damaged": files.count}
            show(lines, as_json=False, title=" ".join(target))
    if verdict_of(findings) is not Verdict.DISEASED:
        source = dataset_options.open(target, allow_pickle=allow_pickle) if target else None
        with progress_bar("counting deliveries") as progress:
            deliveries = verify_plan(
                plan_options.plan(plan_options.block_sizes(source)),
                ranks=plan_options.ranks,
                batch_size=plan_options.batch_size,
                epoch=plan_options.epoch,
                start=plan_options.start,
                tail=plan_options.tail,
                progress=progress,
            )
        document |= deliveries.as_dict()
        findings += deliveries.findings
        if not json:
            title = f"plan of {count_of(plan_options.ranks, 'rank')}"
            show(_describe_plan(deliveries), as_json=False, title=title)
    verdict = verdict_of(findings)
    if json:
        listed = [finding.as_dict() for finding in findings]
        show({**document, "sound": verdict.sound, "verdict": verdict, "findings": listed}, as_json=True)
    else:
        show_findings(findings, verdict, f"verdict: {verdict}")
    raise typer.Exit(verdict.exit_code)


def _describe_plan(verdict: Any) -> dict[str, Any]:
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


def _verify_run(folder: str, source: Any, *, ids: bool, as_json: bool) -> Verdict:
    from rankfeed.diagnostics import verify_run

    with progress_bar("reading ledgers") as progress:
        run = verify_run(folder, progress=progress)
    if source is not None and source.fingerprint not in [loader.source for loader in run.loaders]:
        raise StateError(
            "the run read other data",
            expected=" or ".join(f"{loader.data} ({loader.source})" for loader in run.loaders),
            found=f"{source!r} ({source.fingerprint})",
            remedy="give the dataset as it was when the job ran; of a part of a split, leave --data out",
        )
    document = run.as_dict()
    if ids:
        for loader, loader_document in zip(run.loaders, document["loaders"], strict=True):
            for epoch, epoch_document in zip(loader.epochs, loader_document["epochs"], strict=True):
                epoch_document["missing_ids"] = _missing_ids(loader, epoch, source)
    if as_json:
        show(document, as_json=True)
        return run.verdict
    say(f"{run.folder}: {count_of(run.ledgers, 'ledger')}", style="bold")
    for loader, loader_document in zip(run.loaders, document["loaders"], strict=True):
        say(f"\n{loader}")
        for entry in loader_document["epochs"]:
            if entry.get("missing_ids"):
                say(f"missing in epoch {entry['epoch']}: " + " ".join(map(str, entry["missing_ids"])))
    show_findings(run.findings, run.verdict, f"verdict: {run.verdict}")
    return run.verdict


def _missing_ids(loader: Any, epoch: Any, source: Any) -> list[int]:
    """Ids of the first missing samples of an epoch."""
    if not epoch.gaps:
        return []
    facts = loader.plan
    if facts["shuffle"] != "window":
        sizes = int(facts["samples"])
    elif source is not None and source.fingerprint == loader.source:
        sizes = source.blocks
    else:
        raise ArgumentError(
            "the order of this loader depends on the blocks of its data",
            found=loader.data,
            remedy="give the dataset with --data",
        )
    plan = Plan(
        sizes,
        shuffle=facts["shuffle"],
        seed=int(facts["seed"]),
        window=int(facts.get("window", 1)),
        lanes=int(facts["lanes"]),
    ).with_order(facts.get("order", 1))
    positions = chain.from_iterable(chunk.tolist() for gap in epoch.gaps for chunk in gap.positions())
    sample_ids: list[int] = plan.sample_ids(epoch.epoch, list(islice(positions, _LISTED_IDS))).tolist()
    return sample_ids
