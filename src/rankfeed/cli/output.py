"""What a command prints: a table for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def show(figures: Mapping[str, Any], *, as_json: bool, title: str = "") -> None:
    """Print figures, a line each."""
    if as_json:
        typer.echo(json.dumps(figures))
        return
    table = Table(title=title or None, show_header=False, box=None, title_justify="left")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), _text(value))
    Console(highlight=False).print(table)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """A bar on standard error while that is a terminal; yields a function to call with the share done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_text(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(each) for each in value)
    return str(value)
