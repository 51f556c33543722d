"""Opening what a command line names, and what there is to say of any source."""

import json
import os
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer

from rankfeed.errors import ArgumentError

Data = Annotated[list[str], typer.Argument(help="Paths or patterns of one data set.")]
Format = Annotated[str | None, typer.Option(help="Name of the format; found by looking if left out.")]
ColumnNames = Annotated[
    list[str] | None, typer.Option("--column", "-c", help="A column to read; may be repeated.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="An option of the format, as name=value; may be repeated."),
]
CacheDir = Annotated[str | None, typer.Option(help="Where an index goes that cannot lie beside the data.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read pickles, which runs code in them.")]


def opened(
    data: Sequence[str],
    *,
    format: str | None = None,
    columns: Sequence[str] | None = None,
    options: Sequence[str] | None = None,
    cache_dir: str | None = None,
    allow_pickle: bool = False,
) -> Any:
    """The source that is meant.

    Raises:
        RankfeedError: it cannot be opened.
    """
    from rankfeed.sources import open as open_source

    return open_source(
        where_of(data),
        format=format,
        columns=columns or None,
        cache_dir=cache_dir,
        allow_pickle=allow_pickle,
        **options_of(options or ()),
    )


def where_of(data: Sequence[str]) -> str | list[str]:
    """One path or pattern as it is, several as a list."""
    return data[0] if len(data) == 1 else list(data)


def options_of(texts: Sequence[str]) -> dict[str, Any]:
    """Options by name; a value is JSON where it can be read as that, else text.

    Raises:
        ArgumentError: one has no name.

    Examples:
        >>> options_of(["version=3", "filter=label > 1"])
        {'version': 3, 'filter': 'label > 1'}
    """
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise ArgumentError("this is no option", expected="name=value", found=text)
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def on_disk(data: Sequence[str]) -> dict[str, int]:
    """Files that the data lie in, and their bytes; hidden files are left out, indexes are not."""
    from rankfeed.sources.paths import expand

    files = nbytes = 0
    pending = expand(where_of(data))
    while pending:
        path = pending.pop()
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                for entry in entries:  # a link to a folder may lead round in a circle
                    if not entry.name.startswith(".") and not (entry.is_symlink() and entry.is_dir()):
                        pending.append(entry.path)
        elif os.path.exists(path):
            files += 1
            nbytes += os.stat(path).st_size
    return {"files": files, "bytes": nbytes}


def figures(source: Any) -> dict[str, Any]:
    """What there is to say of a source."""
    blocks = np.asarray(source.blocks)
    return {
        "format": type(source).__name__.removesuffix("Source").lower(),
        "samples": len(source),
        "blocks": len(blocks),
        "samples_per_block": {
            "least": int(blocks.min()),
            "median": int(np.percentile(blocks, 50, method="inverted_cdf")),
            "most": int(blocks.max()),
        },
        "columns": {name or "(whatever the Dataset returns)": str(field) for name, field in source.fields.items()},
        "fingerprint": source.fingerprint,
    }
