"""The command doctor: whether a loader delivers each sample once, found by running it."""

import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from rankfeed.cli.output import Json, show, show_findings

StartMethod = StrEnum("StartMethod", ["fork", "spawn", "forkserver"])
Allowed = StrEnum("Allowed", ["shared", "replacement"])
_Factory = Annotated[
    str, typer.Argument(metavar="MODULE:FUNCTION", help="Returns the loader; or FILE.py:FUNCTION.")
]
_StartMethod = Annotated[
    list[StartMethod] | None,
    typer.Option(metavar="fork|spawn|forkserver", help="May be repeated; fork and spawn if left out."),
]
_Key = Annotated[
    str | None, typer.Option(metavar="KEY", help="Ids: a path (id, 0.id, meta.k) or module:function.")
]
_Universe = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Number of samples, if ids are 0 to N - 1.")
]
_Allow = Annotated[
    list[Allowed] | None,
    typer.Option(metavar="shared|replacement", help="Intended: ranks read the same, or draw with replacement."),
]
_Resume = Annotated[int | None, typer.Option(min=1, metavar="N", help="Resume on this number of ranks, too.")]


def doctor(
    factory: _Factory,
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="Processes that read the loader.")] = 2,
    workers: Annotated[int, typer.Option(min=0, metavar="N", help="num_workers of the function.")] = 2,
    start_method: _StartMethod = None,
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Epochs that are read.")] = 3,
    key: _Key = None,
    universe: _Universe = None,
    allow: _Allow = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of the function and of a batch.")] = 60,
    max_steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps after which an epoch is cut.")] = 1000,
    max_seconds: Annotated[float, typer.Option(metavar="SECONDS", help="Time after which an epoch is cut.")] = 60,
    step_seconds: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Time to train on a batch.")] = 0,
    set_epoch: Annotated[bool, typer.Option(help="Call set_epoch before each epoch where it exists.")] = True,
    resume_ranks: _Resume = None,
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
        show_findings(found.findings, found.verdict, found.summary)
    if found.verdict.exit_code:
        raise typer.Exit(found.verdict.exit_code)
