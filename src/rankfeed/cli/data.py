"""The command write."""

from typing import Annotated, Literal

import typer

from rankfeed.cli.opening import figures
from rankfeed.cli.output import Json, show

Runner = Literal["local", "ray", "ranks"]
Order = Literal["stored", "shuffled"]


def write(
    source: Annotated[str, typer.Argument(help="Path of a data set.")],
    dest: Annotated[str, typer.Argument(help="Directory to write, new or of an interrupted call.")],
    workers: Annotated[int | None, typer.Option(help="Processes; as many as there are cores if left out.")] = None,
    shard_mib: Annotated[int, typer.Option(min=1, help="Size of a shard in MiB, about.")] = 256,
    resume: Annotated[bool, typer.Option(help="Keep what an interrupted call left.")] = True,
    runner: Annotated[Runner, typer.Option(help="What runs the tasks.")] = "local",
    order: Annotated[Order, typer.Option(help="Order of the rows.")] = "stored",
    seed: Annotated[int, typer.Option(help="Of the shuffled order.")] = 0,
    key: Annotated[str, typer.Option(help="Name of rows that cannot be identified.")] = "",
    append: Annotated[bool, typer.Option("--append", help="Add shards to a finished dataset.")] = False,
    json: Json = False,
) -> None:
    """Write a data set as Arrow IPC shards with a manifest.

    Example: rankfeed write folder-of-npy/ written/ --order shuffled --seed 1
    """
    from rankfeed.sources import open as open_source
    from rankfeed.sources.text.source import is_large, rows
    from rankfeed.writer import write as write_dataset

    # What is too large to be read as it lies goes through row by row.
    given = rows(source) if is_large(source) else open_source(source)
    written = write_dataset(
        given,
        dest,
        runner=runner,
        workers=workers,
        shard_bytes=shard_mib << 20,
        progress=not json,
        resume=resume,
        order=order,
        seed=seed,
        append=append,
        key=key,
    )
    show(figures(written), as_json=json, title=dest)
