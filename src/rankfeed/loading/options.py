"""Validation of the options that loaders and samplers share."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from torch.utils.data import DataLoader

from rankfeed._util.validate import (
    check_callable,
    check_choice,
    check_instance,
    check_int,
    check_name,
    check_names,
)
from rankfeed.columns import Layout
from rankfeed.columns.layout import parse_layout
from rankfeed.errors import ArgumentError, safe_repr
from rankfeed.plan import Plan, Shuffle, Tail
from rankfeed.plan.plan import DEFAULT_LANES, DEFAULT_WINDOW
from rankfeed.plan.schedule import MAX_BATCH_SIZE
from rankfeed.sources import ConcatSource, SelectSource, Source, from_dataset
from rankfeed.topology import Topology

WorkerKind = Literal["thread", "process"]

#: More workers or batches ahead than any machine can serve: a typing error, better found than tried.
MAX_WORKERS = 4096
MAX_PREFETCH_FACTOR = 2**20

#: Arguments of torch's DataLoader that a Loader does not have, and what it has instead.
_OF_TORCH = {
    "batch_sampler": "shuffle= and batch_size=, or plan= for an order of your own; source.select(ids) for a "
    "subset. rankfeed.DistributedBatchSampler is a batch_sampler for torch's DataLoader",
    "dataset": "rankfeed.Loader(source): the first argument, which may be a torch Dataset",
    "drop_last": 'tail="drop" drops the rest of an epoch, tail="even" (the default) delivers it, tail="pad" fills '
    "the last step",
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


def refuse_unknown(options: Mapping[str, object]) -> None:
    """Refuse keyword arguments that a Loader does not have.

    Raises:
        ArgumentError: torch's DataLoader has it; names the equivalent.
        TypeError: it is an argument of neither.
    """
    for name, value in options.items():
        if name in _OF_TORCH:
            raise ArgumentError(
                f"{name} is an argument of torch's DataLoader, not of rankfeed.Loader",
                found=f"{name}={safe_repr(value)}",
                remedy=f"use {_OF_TORCH[name]}" if "leave it out" not in _OF_TORCH[name] else _OF_TORCH[name],
            )
        raise TypeError(f"Loader() got an unexpected keyword argument {name!r}")


def source_of(given: object) -> Source:
    """The source that a loader reads: itself, or a map-style torch Dataset wrapped by ``rankfeed.from_dataset``.

    Raises:
        ArgumentError: it is neither; names the function that makes one of it.
    """
    if isinstance(given, Source):
        return given
    remedy = "pass what rankfeed.open(), from_dataset() or from_iterable() returned"
    if isinstance(given, str | bytes) or hasattr(given, "__fspath__"):
        remedy = f"pass rankfeed.open({safe_repr(given)})"
    elif isinstance(given, DataLoader):
        remedy = "pass the dataset of the DataLoader: rankfeed.Loader(loader.dataset, loader.batch_size)"
    elif _is_stream(given):
        remedy = "pass rankfeed.from_iterable(dataset), whose loader has no length"
    elif not isinstance(given, type | Mapping) and hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return from_dataset(given)
    raise ArgumentError(
        "rankfeed.Loader cannot read this",
        expected="a source, a map-style torch Dataset, or a stream of rankfeed.from_iterable",
        found=safe_repr(given),
        remedy=remedy,
    )


def _is_stream(given: object) -> bool:
    """Whether this can be iterated, but not be read by number."""
    if isinstance(given, type):
        return False
    # torch's base class has a __getitem__ that is not implemented, also for streams.
    if any(kind.__name__ == "IterableDataset" for kind in type(given).__mro__):
        return True
    by_number = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    return not by_number and (isinstance(given, Iterable) or inspect.isgeneratorfunction(given))


def check_batch_size(batch_size: object) -> int:
    """Rows of a batch."""
    return check_int("batch_size", batch_size, at_least=1, at_most=MAX_BATCH_SIZE)


def check_workers(
    num_workers: object, worker_kind: object, prefetch_factor: object
) -> tuple[int, WorkerKind, int]:
    """The three options of the workers."""
    return (
        check_int("num_workers", num_workers, at_least=0, at_most=MAX_WORKERS),
        check_choice("worker_kind", worker_kind, get_args(WorkerKind)),
        check_int("prefetch_factor", prefetch_factor, at_least=1, at_most=MAX_PREFETCH_FACTOR),
    )


def check_functions(**functions: object) -> None:
    """Functions by the name of their argument, or None."""
    for name, function in functions.items():
        if function is not None:
            check_callable(name, function)


def check_topology(topology: object) -> Topology | None:
    """A topology, or None for that of the environment."""
    if topology is None:
        return None
    return check_instance(
        "topology", topology, Topology, "a rankfeed.Topology, such as rankfeed.Topology(rank=0, world_size=2)"
    )


def plan_of(source: Source, shuffle: bool | str, seed: int, window: int, lanes: int | None) -> Plan:
    """The order that a loader's own arguments ask for."""
    chosen = check_choice("shuffle", shuffle, (False, True, *get_args(Shuffle)))
    kind: Shuffle = source.default_shuffle if chosen is True else chosen or "none"
    window = check_int("window", window, at_least=1)
    if lanes is None:
        lanes = DEFAULT_LANES[kind]
    if shuffle is True and window == DEFAULT_WINDOW and source.best_window is not None:
        window = min(window, source.best_window)
    return Plan(source.blocks, shuffle=kind, seed=seed, window=window, lanes=lanes)


