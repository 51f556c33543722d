"""The command doctor: whether a loader delivers each sample once, found by running it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from rankfeed.cli.options import allow_imports, expand_options, option
from rankfeed.cli.output import Json, show, show_findings

StartMethod = StrEnum("StartMethod", ["fork", "spawn", "forkserver"])
Allowed = StrEnum("Allowed", ["shared", "shared-samples", "shared-batches", "replacement", "partial"])
_FACTORY_HELP = "Returns the loader; or FILE.py:FUNCTION."
_METHODS_HELP = "May be repeated; fork and spawn if left out."
_ALLOW_HELP = "Intended: ranks read the same samples, or batches; draws; a part in each epoch."


@dataclass(frozen=True, kw_only=True)
class ExamineOptions:
    """The options of `rankfeed.diagnostics.doctor.examine`; None is its default."""

    ranks: Annotated[int, option("N", "Processes that read the loader.", least=1)] = 2
    workers: Annotated[int, option("N", "num_workers of the function.", least=0)] = 2
    start_methods: Annotated[
        list[StartMethod] | None, option("|".join(StartMethod), _METHODS_HELP, "--start-method")
    ] = None
    epochs: Annotated[int, option("N", "Epochs that are read.", least=1)] = 3
    key: Annotated[str | None, option("KEY", "Ids: a path (id, 0.id, meta.k) or module:function.")] = None
    universe: Annotated[int | None, option("N", "Number of samples, if ids are 0 to N - 1.", least=1)] = None
    allow: Annotated[list[Allowed] | None, option("|".join(Allowed), _ALLOW_HELP)] = None
    timeout: Annotated[float, option("SECONDS", "Limit of the function and of a batch.")] = 60
    max_steps: Annotated[int, option("N", "Steps after which an epoch is cut.", least=1)] = 1000
    max_seconds: Annotated[float, option("SECONDS", "Time after which an epoch is cut.")] = 60
    step_seconds: Annotated[float, option("SECONDS", "Time to train on a batch.", least=0)] = 0
    set_epoch: Annotated[bool, typer.Option(help="Call set_epoch before each epoch where it exists.")] = True
    other_ranks: Annotated[int, option("N", "Ranks of a run on as many nodes; 1: leave it out.", least=1)] = 3
    resume_ranks: Annotated[int | None, option("N", "Resume on this number of ranks, too.", least=1)] = None


@expand_options
def doctor(
    factory: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help=_FACTORY_HELP)],
    *,
    examine_options: ExamineOptions,
    json: Json = False,
) -> None:
    """Run a loader on several ranks and judge what it delivers.

    Exit status 0: sound in every configuration that was run; 1: diseased; 3: not proven.

    The function is called on each rank, with those of num_workers, multiprocessing_context, epoch, rank and
    world_size that it names, and returns an iterable of batches.

    Example: rankfeed doctor my_package.data:train_loader --ranks 2 --workers 2 --key sample_id
    """
    from rankfeed.diagnostics.doctor import examine

    allow_imports()
    options = {name: value for name, value in vars(examine_options).items() if value is not None}
    examination = examine(
        factory, progress=lambda text: None if json else typer.secho(text, err=True, dim=True), **options
    )
    if json:
        show(examination.as_dict(), as_json=True)
    else:
        show_findings(examination.findings, examination.verdict, examination.summary)
    if examination.verdict.exit_code:
        raise typer.Exit(examination.verdict.exit_code)
