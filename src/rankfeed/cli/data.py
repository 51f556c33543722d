"""Commands about data that lie somewhere: inspect and pack."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

from rankfeed.cli.output import Json, show

Data = Annotated[str, typer.Argument(help="Path of a data set.")]


def inspect(data: Data, json: Json = False) -> None:
    """Format, samples, blocks, columns and fingerprint of a data set.

    Example: rankfeed inspect data/
    """
    from rankfeed.sources import open as open_source

    source = open_source(data)
    show(figures(source), as_json=json, title=data)


def pack(
    source: Data,
    dest: Annotated[str, typer.Argument(help="Folder to write, new or of a pack that was interrupted.")],
    workers: Annotated[int | None, typer.Option(help="Processes; as many as there are cores if left out.")] = None,
    shard_mib: Annotated[int, typer.Option(min=1, help="Size of a shard in MiB, about.")] = 256,
    resume: Annotated[bool, typer.Option(help="Go on with what an interrupted pack left.")] = True,
    json: Json = False,
) -> None:
    """Write a data set as Arrow IPC shards with a manifest.

    Example: rankfeed pack folder-of-npy/ packed/
    """
    from rankfeed.building import pack as pack_source
    from rankfeed.sources import open as open_source

    packed = pack_source(
        open_source(source), dest, workers=workers, shard_bytes=shard_mib << 20, progress=not json, resume=resume
    )
    show(figures(packed), as_json=json, title=dest)


def figures(source: Any) -> dict[str, Any]:
    """What there is to say of a source."""
    blocks = np.asarray(source.blocks)
    return {
        "format": type(source).__name__.removesuffix("Source").lower(),
        "samples": len(source),
        "blocks": len(blocks),
        "samples_per_block": {"least": int(blocks.min()), "most": int(blocks.max())},
        "columns": {name or "(whatever the Dataset returns)": str(field) for name, field in source.fields.items()},
        "fingerprint": source.fingerprint,
    }
