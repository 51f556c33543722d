"""The command `write`: a dataset as Arrow shards with a manifest."""

from typing import Annotated, Literal

import typer

from rankfeed.cli.options import describe_source, option
from rankfeed.cli.output import Json, show

_Dest = Annotated[str, typer.Argument(metavar="DEST", help="Directory to write: new, or of an interrupted call.")]


def write(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Path or pattern of a dataset.")],
    dest: _Dest,
    workers: Annotated[int | None, option("N", "Worker processes; one per core if left out.")] = None,
    shard_mib: Annotated[int, option("MIB", "Approximate size of a shard in MiB.", least=1)] = 256,
    resume: Annotated[bool, typer.Option(help="Keep the finished parts of an interrupted call.")] = True,
    runner: Annotated[Literal["local", "ray", "ranks"], typer.Option(help="What runs the tasks.")] = "local",
    order: Annotated[Literal["stored", "shuffled"], typer.Option(help="Order of the rows.")] = "stored",
    seed: Annotated[int, option("N", "Seed of --order shuffled.")] = 0,
    key: Annotated[str, option("TEXT", "Identifies rows that rankfeed cannot identify.")] = "",
    append: Annotated[bool, typer.Option("--append", help="Add shards to a finished dataset.")] = False,
    json: Json = False,
) -> None:
    """Write a dataset as Arrow IPC shards with a manifest.

    Example: rankfeed write folder-of-npy/ written/ --order shuffled --seed 1
    Example: srun -n 8 rankfeed write raw/ written/ --runner ranks
    """
    from rankfeed.sources import open as open_source
    from rankfeed.sources.text.text_source import is_large, rows
    from rankfeed.writer import write as write_dataset

    # Text files that are too large to be opened are read as a stream.
    samples = rows(source) if is_large(source) else open_source(source)
    written = write_dataset(
        samples,
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
    show(describe_source(written), as_json=json, title=dest)
