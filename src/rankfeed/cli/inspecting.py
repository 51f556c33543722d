"""The command inspect: what a data set holds, at a glance."""

from typing import Annotated, Any

import typer
from rich.table import Table

from rankfeed.cli.lengths import Lengths, look
from rankfeed.cli.opening import (
    AllowPickle,
    CacheDir,
    ColumnNames,
    Data,
    Format,
    Options,
    figures,
    on_disk,
    opened,
)
from rankfeed.cli.output import FAINT, NAME, Json, bars, bytes_of, clean, grid, out, say, show
from rankfeed.cli.shown import as_json, shown
from rankfeed.columns.field import Field

Samples = Annotated[int, typer.Option(min=0, help="How many samples to show.")]


def inspect(
    data: Data,
    samples: Samples = 3,
    column: ColumnNames = None,
    format: Format = None,
    option: Options = None,
    cache_dir: CacheDir = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Format, samples, blocks, columns, sizes, lengths and a few samples of a data set.

    Example: rankfeed inspect data/ --samples 5
    """
    source = opened(
        data, format=format, columns=column, options=option, cache_dir=cache_dir, allow_pickle=allow_pickle
    )
    fields = source.fields
    seen, lengths = look(source, [name for name, field in fields.items() if field.kind not in ("dense", "object")])
    examples = _examples(source, samples)
    told = figures(source) | {"on_disk": on_disk(data)}
    if json:
        told["bytes_of_a_sample"] = {name: _row_bytes(field, lengths.get(name)) for name, field in fields.items()}
        told["lengths_of_samples"] = seen
        told["lengths"] = {name: each.as_dict() for name, each in lengths.items()}
        told["examples"] = [
            {"sample_id": sample_id, "values": {name: as_json(value) for name, value in sample.items()}}
            for sample_id, sample in examples
        ]
        show(told, as_json=True)
        return
    say(" ".join(data), style="bold")
    out(_summary(told), "", _columns(fields, lengths))
    for name, each in lengths.items():
        if each.least == each.most:
            continue  # the table says it
        what = "length" if seen == len(source) else f"length, of {seen:,} samples looked at"
        out("", clean(name, NAME).append(f"  {what}", FAINT), bars(each.labels, each.counts))
    for sample_id, sample in examples:
        out("", clean(f"sample {sample_id:,}", "bold"), _sample(sample))


def _examples(source: Any, count: int) -> list[tuple[int, dict[str, Any]]]:
    """Samples from the first to the last, evenly spaced."""
    size, count = len(source), min(count, len(source))
    ids = [size * number // count for number in range(count)]
    return list(zip(ids, source.fetch(ids).samples(), strict=True)) if ids else []


def _summary(told: dict[str, Any]) -> Table:
    blocks, disk = told["samples_per_block"], told["on_disk"]
    files = f"{disk['files']:,} file" + "s" * (disk["files"] != 1)
    sizes = f"{blocks['least']:,}"
    if blocks["least"] != blocks["most"]:
        sizes += f" to {blocks['most']:,} (median {blocks['median']:,})"
    lines = {
        "format": told["format"],
        "samples": f"{told['samples']:,}",
        "blocks": f"{told['blocks']:,} of {sizes} sample" + "s" * (blocks["most"] != 1),
        "on disk": f"{bytes_of(disk['bytes'])} in {files}, {bytes_of(disk['bytes'] / told['samples'])} a sample",
        "fingerprint": told["fingerprint"],
    }
    table = grid()
    for name, value in lines.items():
        table.add_row(clean(name, NAME), clean(value))
    return table


def _columns(fields: dict[str, Field], lengths: dict[str, Lengths]) -> Table:
    """A line for each column: its type, its size, and the quantiles of its lengths."""
    table = Table(box=None, pad_edge=False, header_style=FAINT)
    table.add_column("column", overflow="fold")
    table.add_column("type", overflow="fold")
    table.add_column("a sample", justify="right", no_wrap=True)
    quantiles = ("least", "25 %", "median", "75 %", "95 %", "most") if lengths else ()
    for title in quantiles:
        table.add_column(title, justify="right", no_wrap=True)
    for name, field in fields.items():
        each = lengths.get(name)
        size = _row_bytes(field, each)
        cells = [] if each is None else [each.least, *(each.quantiles[q] for q in (25, 50, 75, 95)), each.most]
        told = "" if size is None else bytes_of(size)
        table.add_row(clean(name, NAME), clean(str(field)), told, *(f"{cell:,}" for cell in cells))
    return table


def _row_bytes(field: Field, lengths: Lengths | None) -> float | None:
    """Bytes of a row: exact where all have the same, else the mean; None where that is not known."""
    if field.kind == "object":
        return None
    return field.row_bytes() if lengths is None else field.row_bytes() * lengths.mean


def _sample(sample: dict[str, Any]) -> Table:
    table = grid()
    for name, value in sample.items():
        table.add_row("  ", clean(name, NAME), clean(shown(value)))
    return table
