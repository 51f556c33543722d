"""Options that several commands share, and what they mean: a dataset, its format options, a plan."""

import json
import math
import os
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer

from rankfeed.errors import ArgumentError
from rankfeed.plan import Plan
from rankfeed.plan.plan import DEFAULT_LANES, DEFAULT_WINDOW, Shuffle
from rankfeed.plan.schedule import Tail


def option(metavar: str, help: str, *names: str, least: int | None = None) -> Any:
    """An option with a value."""
    return typer.Option(*names, min=least, metavar=metavar, help=help)


Data = Annotated[list[str], typer.Argument(metavar="DATA", help="Paths or patterns of one dataset.")]
Format = Annotated[str | None, option("NAME", "Format; detected from the content if left out.")]
ColumnNames = Annotated[list[str] | None, option("NAME", "Column to read; may be repeated.", "--column", "-c")]
FormatOptions = Annotated[
    list[str] | None, option("NAME=VALUE", "Option of the format; may be repeated.", "--option", "-o")
]
CacheDir = Annotated[str | None, option("DIR", "For indexes of read-only data directories.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read pickled objects, which can run code.")]

PlanData = Annotated[str | None, typer.Argument(metavar="DATA", help="A dataset; or give --samples.")]
Samples = Annotated[float | None, option("N", "Number of samples without data, such as 1e12.")]
Blocks = Annotated[float, option("N", "Number of equal blocks of --samples.")]
Ranks = Annotated[int, option("N", "World size.", least=1)]
Workers = Annotated[int, option("N", "Workers of each rank.", least=0)]
BatchSize = Annotated[int, option("N", "Samples in a batch of one rank.", least=1)]
ShuffleKind = Annotated[Shuffle, typer.Option(help="Order of the samples.")]
Seed = Annotated[int, option("N", "Seed of the order.")]
Window = Annotated[int, option("N", "With --shuffle window: samples that are mixed.", least=1)]
Lanes = Annotated[int | None, option("N", "Streams of blocks; 64 for --shuffle window, else 1.")]
TailKind = Annotated[Tail, typer.Option(help="End of an epoch that the global batch does not divide.")]
Epoch = Annotated[int, option("N", "Number of the epoch, from 0.", least=0)]
Start = Annotated[int, option("N", "Samples of the epoch that are already consumed.", least=0)]


def dataset_path(data: Sequence[str]) -> str | list[str]:
    """One path or pattern as it is, several as a list."""
    return data[0] if len(data) == 1 else list(data)


def open_dataset(data: Sequence[str], **options: Any) -> Any:
    """Open a dataset with options of `rankfeed.open`; raises RankfeedError."""
    from rankfeed.sources import open as open_source

    return open_source(dataset_path(data), **options)


def source_options(
    format: str | None, texts: Sequence[str] | None, cache_dir: str | None, allow_pickle: bool = False
) -> dict[str, Any]:
    """Options of `rankfeed.open`."""
    named = {"format": format, "cache_dir": cache_dir, "allow_pickle": allow_pickle}
    return parse_options(texts or ()) | named


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Options of a format by name; a value is JSON if it can be parsed as JSON, else text."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise ArgumentError("invalid --option", expected="name=value", found=text)
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def format_name(data: Sequence[str], format: str | None) -> str | None:
    """Name of the format of a dataset; None if it is not known."""
    from rankfeed.sources.open import detect
    from rankfeed.sources.paths import as_paths

    return detect(as_paths(dataset_path(data)), format)


def describe_source(source: Any) -> dict[str, Any]:
    """Samples, blocks, columns and fingerprint."""
    blocks = np.asarray(source.blocks)
    return {
        "samples": len(source),
        "blocks": len(blocks),
        "samples_per_block": {
            "least": int(blocks.min()),
            "median": int(np.percentile(blocks, 50, method="inverted_cdf")),
            "most": int(blocks.max()),
        },
        "columns": {name or "(return value of the Dataset)": str(field) for name, field in source.fields.items()},
        "fingerprint": source.fingerprint,
    }


def disk_usage(data: Sequence[str]) -> dict[str, int]:
    """Number and bytes of the files of a dataset, without hidden files."""
    from rankfeed.diagnostics.verify.formats import all_files
    from rankfeed.sources.paths import expand

    paths = all_files(expand(dataset_path(data)))
    sizes = [os.stat(path).st_size for path in paths if os.path.exists(path)]
    return {"files": len(sizes), "bytes": sum(sizes)}


def block_sizes(source: Any, samples: float | None, blocks: float) -> Any:
    """Block sizes of a source, or of --samples and --blocks if it is None."""
    if (source is None) == (samples is None):
        raise ArgumentError("expected either a dataset or --samples", remedy="see --help")
    if samples is None:
        return source.blocks
    total, count = _whole("--samples", samples), _whole("--blocks", blocks)
    if not 1 <= count <= max(1, total):
        raise ArgumentError("invalid --blocks", expected=f"1 to {total}", found=count)
    size, larger = divmod(total, count)
    return total if count == 1 else np.full(count, size, np.int64) + (np.arange(count) < larger)


def _whole(name: str, number: float) -> int:
    if not (math.isfinite(number) and number == int(number) and abs(number) < 2**63):
        raise ArgumentError(f"{name} must be a whole number below 2^63", found=number)
    return int(number)


def make_plan(
    sizes: Any, shuffle: Shuffle, seed: int, window: int = DEFAULT_WINDOW, lanes: int | None = None
) -> Plan:
    """The order of an epoch; the shuffle decides the number of lanes if it is not given."""
    return Plan(
        sizes,
        shuffle=shuffle,
        seed=seed,
        window=window,
        lanes=DEFAULT_LANES.get(shuffle, 1) if lanes is None else lanes,
    )
