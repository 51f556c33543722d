"""What commands print: tables and sentences for people, one JSON document for machines."""

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankfeed._util import progress
from rankfeed.cli.render import format_figure
from rankfeed.diagnostics.findings import Finding, Verdict, has_warnings

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

#: Styles of names, of bars and of less important text.
NAME, BAR, FAINT = "cyan", "green", "dim"
_STYLES = {"error": "bold red", "unproven": "bold magenta", "warning": "bold yellow", "note": "bold cyan"}
_STYLES |= {"sound": "bold green", "diseased": "bold red", "not proven": "bold magenta"}
#: Columns where standard output is no terminal: lines of a log or a pipe are not wrapped.
_PIPE_WIDTH = 20_000


def show(figures: Mapping[str, Any], *, as_json: bool, title: str = "") -> None:
    """Print figures: one line each, or one JSON document."""
    if as_json:
        typer.echo(json.dumps(figures))
        return
    if title:
        say(title, style="bold")
    table = grid()
    for name, value in figures.items():
        table.add_row(clean(name.replace("_", " "), NAME), clean(format_figure(value)))
    out(table)


def out(*things: Any) -> None:
    """Print on standard output; text is wrapped at a terminal only."""
    if sys.stdout.isatty():
        Console(highlight=False).print(*things, sep="\n")
        return
    text = io.StringIO()
    Console(file=text, width=_PIPE_WIDTH, highlight=False).print(*things, sep="\n")
    for line in text.getvalue().splitlines():
        typer.echo(line.rstrip())


def say(text: str, style: str = "") -> None:
    """Print one line of text."""
    out(clean(text, style))


def show_findings(findings: Sequence[Finding], verdict: Verdict | None, summary: str) -> None:
    """Print findings with their evidence and remedies, and what follows from them."""
    for finding in findings:
        label = "not proven" if finding.severity == "unproven" else finding.severity
        say(f"{label}: {finding.what} [{finding.code}]", style=_STYLES[finding.severity])
        for line in finding.evidence:
            out(Padding(clean(line, FAINT), (0, 0, 0, 2)))
        if finding.remedy:
            out(Padding(clean(f"remedy: {finding.remedy}"), (0, 0, 0, 2)))
    if summary:
        warned = has_warnings(findings, verdict)
        say(summary, style=_STYLES["warning"] if warned else "" if verdict is None else _STYLES[verdict])


def grid() -> Table:
    """A table without lines: names on the left, values on the right."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    return table


def clean(text: str, style: str = "") -> Text:
    """Text from data, in which neither the terminal nor rich interprets anything."""
    signs = (
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode() for sign in text
    )
    return Text("".join(signs), style=style)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """A progress bar in percent; yields a function to call with the share that is done, 0 to 1."""
    done = 0.0
    with progress.progress_bar(label, 100) as advance:

        def update(share: float) -> None:
            nonlocal done
            advance(100 * share - done)
            done = 100 * share

        yield update
