"""Validation of the options of loaders and samplers."""

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader, IterableDataset

from rankfeed._util.global_rng import preserve_rng_state
from rankfeed._util.validate import (
    check_bool,
    check_choice,
    check_columns_option,
    check_int,
    check_name,
    check_path,
    invalid,
)
from rankfeed.columns.layout import Branch, Layout, parse_layout
from rankfeed.errors import ArgumentError, safe_repr
from rankfeed.loading.collate import name_conflict
from rankfeed.loading.lazy_topology import LazyTopology
from rankfeed.plan import Plan, Tail
from rankfeed.plan.plan import DEFAULT_LANES, DEFAULT_WINDOW, Shuffle
from rankfeed.plan.schedule import MAX_BATCH_SIZE
from rankfeed.sources import ConcatSource, SelectSource, Source, from_dataset
from rankfeed.sources.source import check_columns, with_derived

WorkerKind = Literal["thread", "process"]

#: More workers or batches than any machine can serve are a typing error.
_MAX_WORKERS, _MAX_PREFETCH_FACTOR = 4096, 2**20

#: Arguments of torch's DataLoader that a Loader does not have, and the equivalent.
_DATALOADER_ARGUMENTS = {
    "batch_sampler": "shuffle= and batch_size=, or plan= for an order of your own; source.select(ids) for a "
    "subset. rankfeed.DistributedBatchSampler is a batch_sampler for torch's DataLoader",
    "dataset": "rankfeed.Loader(source): the first argument, which may be a torch Dataset",
    "drop_last": 'tail="drop", which leaves out the rest of an epoch; tail="even" (the default) delivers it, and '
    'tail="pad" fills the last step',
    "generator": "seed=, which keys the order and the generator that a transform(sample, rng) gets",
    "in_order": "leave it out: batches are always delivered in order",
    "multiprocessing_context": 'worker_kind="process", whose processes start without a fork of yours',
    "persistent_workers": "leave it out: workers are kept from epoch to epoch",
    "pin_memory": "device=, which copies batches to the accelerator through pinned memory",
    "pin_memory_device": "device=, which copies batches to the accelerator through pinned memory",
    "sampler": "shuffle=, or plan= for an order of your own; source.select(ids) for a subset. "
    "rankfeed.DistributedSampler is a sampler for torch's DataLoader",
    "timeout": "rankfeed.Lockstep(loader, limit=seconds), which ends a job that waits for longer",
    "worker_init_fn": "transform(sample, rng), whose rng is keyed by seed, epoch and sample; it opens files on "
    "first use",
}
#: Options that need samples by id: the value that asks for nothing, and what to do for a stream instead.
_MAP_OPTIONS: dict[str, tuple[Any, str]] = {
    "shuffle": (False, "shuffle inside the stream, with one seed on all ranks (a factory is passed the epoch)"),
    "window": (DEFAULT_WINDOW, "shuffle inside the stream"),
    "lanes": (None, "a stream is read in one piece"),
    "plan": (None, "let the stream yield samples in your order"),
    "columns": (None, "let the stream yield what you need"),
    "audit": (False, "rankfeed.audit(loader) counts what any loader delivers"),
}


def refuse_unknown_options(options: Mapping[str, object], function: Callable[..., None]) -> None:
    """Refuse keyword arguments that a Loader does not have; ``function`` is its constructor."""
    for name, value in options.items():
        if (equivalent := _DATALOADER_ARGUMENTS.get(name)) is not None:
            raise ArgumentError(
                f"{name} is an argument of torch's DataLoader, not of rankfeed.Loader",
                found=f"{name}={safe_repr(value)}",
                remedy=equivalent if equivalent.startswith("leave it out") else f"use {equivalent}",
            )
        names = [*inspect.signature(function).parameters][2:-1]  # without self, source and **unknown
        close = difflib.get_close_matches(name, names)
        remedy = f"did you mean {' or '.join(close)}?" if close else f"the options are {', '.join(names)}"
        raise TypeError(f"Loader() got an unexpected keyword argument {name!r}; {remedy}")


def refuse_options_for_stream(**options: Any) -> None:
    """Refuse options that need samples by id."""
    for name, value in options.items():
        default, remedy = _MAP_OPTIONS[name]
        if value is not default and not (type(value) is type(default) and value == default):
            raise ArgumentError(
                f"a stream has no {name}: its samples come in its own order, once, and cannot be read by id",
                found=f"{name}={safe_repr(value)}",
                remedy=remedy,
            )


def as_source(given: object) -> Source:
    """A source as it is; a map-style torch Dataset wrapped by ``rankfeed.from_dataset``."""
    if isinstance(given, Source):
        return given
    remedy = "pass what rankfeed.open(), rankfeed.from_dataset() or rankfeed.from_iterable() returned"
    is_refused = isinstance(given, type | Mapping | IterableDataset)
    if isinstance(given, str | bytes) or hasattr(given, "__fspath__"):
        remedy = f"pass rankfeed.open({safe_repr(given)})"
    elif isinstance(given, DataLoader):
        remedy = "pass the dataset of the DataLoader: rankfeed.Loader(loader.dataset, loader.batch_size)"
    elif not is_refused and hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return from_dataset(given)
    raise ArgumentError(
        "rankfeed.Loader cannot read this",
        expected="a source, a map-style torch Dataset, or a stream of rankfeed.from_iterable",
        found=safe_repr(given),
        remedy=remedy,
    )


