"""Packing: any source or iterable of dicts, written as Arrow IPC shards with a manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rankfeed._util.validate import (
    check_bool,
    check_choice,
    check_int,
    check_optional,
    check_seconds,
    check_str,
    invalid,
)
from rankfeed.building.destination import folder
from rankfeed.building.job import Job, Task, pack_stretch
from rankfeed.building.mapping import Mapped
from rankfeed.building.packing import Request, lead
from rankfeed.building.records import Part
from rankfeed.building.workers import can_travel, run
from rankfeed.errors import ArgumentError
from rankfeed.plan import Plan
from rankfeed.sources import PackedSource, Source

Where = Literal["local", "ray", "ranks"]
Order = Literal["stored", "shuffled"]

#: More processes than any machine can run: a typing error, better found than tried.
_MAX_WORKERS = 4096


def pack(
    source_or_iterable: Source | Iterable[dict[str, Any]],
    dest: str | os.PathLike[str],
    *,
    runner: Where = "local",
    workers: int | None = None,
    shard_bytes: int = 256 << 20,
    progress: bool = True,
    resume: bool = True,
    map: Callable[..., Any] | None = None,
    map_batch: int = 0,
    key: str = "",
    order: Order = "stored",
    seed: int = 0,
    append: bool = False,
    patience: float = 60.0,
) -> PackedSource:
    """Write a data set as Arrow IPC shards, which any Arrow reader opens, and a manifest.

    The same input gives the same bytes, whatever the runner, the number of workers and however often it was
    interrupted: a pack that was killed leaves nothing that opens as a data set, and called again it goes on. An
    iterable is read again from its start then, and compared with what is there. The input is never changed.

    Args:
        source_or_iterable: a source, or dicts of numbers, arrays, tensors, strings and bytes with the same keys.
            A field whose arrays all have one shape becomes dense, one whose first dimensions differ ragged.
        dest: folder, new or of a pack that was interrupted; left as it is where this input was packed.
        runner: "local": on this machine. "ray": on the Ray cluster that this process is connected to or finds,
            else on one that it starts. "ranks": on the ranks of the job that this process is one of; all of them
            call. The last two take a source, whose files and ``dest`` all nodes see under the same path.
        workers: processes for a source; as many as there are cores (Ray: of the cluster) if None; 0 or 1 for none
            of its own. An iterable is read by the process that calls.
        shard_bytes: size of a shard, about.
        progress: a bar on standard error while that is a terminal.
        resume: keep what an interrupted pack left; False starts over.
        map: called with each sample, returns what is packed instead: a dict, None (left out), or several dicts (a
            list, a generator). Called as ``map(sample, rng)`` if it takes a second argument: a numpy Generator
            keyed by ``seed`` and the sample's id.
        map_batch: if not 0, ``map`` is called with a list of so many samples (fewer at the end of a stretch of the
            input), and its generator is keyed by the first.
        key: a name for what cannot be told by looking: the function and its version, the content of an iterable or
            of a Dataset. Without one such an input is known by its rows alone, so that a second call makes them
            again to compare; with one a second call believes it.
        order: of the rows: "stored", or "shuffled": that of ``Plan(len(source), seed=seed)`` in epoch 0.
        seed: of the shuffled order, and of the generators that ``map`` is given.
        append: add shards to a finished data set, whose own are not touched. An input that is in it already (and
            can be told, see ``key``) is not added again.
        patience: seconds after which "ranks" has the others pack what a rank was at that gives no sign of life, or
            does not get done with a sample; both "ranks" and "ray" warn of whom they wait for. What "ranks" cannot
            do without is given up after five times as long, and a Ray cluster without cores is.

    Returns:
        the packed data set, opened.

    Raises:
        PackError: a sample cannot be stored (named by row and field), ``map`` raised, the folder cannot be written
            or holds something else, or those who were to help died.
        ArgumentError: an argument that cannot be meant.
        MissingExtraError: Ray is not installed.

    Examples:
        >>> import tempfile, numpy as np
        >>> clips = ({"frames": np.ones((n, 2)), "label": n % 2} for n in (3, 1, 2))
        >>> packed = pack(clips, tempfile.mkdtemp() + "/clips", progress=False)
        >>> packed.fields["frames"], packed[2]["frames"].shape
        (Field(kind='ragged', dtype='float64', shape=(2,)), (2, 2))
        >>> def long_ones(clip):
        ...     return {"frames": clip["frames"]} if len(clip["frames"]) > 1 else None
        >>> len(pack(packed, tempfile.mkdtemp() + "/long", map=long_ones, progress=False))
        2
    """
    given: Any = source_or_iterable
    runner = check_choice("runner", runner, get_args(Where))
    workers = check_optional(check_int, "workers", workers, at_least=0, at_most=_MAX_WORKERS)
    shard_bytes = check_int("shard_bytes", shard_bytes, at_least=1, at_most=2**63 - 1)
    progress, resume, append = (
        check_bool("progress", progress),
        check_bool("resume", resume),
        check_bool("append", append),
    )
    map_batch = check_int("map_batch", map_batch, at_least=0, at_most=2**31 - 1)
    seed = check_int("seed", seed)
    patience = check_seconds("patience", patience, above=0)
    key = check_str("key", key)
    no_rows = getattr(given, "shape", None) == ()  # an array or tensor of one number
    if not isinstance(given, (Source, Iterable)) or isinstance(given, (str, bytes, dict, type)) or no_rows:
        remedy = "pass what rankfeed.open or rankfeed.from_dataset returns, or a generator of dicts"
        raise invalid("source_or_iterable", "a source, or an iterable of samples", given, remedy)
    if map is None and map_batch:
        raise ArgumentError("map_batch without map", found=map_batch)
    if runner != "local" and not isinstance(given, Source):
        raise ArgumentError(
            f"an iterable cannot be shared out, and runner={runner!r} does so",
            found=type(given).__name__,
            remedy='give a source (rankfeed.open, rankfeed.from_dataset), or pack with runner="local"',
        )
    request = Request(
        given,
        folder(dest),
        shard_bytes,
        progress,
        resume,
        None if map is None else Mapped(map, map_batch, seed),
        _plan(given, order, seed),
        append,
        key,
    )
    if runner == "ray":
        from rankfeed.building.ray_runner import OnRay

        return lead(request, OnRay(workers, patience=patience))
    if runner == "ranks":
        from rankfeed.building.rank_runner import pack_on_ranks

        if workers is not None:
            raise ArgumentError('runner="ranks" has the ranks as its workers', found=f"workers={workers}")
        return pack_on_ranks(request, patience)
    return lead(request, _Local(workers))


def _plan(given: Any, order: str, seed: int) -> Plan | None:
    check_choice("order", order, get_args(Order))
    if order == "stored":
        return None
    if not isinstance(given, Source):
        raise ArgumentError(
            "an iterable is packed as it comes",
            expected='a source for order="shuffled"',
            found=type(given).__name__,
            remedy="pack it, then pack the packed data set in shuffled order",
        )
    return Plan(len(given), shuffle="global", seed=seed)


@dataclass(frozen=True)
class _Local:
    """This process, and others of this machine."""

    workers: int | None
    checks: bool = False

    def session(self, staging: Path) -> nullcontext[None]:
        return nullcontext()

    def step(self) -> None:
        """Nobody waits for this process alone."""

    def each(self, job: Job, tasks: list[Task]) -> Iterator[tuple[int, list[Part]]]:
        cores = len(os.sched_getaffinity(0))
        count = min(len(tasks), cores if self.workers is None else self.workers)
        shared = can_travel(job) if count > 1 else None
        if shared is None:
            return (pack_stretch(job, *task) for task in tasks)
        return run(pack_stretch, shared, tasks, count)
