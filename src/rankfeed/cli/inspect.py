"""The command `inspect`: what a dataset contains."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from rich.table import Table

from rankfeed._util.native import native_library
from rankfeed.cli import options
from rankfeed.cli.output import (
    BAR,
    FAINT,
    NAME,
    Json,
    clean,
    count_of,
    format_bar,
    format_bytes,
    format_value,
    grid,
    out,
    show,
    value_as_json,
)
from rankfeed.columns.columns import Bytes, Ragged
from rankfeed.columns.field import Field
from rankfeed.loading.options import make_plan
from rankfeed.plan import measure_quality
from rankfeed.plan.plan import DEFAULT_WINDOW, Int64

#: Samples that are read, in how many runs of neighbours, in what batches, and bytes after which reading ends.
LOOKS, RUNS, BATCH, LOOK_BYTES = 4096, 16, 64, 256 << 20
#: Quantiles in percent.
QUANTILES = (5, 25, 50, 75, 95)
#: Approximate number of bars of a histogram.
_BARS = 10
_COLUMN_HELP = "Column to read; may be repeated."
#: Ranks and batch size for which the quality of a shuffle is shown.
_RANKS, _BATCH_SIZE = (1, 8, 64), 32


@options.expand_options
def inspect(
    data: options.Data,
    *,
    samples: Annotated[int, options.option("N", "Number of samples to show.", least=0)] = 3,
    column: Annotated[list[str] | None, options.option("NAME", _COLUMN_HELP, "--column", "-c")] = None,
    dataset_options: options.DatasetOptions,
    allow_pickle: options.AllowPickle = False,
    json: Json = False,
) -> None:
    """Show what a dataset contains.

    Format, blocks, columns, sizes, quantiles and histograms of lengths, and a few samples.

    Example: rankfeed inspect data/ --samples 5
    Example: rankfeed inspect table.lance --column text --option version=3
    """
    source = dataset_options.open(data, allow_pickle=allow_pickle, columns=column or None)
    fields = source.fields
    seen, lengths = look(source, [name for name, field in fields.items() if field.kind not in ("dense", "object")])
    count = min(samples, len(source))
    ids = [len(source) * index // count for index in range(count)]  # evenly spaced, beginning with the first
    examples = list(zip(ids, source.fetch(ids).samples(), strict=True)) if ids else []
    figures = {"format": options.format_name(data, dataset_options.format), **options.describe_source(source)}
    figures["on_disk"] = options.disk_usage(data)
    figures["shuffle"] = _shuffle(source)
    figures["native_copy"] = native_library() is not None
    if json:
        figures["bytes_of_a_sample"] = {
            name: _row_bytes(field, lengths.get(name)) for name, field in fields.items()
        }
        figures["lengths_of_samples"] = seen
        figures["lengths"] = lengths
        figures["examples"] = [
            {"sample_id": sample_id, "values": {name: value_as_json(value) for name, value in sample.items()}}
            for sample_id, sample in examples
        ]
        show(figures, as_json=True)
        return
    show(_summary(figures), as_json=False, title=" ".join(data))
    out("", _columns(fields, lengths))
    for name, summary in lengths.items():
        if summary["least"] != summary["most"]:  # else the table of columns has its only length
            caption = "length" if seen == len(source) else f"length, of {count_of(seen, 'sample')} looked at"
            out("", clean(name, NAME).append(f"  {caption}", FAINT), _histogram(summary["histogram"]))
    for sample_id, sample in examples:
        table = grid()
        for name, value in sample.items():
            table.add_row("  ", clean(name, NAME), clean(format_value(value)))
        out("", clean(f"sample {sample_id:,}", "bold"), table)


def _shuffle(source: Any) -> dict[str, Any]:
    """The order of ``shuffle=True``, and its quality on some numbers of ranks."""
    plan = make_plan(source, True, 0, DEFAULT_WINDOW, None)
    ranks = [world_size for world_size in _RANKS if world_size <= len(source)]
    return {
        "kind": plan.shuffle,
        "decoded_bytes": source.decoded_bytes,
        **({"window": plan.window, "lanes": plan.lanes} if plan.shuffle == "window" else {}),
        "batch_size": _BATCH_SIZE,
        "mixture": {
            world_size: vars(measure_quality(plan, batch_size=_BATCH_SIZE, world_size=world_size))
            for world_size in ranks
        },
    }


def _summary(figures: dict[str, Any]) -> dict[str, Any]:
    blocks, disk = figures["samples_per_block"], figures["on_disk"]
    sizes = count_of(blocks["most"], "sample")
    if blocks["least"] != blocks["most"]:
        sizes = f"{blocks['least']:,} to {sizes} (median {blocks['median']:,})"
    sample_size = format_bytes(disk["bytes"] / figures["samples"])
    return {
        "format": figures["format"],
        "samples": figures["samples"],
        "blocks": f"{figures['blocks']:,} of {sizes}",
        "on disk": f"{format_bytes(disk['bytes'])} in {count_of(disk['files'], 'file')}, {sample_size} a sample",
        "shuffled": _describe_shuffle(figures["shuffle"]),
        "fingerprint": figures["fingerprint"],
        "rows copied": "by native code" if figures["native_copy"] else "one by one: there was no C compiler",
    }


def _describe_shuffle(shuffle: dict[str, Any]) -> str:
    order = "global"
    if shuffle["kind"] == "window":
        size = format_bytes(shuffle["decoded_bytes"])
        order = f"windows of {shuffle['window']:,} samples, {shuffle['lanes']} lanes ({size} to decode)"
    classes = ", ".join(
        f"{quality['classes']:.0%} on {count_of(world_size, 'rank')}"
        for world_size, quality in shuffle["mixture"].items()
    )
    return (
        f"{order}\nclasses of batches of {shuffle['batch_size']} of sorted data, to a perfect shuffle: {classes}"
    )


def _columns(fields: Mapping[str, Field], lengths: dict[str, dict[str, Any]]) -> Table:
    """Type, size and quantiles of the lengths of each column."""
    table = Table(box=None, pad_edge=False, header_style=FAINT)
    table.add_column("column", overflow="fold")
    table.add_column("type", overflow="fold")
    quantiles = ("least", "25 %", "median", "75 %", "95 %", "most") if lengths else ()
    for title in ("a sample", *quantiles):
        table.add_column(title, justify="right", no_wrap=True)
    for name, field in fields.items():
        summary = lengths.get(name)
        size = _row_bytes(field, summary)
        cells = []
        if summary is not None:
            cells = [summary["least"], *(summary["quantiles"][f"{q}%"] for q in (25, 50, 75, 95)), summary["most"]]
        sizes = "" if size is None else format_bytes(size)
        table.add_row(clean(name, NAME), clean(str(field)), sizes, *(f"{cell:,}" for cell in cells))
    return table


def _row_bytes(field: Field, lengths: dict[str, Any] | None) -> float | None:
    """Bytes of a row, the mean of ragged rows; None for objects."""
    if field.kind == "object":
        return None
    return field.row_bytes() if lengths is None else field.row_bytes() * lengths["mean"]


def _histogram(bars: list[dict[str, int]], width: int = 40) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(width=width, no_wrap=True)
    table.add_column(justify="right", style=FAINT, no_wrap=True)
    most, total = max(bar["count"] for bar in bars), sum(bar["count"] for bar in bars)
    for bar in bars:
        label = f"  {bar['from']:,}" + (f" – {bar['to']:,}" if bar["to"] > bar["from"] else "")
        table.add_row(label, clean(format_bar(bar["count"] / most, width), BAR), f"{bar['count'] / total:.1%}")
    return table


def look(source: Any, names: Sequence[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Read evenly spaced runs of samples; their number, and a summary of the lengths in each of these columns."""
    arrays: dict[str, list[Int64]] = {name: [] for name in names}
    seen = nbytes = 0
    for ids in runs(len(source)) if names else ():
        columns = source.fetch(ids, names)
        for name in names:
            column = columns[name]
            if isinstance(column, (Bytes, Ragged)):
                arrays[name].append(column.lengths)
            else:  # a few ragged rows may all have one length
                arrays[name].append(np.array([len(row) for row in column.rows()], np.int64))
            nbytes += column.nbytes
        seen += len(ids)
        if nbytes > LOOK_BYTES:
            break
    return seen, {name: summarize(np.concatenate(parts)) for name, parts in arrays.items()}