@dataclass(frozen=True)
class FeedOptions:
    """The validated options of a Loader that its feed needs (see :class:`rankfeed.Loader`)."""

    batch_size: int
    tail: Tail
    num_workers: int
    worker_kind: WorkerKind
    prefetch_factor: int
    topology: LazyTopology

    def __post_init__(self) -> None:
        check_choice("tail", self.tail, get_args(Tail))
        check_choice("worker_kind", self.worker_kind, get_args(WorkerKind))
        for name, (at_least, at_most) in {
            "batch_size": (1, MAX_BATCH_SIZE),
            "num_workers": (0, _MAX_WORKERS),
            "prefetch_factor": (1, _MAX_PREFETCH_FACTOR),
        }.items():
            integer = check_int(name, getattr(self, name), at_least=at_least, at_most=at_most)
            object.__setattr__(self, name, integer)


def make_plan(source: Source, shuffle: bool | str, seed: int, window: int, lanes: int | None) -> Plan:
    """The order that the options of a loader describe."""
    chosen = check_choice("shuffle", shuffle, (False, True, *get_args(Shuffle)))
    kind: Shuffle = source.default_shuffle if chosen is True else chosen or "none"
    window = check_int("window", window, at_least=1)
    if shuffle is True and window == DEFAULT_WINDOW and source.best_window is not None:
        window = min(window, source.best_window)
    lanes = DEFAULT_LANES[kind] if lanes is None else lanes
    return Plan(source.blocks, shuffle=kind, seed=seed, window=window, lanes=lanes)


def open_properties(shuffle: bool | str, window: int, lanes: int | None) -> tuple[str, ...]:
    """Properties of the order that the options of a loader leave open, so that a state may decide them."""
    is_open = {
        "shuffle": shuffle is True,
        "window": shuffle is True and window == DEFAULT_WINDOW,
        "lanes": lanes is None,
    }
    return tuple(name for name, value in is_open.items() if value)


def check_column_names(
    source: Source,
    columns: Sequence[str] | None,
    id_column: str | None,
    tail: Tail,
    ragged: str,
    *,
    is_transformed: bool,
) -> list[str] | None:
    """The columns to read; refuses missing columns, and names that the loader would overwrite."""
    columns = None if columns is None else with_derived(check_columns_option(columns), source.derived)
    declared = source.declared
    if declared is not None and declared.layout is None:
        return columns  # fields that are inferred from samples are so in the process that iterates
    fields = source.fields
    if not source.as_dicts:
        for name, value, is_given in (
            ("id_column", id_column, id_column is not None),
            ('tail="pad"', "it marks rows", tail == "pad"),
            ("columns", columns, columns is not None),
        ):
            if is_given and (name == "columns" or source.annotate is None):
                raise _needs_dicts(name, f"{value!r} for a Dataset whose samples are something else")
        return columns
    # The declared fields are those of a transform's results, the columns those of the samples that it gets.
    names = check_columns(None if declared is not None and is_transformed else columns, fields)
    added = [f"{name}_lengths" for name in names if ragged == "pad" and fields[name].kind == "ragged"]
    added += [id_column] if id_column is not None else []
    added += ["valid"] if tail == "pad" else []
    for name in added:
        if name in names or added.count(name) > 1:
            raise name_conflict(name)
    return columns


def check_added_columns(layout: Layout | None, id_column: str | None, tail: Tail) -> None:
    """Refuse samples that are not dicts if the loader adds a column to their batches."""
    if layout is None or (isinstance(layout, Branch) and layout.kind is dict):
        return
    for name, is_added in ((f"id_column={id_column!r}", id_column is not None), ('tail="pad"', tail == "pad")):
        if is_added:
            raise _needs_dicts(name, f"samples that are {layout}")


def _needs_dicts(name: str, description: str) -> ArgumentError:
    return ArgumentError(
        f"{name} needs samples that are dicts",
        expected="dicts, to which a column can be added",
        found=description,
        remedy="return dicts as samples, or pass a transform that does, or a collate_fn that returns a dict",
    )


def check_drop_behind(source: Source, drop_behind: object) -> bool:
    """Whether pages are dropped; an ArgumentError for data that are not read in place."""
    drops = check_bool("drop_behind", drop_behind)
    if drops and not source.reads_in_place:
        raise ArgumentError(
            "drop_behind is for data that are read in place",
            expected="memory-mapped files, whose rows are copied as they are",
            found=safe_repr(source),
            remedy="rankfeed.write copies data into such files",
        )
    return drops


def check_id_column(id_column: object) -> None:
    """The name of the column for sample ids, or None."""
    if id_column is not None and check_name("id_column", id_column) == "valid":
        raise ArgumentError(
            "column name 'valid' is reserved for the padding mask", remedy="choose another id_column"
        )


def ledger_folder(audit: Any) -> Path | None:
    """The folder that a loader's ``audit=`` names, as an absolute path; None if it is a bool."""
    if isinstance(audit, bool):
        return None
    try:
        return Path(os.path.abspath(check_path("audit", audit)))
    except ArgumentError:
        raise invalid("audit", "True, False or a folder for ledgers", audit) from None


def concat_layout(source: Source, columns: Sequence[str] | None) -> Layout | None:
    """The common layout of concatenated sources whose samples are dicts; None for any other source."""
    inner = source
    while isinstance(inner, SelectSource):
        inner = inner.source
    if not isinstance(inner, ConcatSource) or inner.declared is None:
        return None
    with preserve_rng_state():  # wrapped Datasets are asked for samples, and may draw random numbers
        fields = source.fields
        if not source.as_dicts:
            return None
    return parse_layout({name: fields[name] for name in (fields if columns is None else columns)})
