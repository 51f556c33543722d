"""The command doctor: what is wrong with a loader, found by running it."""

import os
import sys
from typing import Annotated, Any

import typer
from rich.padding import Padding

from rankfeed.cli.output import FAINT, Json, clean, out, say, show

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def doctor(
    factory: Annotated[str, typer.Argument(help="module:function or file.py:function, which makes the loader.")],
    ranks: Annotated[int, typer.Option(min=1, help="Processes that read it.")] = 2,
    workers: Annotated[int, typer.Option(min=0, help="Workers of each: num_workers of the factory.")] = 2,
    start_method: Annotated[
        list[str] | None,
        typer.Option(help="fork, spawn or forkserver; may be repeated. Fork and spawn if left out."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often it is read.")] = 3,
    key: Annotated[str | None, typer.Option(help="Field or place of a batch that has the samples' ids.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for the factory and for each batch.")] = 60,
    max_steps: Annotated[int, typer.Option(min=1, help="Steps after which an epoch is cut.")] = 1000,
    max_seconds: Annotated[float, typer.Option(help="Seconds after which an epoch is cut.")] = 60,
    step_seconds: Annotated[float, typer.Option(min=0, help="Time that training takes for a batch.")] = 0,
    set_epoch: Annotated[bool, typer.Option(help="Call set_epoch before each epoch where there is one.")] = True,
    resume_ranks: Annotated[int | None, typer.Option(min=1, help="Resume on so many ranks, too.")] = None,
    json: Json = False,
) -> None:
    """Run a loader on several ranks and say what is wrong with what it delivers. Exit status 1 for errors.

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
        start_methods=tuple(start_method or ("fork", "spawn")),
        epochs=epochs,
        key=int(key) if key is not None and key.lstrip("-").isdigit() else key,
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
            _tell(finding)
        say(found.summary, style="bold green" if found.sound else "bold")
    if not found.ok:
        raise typer.Exit(1)


def _tell(finding: Any) -> None:
    say(f"{finding.severity}: {finding.what} [{finding.code}]", style=_STYLES[finding.severity])
    for line in finding.evidence:
        out(Padding(clean(line, FAINT), (0, 0, 0, 2)))
    out(Padding(clean(f"remedy: {finding.remedy}"), (0, 0, 0, 2)), "")