def check_column_names(
    source: Source, columns: Sequence[str] | None, id_column: str | None, tail: Tail, ragged: str
) -> list[str] | None:
    """The columns to read; refuses those that are not there, and names that the loader would write over."""
    columns = None if columns is None else check_names("columns", columns)
    check_id_column(id_column)
    if source.declared is not None and source.declared.layout is None:
        return columns  # fields that are learned by reading samples are so in the process that iterates
    fields = source.fields
    if not source.as_dicts:  # nothing can be added to them
        for name, value, given in (
            ("id_column", id_column, id_column is not None),
            ('tail="pad"', "it marks rows", tail == "pad"),
            ("columns", columns, columns is not None),
        ):
            if given and (name == "columns" or source.annotate is None):
                raise ArgumentError(
                    f"{name} needs samples that are dicts",
                    found=f"{value!r} for a Dataset whose samples are something else",
                    remedy="return dicts from the Dataset's __getitem__",
                )
        return columns
    missing = [name for name in columns or () if name not in fields]
    if missing:
        raise ArgumentError(
            "no such column",
            expected="a list of some of " + ", ".join(fields),
            found=", ".join(map(repr, missing)),
        )
    names = list(fields if columns is None else columns)
    added = [f"{name}_lengths" for name in names if ragged == "pad" and fields[name].kind == "ragged"]
    added += [id_column] if id_column is not None else []
    added += ["valid"] if tail == "pad" else []
    for name in added:
        if name in names or added.count(name) > 1:
            raise ArgumentError(
                "the loader would add a column whose name is taken",
                found=repr(name),
                remedy='choose another id_column, leave that column out with columns=, or take ragged="list"',
            )
    return columns


def check_id_column(id_column: object) -> None:
    """The name of the column for sample ids, or None."""
    if id_column is None:
        return
    if check_name("id_column", id_column) == "valid":
        raise ArgumentError(
            "column name 'valid' is reserved for the padding mask", remedy="choose another id_column"
        )


def agreed_layout(source: Source, columns: Sequence[str] | None) -> Layout | None:
    """What the samples of sources that stand one behind the other hold, if they are dicts; else None.

    Raises:
        SourceError: their columns are of different types.
    """
    inner = source
    while isinstance(inner, SelectSource):
        inner = inner.source
    if not isinstance(inner, ConcatSource) or inner.declared is None:
        return None
    fields = source.fields
    if not source.as_dicts:
        return None
    return parse_layout({name: fields[name] for name in (fields if columns is None else columns)})
