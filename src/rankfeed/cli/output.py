"""What a command prints: tables and bars for people, JSON for machines."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

#: Styles of names, of bars and of what matters less.
NAME, BAR, FAINT = "cyan", "green", "dim"

_EIGHTHS = " ▏▎▍▌▋▊▉"


def show(figures: Mapping[str, Any], *, as_json: bool, title: str = "") -> None:
    """Print figures, a line each."""
    if as_json:
        typer.echo(json.dumps(figures))
        return
    if title:
        say(title, style="bold")
    table = grid()
    for name, value in figures.items():
        table.add_row(clean(name.replace("_", " "), NAME), clean(text_of(value)))
    out(table)


def out(*things: Any) -> None:
    """Print on standard output."""
    console = Console(highlight=False)
    for thing in things:
        console.print(thing)


def say(text: str, style: str = "") -> None:
    """Print a line of text as it is, whatever brackets are in it."""
    out(clean(text, style))


def grid() -> Table:
    """A table without lines: names on the left, what there is to say of them on the right."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    return table


def clean(text: str, style: str = "") -> Text:
    r"""Text that comes from data: neither the terminal nor rich reads commands in it.

    Examples:
        >>> clean("[red]\x1b[31m").plain
        '[red]\\x1b[31m'
    """
    shown = (one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)
    return Text("".join(shown), style=style)


def bars(labels: Sequence[str], counts: Sequence[int], width: int = 40) -> Table:
    """A histogram: a line for each count, with its bar and its share."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(width=width, no_wrap=True)
    table.add_column(justify="right", style=FAINT, no_wrap=True)
    total, most = max(1, sum(counts)), max(1, *counts)
    for label, count in zip(labels, counts, strict=True):
        table.add_row("  " + label, Text(bar(count / most, width), style=BAR), f"{count / total:.1%}")
    return table


def bar(share: float, width: int) -> str:
    """A bar of a share of the width, to an eighth of a character; what is not nothing is seen.

    Examples:
        >>> bar(0.5, 5), bar(0.0001, 5), bar(0, 5)
        ('██▌', '▏', '')
    """
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """A bar on standard error while that is a terminal; yields a function to call with the share done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def bytes_of(size: float) -> str:
    """A number of bytes as people write it.

    Examples:
        >>> bytes_of(512), bytes_of(3 << 20)
        ('512 bytes', '3 MiB')
    """
    if size < 1024:
        return f"{size:.4g} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 100 else f"{size:.0f} {unit}"
    return f"{size / 1024:,.2f} TiB"


def text_of(value: Any) -> str:
    """A figure as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {text_of(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(text_of(each) for each in value)
    return str(value)
