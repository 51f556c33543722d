"""The folder that is packed into: what may be there already, and what may not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankfeed._util.validate import invalid
from rankfeed.building.target import local_path
from rankfeed.errors import PackError, listed
from rankfeed.sources import Source
from rankfeed.sources.open import STAGING_NAME
from rankfeed.storage import MANIFEST_NAME


def folder(dest: Any) -> Path:
    """The folder that is meant.

    Raises:
        ArgumentError: no folder of this machine's file systems.
    """
    text = local_path(dest)
    if text is not None:
        return Path(os.path.abspath(text))  # other processes need not work in the same directory
    raise invalid("dest", "a folder to pack into, on a file system: object stores are not written yet", dest)


def refuse_foreign(dest: Path, *, append: bool) -> None:
    """Never write among files that are not ours.

    Raises:
        PackError: there are some, or nothing to append to.
    """
    if append and not (dest / MANIFEST_NAME).exists():
        raise nothing_to_append_to(dest)  # what is remembered stays: the data may be away for a while
    if not dest.exists() or (dest / MANIFEST_NAME).exists() or (dest / STAGING_NAME).is_dir():
        return
    if not dest.is_dir():
        raise PackError("the destination is no folder", where=dest)
    names = sorted(os.listdir(dest))
    if names:
        raise PackError(
            "the folder holds other files",
            expected="no folder, an empty one, or one of an interrupted pack",
            found=listed(names),
            where=dest,
            remedy="choose another folder",
        )


def nothing_to_append_to(dest: Path) -> PackError:
    """The error for it."""
    return PackError(
        "there is no finished data set to append to",
        expected=f"a folder with a {MANIFEST_NAME}",
        where=dest,
        remedy="pack the first data without append=True, and let an interrupted pack finish first",
    )


@contextmanager
def bar(progress: bool, given: Any) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error; yields what to call with rows that are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("packing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = not (progress and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=disable) as shown:
        task = shown.add_task("packing", total=len(given) if isinstance(given, Source) else None)
        yield lambda rows: shown.update(task, advance=rows)
