"""Options that several commands share, and what they mean: a dataset, its format options, a plan."""

import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, cast

import numpy as np
import typer

from rankfeed.errors import ArgumentError
from rankfeed.plan import Plan, Schedule
from rankfeed.plan.plan import DEFAULT_LANES, DEFAULT_WINDOW, Shuffle
from rankfeed.plan.schedule import Tail
from rankfeed.sources import Source
from rankfeed.sources import open as open_source
from rankfeed.topology import Topology


def option(metavar: str, help: str, *names: str, least: int | None = None) -> Any:
    """An option with a value."""
    return typer.Option(*names, min=least, metavar=metavar, help=help)


Data = Annotated[list[str], typer.Argument(metavar="DATA", help="Paths or patterns of one dataset.")]
PlanData = Annotated[str | None, typer.Argument(metavar="DATA", help="A dataset; or give --samples.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read pickled objects, which can run code.")]
BatchSize = Annotated[int, option("N", "Samples in a batch of one rank.", least=1)]
ShuffleKind = Annotated[Shuffle, typer.Option(help="Order of the samples.")]
Seed = Annotated[int, option("N", "Seed of the order.")]


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Options for opening a dataset."""

    format: Annotated[str | None, option("NAME", "Format; detected from the content if left out.")] = None
    format_options: Annotated[
        list[str] | None, option("NAME=VALUE", "Option of the format; may be repeated.", "--option", "-o")
    ] = None
    cache_dir: Annotated[str | None, option("DIR", "For indexes of read-only data directories.")] = None

    def as_arguments(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        """Arguments of `rankfeed.open`."""
        arguments = {"format": self.format, "cache_dir": self.cache_dir, "allow_pickle": allow_pickle}
        return parse_options(self.format_options or ()) | arguments

    def open(self, data: Sequence[str], *, allow_pickle: bool = False, columns: list[str] | None = None) -> Source:
        """Open a dataset; raises RankfeedError."""
        return open_source(dataset_path(data), columns=columns, **self.as_arguments(allow_pickle=allow_pickle))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options that describe a plan and its schedule."""

    samples: Annotated[float | None, option("N", "Number of samples without data, such as 1e12.")] = None
    blocks: Annotated[float, option("N", "Number of equal blocks of --samples.")] = 1
    ranks: Annotated[int, option("N", "World size.", least=1)] = 1
    workers: Annotated[int, option("N", "Workers of each rank.", least=0)] = 0
    batch_size: BatchSize = 1
    shuffle: ShuffleKind = "global"
    seed: Seed = 0
    window: Annotated[int, option("N", "With --shuffle window: samples that are mixed.", least=1)] = DEFAULT_WINDOW
    lanes: Annotated[int | None, option("N", "Streams of blocks; 64 for --shuffle window, else 1.")] = None
    tail: Annotated[Tail, typer.Option(help="End of an epoch that the global batch does not divide.")] = "even"
    epoch: Annotated[int, option("N", "Number of the epoch, from 0.", least=0)] = 0
    start: Annotated[int, option("N", "Samples of the epoch that are already consumed.", least=0)] = 0

    def check_data(self, data: str | Sequence[str] | None) -> None:
        """Raise an ArgumentError unless there is either a dataset or --samples."""
        if (data is None) == (self.samples is None):
            raise ArgumentError("expected either a dataset or --samples", remedy="see --help")

    def block_sizes(self, source: Source | None) -> Any:
        """Block sizes of a source, or those of --samples and --blocks."""
        if self.samples is None:
            return cast(Source, source).blocks
        total, count = _check_whole("--samples", self.samples), _check_whole("--blocks", self.blocks)
        if not 1 <= count <= max(1, total):
            raise ArgumentError("invalid --blocks", expected=f"1 to {total}", found=count)
        size, larger = divmod(total, count)
        return total if count == 1 else np.full(count, size, np.int64) + (np.arange(count) < larger)

    def plan(self, block_sizes: Any) -> Plan:
        lanes = DEFAULT_LANES.get(self.shuffle, 1) if self.lanes is None else self.lanes
        return Plan(block_sizes, shuffle=self.shuffle, seed=self.seed, window=self.window, lanes=lanes)

    def schedule(self, plan: Plan, topology: Topology) -> Schedule:
        return Schedule(
            plan, batch_size=self.batch_size, topology=topology, epoch=self.epoch, start=self.start, tail=self.tail
        )


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command have parameters that are dataclasses of options: Typer sees one option for each field."""
    signature = inspect.signature(command)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for name, parameter in signature.parameters.items():
        group: Any = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            groups[name] = group
            parameters += inspect.signature(group).parameters.values()
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            options = {field.name: values.pop(field.name) for field in fields(group) if field.name in values}
            values[name] = group(**options)
        command(**values)

    expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def allow_imports() -> None:
    """Let functions of the working directory be imported, as ``python -m`` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def dataset_path(data: Sequence[str]) -> str | list[str]:
    """One path or pattern as it is, several as a list."""
    return data[0] if len(data) == 1 else list(data)


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Options of a format by name; a value is JSON if it can be parsed as JSON, else text."""
    options = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise ArgumentError("invalid --option", expected="name=value", found=text)
        try:
            options[name] = json.loads(value)
        except (ValueError, RecursionError):
            options[name] = value
    return options


def format_name(data: Sequence[str], format: str | None) -> str | None:
    """Name of the format of a dataset; None if it is not known."""
    from rankfeed.sources.formats import detect_format
    from rankfeed.sources.paths import as_paths

    return detect_format(as_paths(dataset_path(data)), format)


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


def _check_whole(name: str, value: float) -> int:
    if not (math.isfinite(value) and value == int(value) and abs(value) < 2**63):
        raise ArgumentError(f"{name} must be a whole number below 2^63", found=value)
    return int(value)
