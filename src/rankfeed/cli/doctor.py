"""The command doctor: whether a loader delivers each sample once, found by running it."""

import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from rankfeed.cli.options import option
from rankfeed.cli.output import Json, show, show_findings

#: As `rankfeed.diagnostics.doctor.examine` takes them.
ALLOWED = ("shared", "shared-samples", "shared-batches", "replacement", "partial")
StartMethod = StrEnum("StartMethod", ["fork", "spawn", "forkserver"])


class Allowed(StrEnum):
    """What `examine` allows."""

    SHARED = "shared"
    SHARED_SAMPLES = "shared-samples"
    SHARED_BATCHES = "shared-batches"
    REPLACEMENT = "replacement"
    PARTIAL = "partial"


_Factory = Annotated[
    str, typer.Argument(metavar="MODULE:FUNCTION", help="Returns the loader; or FILE.py:FUNCTION.")
]
_StartMethod = Annotated[
    list[StartMethod] | None,
    option("fork|spawn|forkserver", "May be repeated; fork and spawn if left out."),
]
_Allow = Annotated[
    list[Allowed] | None,
    option("|".join(Allowed), "Intended: ranks read the same samples, or batches; draws; a part in each epoch."),
]


def doctor(
    factory: _Factory,
    ranks: Annotated[int, option("N", "Processes that read the loader.", least=1)] = 2,
    workers: Annotated[int, option("N", "num_workers of the function.", least=0)] = 2,
    start_method: _StartMethod = None,
    epochs: Annotated[int, option("N", "Epochs that are read.", least=1)] = 3,
    key: Annotated[str | None, option("KEY", "Ids: a path (id, 0.id, meta.k) or module:function.")] = None,
    universe: Annotated[int | None, option("N", "Number of samples, if ids are 0 to N - 1.", least=1)] = None,
    allow: _Allow = None,
    timeout: Annotated[float, option("SECONDS", "Limit of the function and of a batch.")] = 60,
    max_steps: Annotated[int, option("N", "Steps after which an epoch is cut.", least=1)] = 1000,
    max_seconds: Annotated[float, option("SECONDS", "Time after which an epoch is cut.")] = 60,
    step_seconds: Annotated[float, option("SECONDS", "Time to train on a batch.", least=0)] = 0,
    set_epoch: Annotated[bool, typer.Option(help="Call set_epoch before each epoch where it exists.")] = True,
    other_ranks: Annotated[int, option("N", "Ranks of a run on as many nodes; 1: leave it out.", least=1)] = 3,
    resume_ranks: Annotated[int | None, option("N", "Resume on this number of ranks, too.", least=1)] = None,
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
        other_ranks=other_ranks,
        resume_ranks=resume_ranks,
        progress=lambda text: None if json else typer.secho(text, err=True, dim=True),
    )
    if json:
        show(found.as_dict(), as_json=True)
    else:
        show_findings(found.findings, found.verdict, found.summary)
    if found.verdict.exit_code:
        raise typer.Exit(found.verdict.exit_code)
