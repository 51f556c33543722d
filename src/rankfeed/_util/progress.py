"""Progress bars on standard error, if it is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(description: str, total: float | None, *, enabled: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar while the block runs, if it is enabled and standard error is a terminal.

    Yields ``advance(count=1, total=None)``, which counts completed units; ``total`` replaces their number.
    """
    # rich counts FORCE_COLOR as a terminal, and would write bars into log files.
    if not (enabled and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda count=1, total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)

        def advance(count: float = 1, total: float | None = None) -> None:
            bar.update(task, advance=count, total=total)

        yield advance
