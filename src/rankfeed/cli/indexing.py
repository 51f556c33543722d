"""The command index: what reading at random needs to know of tar shards, found out ahead of the job."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rankfeed.cli.opening import CacheDir, Data, Format, Options, opened, options_of, where_of
from rankfeed.cli.output import BAR, FAINT, NAME, Json, bar, bytes_of, clean, grid, out, say, show


def index(
    data: Data,
    format: Format = None,
    option: Options = None,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Make the index of tar shards ahead of the job, or find that there is one.

    Shards that have not changed since they were indexed are left alone. Other formats need no index.

    Example: rankfeed index 'shards/train-{000..099}.tar'
    """
    if _format_of(data, format) != "webdataset":
        source = opened(data, format=format, options=option, cache_dir=cache_dir)
        name = type(source).__name__.removesuffix("Source").lower()
        if json:
            show({"format": name, "needs_index": False, "samples": len(source)}, as_json=True)
        else:
            say(f"{name} needs no index: {len(source):,} samples are found as they lie")
        return
    told = _indexed(data, options_of(option or ()), cache_dir, quiet=json)
    if json:
        show(told, as_json=True)
        return
    say(" ".join(data), style="bold")
    out(_summary(told), "", _members(told["members"], told["samples"]))
    if told["shards_with_repeated_keys"]:
        say("\nkeys that come twice, apart from each other, in " + ", ".join(told["shards_with_repeated_keys"]))


def _format_of(data: Sequence[str], format: str | None) -> str | None:
    """The name of the format; None where there is none, which opening will say better."""
    from rankfeed.sources.open import detect
    from rankfeed.sources.paths import as_paths

    return detect(as_paths(where_of(data)), format)


def _indexed(
    data: Sequence[str], options: dict[str, Any], cache_dir: str | None, *, quiet: bool
) -> dict[str, Any]:
    """Index what is not indexed. Nothing is decoded, so nothing has to be allowed."""
    from rankfeed.sources.tar.decompress import decompressed
    from rankfeed.sources.tar.index_cache import IndexCache, index_places
    from rankfeed.sources.tar.shard_list import list_shards

    these = list_shards(where_of(data), options.get("split"))
    if options.get("decompress"):
        these = decompressed(these, cache_dir)
    store = IndexCache(cache_dir, within=these.folder, progress=not quiet)
    known = store.known(these.shards)
    reused = sum(shard in known for shard in these.shards)
    summaries = store.summaries(these.shards)
    places = [_existing(index_places(shard, cache_dir)) for shard in these.shards]
    members: dict[str, dict[str, int]] = {}
    for summary in summaries:
        for each in summary.extensions:
            so_far = members.setdefault(each.name, {"count": 0, "bytes": 0, "most": 0})
            so_far["count"] += each.count
            so_far["bytes"] += each.nbytes
            so_far["most"] = max(so_far["most"], each.largest)
    return {
        "format": "webdataset",
        "needs_index": True,
        "shards": len(summaries),
        "samples": sum(summary.samples for summary in summaries),
        "bytes": sum(summary.tar_bytes for summary in summaries),
        "made": len(summaries) - reused,
        "reused": reused,
        "index_bytes": sum(os.path.getsize(place) for place in places),
        "index_folders": dict(Counter(os.fspath(place.parent) for place in places)),
        "members": members,
        "shards_with_repeated_keys": [
            shard for shard, summary in zip(these.shards, summaries, strict=True) if summary.repeated is not None
        ],
    }


def _existing(places: Iterable[Path]) -> Path:
    return next(place for place in places if place.exists())


def _summary(told: dict[str, Any]) -> Table:
    folders = "\n".join(f"{folder} ({count:,})" for folder, count in told["index_folders"].items())
    lines = {
        "shards": f"{told['shards']:,}, {bytes_of(told['bytes'])}",
        "samples": f"{told['samples']:,}",
        "index": f"{bytes_of(told['index_bytes'])}: {told['made']:,} made now, {told['reused']:,} there already",
        "lies in": folders,
    }
    table = grid()
    for name, value in lines.items():
        table.add_row(clean(name, NAME), clean(value))
    return table


def _members(members: dict[str, dict[str, int]], samples: int) -> Table:
    """A line for each extension: how many samples have it, and how large it is."""
    table = Table(box=None, pad_edge=False, header_style=FAINT)
    table.add_column("member", overflow="fold")
    for title in ("count", "mean", "most"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("share of bytes", width=30, no_wrap=True)
    total = max(1, sum(each["bytes"] for each in members.values()))
    for name, each in members.items():
        few = "" if each["count"] == samples else "yellow"  # a sample lacks it
        mean = bytes_of(each["bytes"] / max(1, each["count"]))
        share = clean(bar(each["bytes"] / total, 30), BAR)
        table.add_row(
            clean("." + name, NAME), clean(f"{each['count']:,}", few), mean, bytes_of(each["most"]), share
        )
    return table
