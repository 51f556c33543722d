"""The command `index`: indexes of tar shards, made ahead of the job."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from rankfeed.cli import options
from rankfeed.cli.output import BAR, FAINT, NAME, Json, clean, count_of, format_bar, format_bytes, out, say, show


@options.expand_options
def index(data: options.Data, *, dataset_options: options.DatasetOptions, json: Json = False) -> None:
    """Index tar shards ahead of the job.

    Shards that have not changed since they were indexed are skipped. Other formats need no index.

    Example: rankfeed index 'shards/train-{000..099}.tar'
    """
    name = options.format_name(data, dataset_options.format)
    if name != "webdataset":
        source = dataset_options.open(data)
        if json:
            show({"format": name, "needs_index": False, "samples": len(source)}, as_json=True)
        else:
            say(f"{name} needs no index: {count_of(len(source), 'sample')} can be read at random")
        return
    figures = _index(data, dataset_options.as_arguments(), quiet=json)
    if json:
        show(figures, as_json=True)
        return
    summary = {
        "shards": f"{figures['shards']:,}, {format_bytes(figures['bytes'])}",
        "samples": figures["samples"],
        "index": f"{format_bytes(figures['index_bytes'])}: {figures['made']:,} made now, "
        f"{figures['reused']:,} existed",
        "stored in": "\n".join(f"{folder} ({count:,})" for folder, count in figures["index_folders"].items()),
    }
    show(summary, as_json=False, title=" ".join(data))
    out("", _members(figures["members"], figures["samples"]))
    if figures["shards_with_repeated_keys"]:
        say("\nshards in which keys are repeated: " + ", ".join(figures["shards_with_repeated_keys"]))


def _index(data: Sequence[str], arguments: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Index the shards that have no index. Nothing is decoded, so no pickle has to be allowed."""
    from rankfeed.sources.tar.index_cache import IndexCache, decompressed, index_places
    from rankfeed.sources.tar.shard_list import list_shards

    cache_dir = arguments["cache_dir"]
    shard_list = list_shards(options.dataset_path(data), arguments.get("split"))
    if arguments.get("decompress"):
        shard_list = decompressed(shard_list, cache_dir)
    shards = shard_list.paths
    cache = IndexCache(cache_dir, within=shard_list.folder, progress=not quiet)
    indexed = cache.known(shards)
    reused = sum(shard in indexed for shard in shards)
    summaries = cache.summaries(shards)
    places = [next(place for place in index_places(shard, cache_dir) if place.exists()) for shard in shards]
    members: dict[str, dict[str, int]] = {}
    for summary in summaries:
        for extension in summary.extensions:
            total = members.setdefault(extension.name, {"count": 0, "bytes": 0, "most": 0})
            total["count"] += extension.count
            total["bytes"] += extension.nbytes
            total["most"] = max(total["most"], extension.largest)
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
            shard for shard, summary in zip(shards, summaries, strict=True) if summary.repeated is not None
        ],
    }


def _members(members: dict[str, dict[str, int]], samples: int) -> Table:
    """Count and sizes of each extension; yellow if some samples lack it."""
    table = Table(box=None, pad_edge=False, header_style=FAINT)
    table.add_column("member", overflow="fold")
    for title in ("count", "mean", "most"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("share of bytes", width=30, no_wrap=True)
    total = max(1, sum(member["bytes"] for member in members.values()))
    for name, member in members.items():
        table.add_row(
            clean("." + name, NAME),
            clean(f"{member['count']:,}", "" if member["count"] == samples else "yellow"),
            format_bytes(member["bytes"] / max(1, member["count"])),
            format_bytes(member["most"]),
            clean(format_bar(member["bytes"] / total, 30), BAR),
        )
    return table