def runs(size: int) -> Iterator[Int64]:
    """Batches of sample ids to read: all samples of a small dataset, else runs from the first to the last."""
    length, count = (size, 1) if size <= LOOKS else (LOOKS // RUNS, RUNS)
    for run in range(count):
        first = (size - length) * run // max(1, count - 1)
        for start in range(first, first + length, BATCH):
            yield np.arange(start, min(start + BATCH, first + length), dtype=np.int64)


def summarize(lengths: Int64) -> dict[str, Any]:
    """Extremes, mean, quantiles and histogram of at least one length: JSON-able."""
    least, most = int(lengths.min()), int(lengths.max())
    quantiles = np.percentile(lengths, QUANTILES, method="inverted_cdf").astype(int).tolist()
    edges = edges_of(least, most, quantiles[QUANTILES.index(50)])
    counts = np.histogram(lengths, [*edges[:-1], edges[-1] - 0.5])[0].tolist()
    bars = zip(pairwise(edges), counts, strict=True)
    return {
        "least": least,
        "mean": float(lengths.mean()),
        "most": most,
        "quantiles": {f"{percent}%": length for percent, length in zip(QUANTILES, quantiles, strict=True)},
        "histogram": [{"from": low, "to": high - 1, "count": count} for (low, high), count in bars],
    }


def edges_of(least: int, most: int, median: int) -> list[int]:
    """Edges of bars: equal round widths, or powers of two if a few lengths are far larger than the others."""
    if most > 8 * max(1, median) and most > 2 * _BARS:
        first = max(1, least).bit_length() - 1
        step = -(-(most.bit_length() - first) // (_BARS + 4))
        edges = [1 << power for power in range(first, most.bit_length() + step, step)]
        return [0, *edges] if least == 0 else edges
    least_width = -(-(most - least + 1) // _BARS)
    power = 10 ** (len(f"{least_width}") - 1)
    width = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= least_width)
    return [width * index for index in range(least // width, most // width + 2)]
