"""The command verify: whether data are as they were written, a plan holds, or a job delivered what it should."""

from typing import Annotated, Any

import typer

from rankfeed.cli.opening import AllowPickle, CacheDir, Format, Options, opened, options_of, where_of
from rankfeed.cli.output import Json, progress_bar, say, show
from rankfeed.cli.plans import (
    BatchSize,
    Blocks,
    Epoch,
    Lanes,
    Ranks,
    Samples,
    Seed,
    Shuffle,
    Start,
    Tail,
    Window,
    Workers,
    plan_from,
    sizes_of,
)
from rankfeed.cli.verifying_data import check_data
from rankfeed.cli.verifying_runs import show_run
from rankfeed.diagnostics import verify_plan

Target = Annotated[
    list[str] | None,
    typer.Argument(help="A data set, or a folder of ledgers; or leave it out and give --samples."),
]
Resume = Annotated[bool, typer.Option(help="Go on where an interrupted check of these data stopped.")]
RunData = Annotated[str | None, typer.Option("--data", help="Of a run: its data set, compared with the ledgers.")]
Ids = Annotated[bool, typer.Option("--ids", help="Of a run: the ids of missing samples; some orders need --data.")]


def verify(
    target: Target = None,
    samples: Samples = None,
    blocks: Blocks = 1,
    ranks: Ranks = 1,
    workers: Workers = 0,
    batch_size: BatchSize = 1,
    shuffle: Shuffle = "global",
    seed: Seed = 0,
    window: Window = 65536,
    lanes: Lanes = None,
    tail: Tail = "even",
    epoch: Epoch = 0,
    start: Start = 0,
    format: Format = None,
    option: Options = None,
    cache_dir: CacheDir = None,
    allow_pickle: AllowPickle = False,
    resume: Resume = True,
    run_data: RunData = None,
    ids: Ids = False,
    json: Json = False,
) -> None:
    """Check a data set and count every delivery of a plan; or say what a job delivered, by its ledgers.

    A data set is read wholly: compared with its checksums where it has some, else decoded. Every damage is named.
    Where the plan is too large to count, steps and positions are sampled. Workers change nothing of what is
    delivered; --workers is taken for symmetry with plan. Exits with 1 if anything is missing, repeated or damaged.

    Example: rankfeed verify data/ --ranks 8 --batch-size 32

    Example: rankfeed verify run/ledger --data data/
    """
    from rankfeed.diagnostics.verify.ledgers import is_run

    opening = {"format": format, "cache_dir": cache_dir, "allow_pickle": allow_pickle}
    opening |= options_of(option or ())
    if target is not None and len(target) == 1 and is_run(target[0]):
        show_run(target[0], data=run_data, opening=opening, ids=ids, as_json=json)
        return
    figures: dict[str, Any] = {}
    if target:
        figures["files"] = check_data(where_of(target), resume=resume, as_json=json, opening=opening)
        sizes = opened(
            target, format=format, options=option, cache_dir=cache_dir, allow_pickle=allow_pickle
        ).blocks
    else:
        sizes = sizes_of(None, samples, blocks)
    made = plan_from(sizes, shuffle, seed, window, lanes)
    with progress_bar("counting deliveries") as progress:
        verdict = verify_plan(
            made,
            ranks=ranks,
            batch_size=batch_size,
            epoch=epoch,
            start=start,
            tail=tail,  # type: ignore[arg-type]
            progress=progress,
        )
    exit_code = verdict.verdict.exit_code or (3 if target and figures["files"]["sound"] is None else 0)
    if json:
        show(figures | verdict.as_dict() | {"sound": {0: True, 1: False}.get(exit_code)}, as_json=True)
    else:
        show(figures | {"plan": str(verdict), "verdict": verdict.verdict}, as_json=False, title="verify")
        for finding in verdict.findings:
            say(str(finding), style="red" if finding.severity == "error" else "")
    if exit_code:
        raise typer.Exit(exit_code)
