"""The command doctor: whether a loader delivers each sample once, found by running it."""

import os
import sys
from enum import StrEnum
from typing import Annotated

import typer
from rich.padding import Padding

from rankfeed.cli.output import FAINT, Json, clean, out, say, show

StartMethod = StrEnum("StartMethod", ["fork", "spawn", "forkserver"])
Allowed = StrEnum("Allowed", ["shared", "replacement"])
_STYLES = {"error": "bold red", "unproven": "bold magenta", "warning": "bold yellow", "note": "bold cyan"}
_VERDICTS = {"sound": "bold green", "diseased": "bold red", "not proven": "bold magenta"}


def doctor(
    factory: Annotated[str, typer.Argument(help="module:function or file.py:function that returns the loader.")],
    ranks: Annotated[int, typer.Option(min=1, help="Processes that read it.")] = 2,
    workers: Annotated[int, typer.Option(min=0, help="num_workers of the factory.")] = 2,
    start_method: Annotated[
        list[StartMethod] | None,
        typer.Option(help="Of processes; may be repeated. Fork and spawn if left out."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often it is read.")] = 3,
    key: Annotated[
        str | None,
        typer.Option(help="Ids of the samples: a path in the batch (id, 0.sample_id, meta.k) or module:function."),
    ] = None,
    universe: Annotated[int | None, typer.Option(min=1, help="Number of samples, if ids are 0 to N - 1.")] = None,
    allow: Annotated[
        list[Allowed] | None,
        typer.Option(help="Ranks read the same samples, or samples are drawn with replacement, on purpose."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for the factory and for each batch.")] = 60,
    max_steps: Annotated[int, typer.Option(min=1, help="Steps after which an epoch is cut.")] = 1000,
    max_seconds: Annotated[float, typer.Option(help="Seconds after which an epoch is cut.")] = 60,
    step_seconds: Annotated[float, typer.Option(min=0, help="Time that training takes for a batch.")] = 0,
    set_epoch: Annotated[bool, typer.Option(help="Call set_epoch before each epoch where it exists.")] = True,
    resume_ranks: Annotated[int | None, typer.Option(min=1, help="Resume on this number of ranks, too.")] = None,
    json: Json = False,
) -> None:
    """Run a loader on several ranks and judge what it delivers.

    Exit status 0: sound in every configuration that was run; 1: diseased; 3: not proven.

    The function is called on each rank, with those of num_workers, multiprocessing_context, epoch, rank and
    world_size that it names, and returns an iterable of batches.

    Example: rankfeed doctor my_package.data:train_loader --ranks 2 --workers 2 --key sample_id
    """
    from rankfeed.diagnostics.doctor import examine

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    found = examine(
        factory,
        ranks=ranks,
        workers=workers,
        start_methods=tuple(map(str, start_method or ("fork", "spawn"))),
        epochs=epochs,
        key=key,
        universe=universe,
        allow=tuple(map(str, allow or ())),
        timeout=timeout,
        max_steps=max_steps,
        max_seconds=max_seconds,
        step_seconds=step_seconds,
        set_epoch=set_epoch,
        resume_ranks=resume_ranks,
        progress=lambda text: None if json else typer.secho(text, err=True, dim=True),
    )
    if json:
        show(found.as_dict(), as_json=True)
    else:
        for finding in found.findings:
            label = "not proven" if finding.severity == "unproven" else finding.severity
            say(f"{label}: {finding.what} [{finding.code}]", style=_STYLES[finding.severity])
            for line in finding.evidence:
                out(Padding(clean(line, FAINT), (0, 0, 0, 2)))
            out(Padding(clean(f"remedy: {finding.remedy}"), (0, 0, 0, 2)), "")
        say(found.summary, style=_VERDICTS[found.verdict])
    if found.verdict.exit_code:
        raise typer.Exit(found.verdict.exit_code)
