"""What commands print: tables and sentences for people, one JSON document for machines."""

import io
import json
import math
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankfeed._util import progress
from rankfeed.diagnostics.findings import Finding, Verdict, has_warnings

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

#: Styles of names, of bars and of less important text.
NAME, BAR, FAINT = "cyan", "green", "dim"
_STYLES = {"error": "bold red", "unproven": "bold magenta", "warning": "bold yellow", "note": "bold cyan"}
_STYLES |= {"sound": "bold green", "diseased": "bold red", "not proven": "bold magenta"}
#: Characters, bytes and elements of a value that are shown.
_TEXT, _BYTES, _ELEMENTS = 72, 16, 8
_EIGHTHS = " ▏▎▍▌▋▊▉"
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


def count_of(count: int, noun: str) -> str:
    """A count with its noun."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def format_figure(value: Any) -> str:
    """A figure for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {format_figure(figure)}" for name, figure in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(format_figure(figure) for figure in value)
    return str(value)


def format_bytes(size: float) -> str:
    """A number of bytes for people."""
    unit, name = pick_unit_and_suffix(int(size), ["bytes", "KiB", "MiB", "GiB", "TiB"], 1024)
    figure = f"{size / unit:.3g}" if size < 100 * unit else f"{size / unit:,.0f}"
    return f"{figure} {'byte' if size == 1 else name}"


def format_bar(share: float, width: int) -> str:
    """A bar of a share of the width, to an eighth of a character; visible if the share is not 0."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def format_value(value: Any) -> str:
    """The value of a column on one line, shortened."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _TEXT else f"{len(value):,} characters  {value[:_TEXT]!r} ..."
    if isinstance(value, bytes):
        return f"{count_of(len(value), 'byte')}  {value[:_BYTES].hex(' ')}" + " ..." * (len(value) > _BYTES)
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind == "O":
        return f"{type(value).__name__}  {reprlib.repr(value)}"
    first = " ".join(
        f"{item:.4g}" if isinstance(item, float) else str(item) for item in value.ravel()[:_ELEMENTS].tolist()
    )
    shape = f"{value.dtype}[{', '.join(map(str, value.shape))}]  " if value.ndim else ""
    return shape + first + " ..." * (value.size > _ELEMENTS)


def value_as_json(value: Any) -> Any:
    """The value of a column for JSON: numbers and short texts as they are, others by their beginning."""
    if isinstance(value, str):
        return value if len(value) <= _TEXT else {"characters": len(value), "head": value[:_TEXT]}
    if isinstance(value, bytes):
        return {"bytes": len(value), "head": value[:_BYTES].hex()}
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind == "O":
        return {"type": type(value).__name__, "repr": reprlib.repr(value)}
    if not value.ndim:
        return _number_as_json(value.item())
    first = [_number_as_json(number) for number in value.flat[:_ELEMENTS].tolist()]
    return {"dtype": str(value.dtype), "shape": list(value.shape), "first": first}


def _number_as_json(value: Any) -> Any:
    is_number = isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if is_number else str(value)
