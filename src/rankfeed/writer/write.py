"""``rankfeed.write``: writes any source or iterable of dicts as Arrow IPC shards with a manifest."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from rankfeed._util.validate import (
    check_bool,
    check_choice,
    check_int,
    check_optional,
    check_path,
    check_seconds,
    check_str,
    invalid,
)
from rankfeed.errors import ArgumentError
from rankfeed.plan import Plan
from rankfeed.sources import Source
from rankfeed.sources.packed import PackedSource
from rankfeed.storage.manifest import STAGING_NAME
from rankfeed.writer.coordinator import WriteRequest, coordinate
from rankfeed.writer.runners.local import run_locally
from rankfeed.writer.sample_map import SampleMap

RunnerName = Literal["local", "ray", "ranks"]
Order = Literal["stored", "shuffled"]

_MAX_WORKERS = 4096


def write(
    source_or_iterable: Source | Iterable[dict[str, Any]],
    dest: str | os.PathLike[str],
    *,
    runner: RunnerName = "local",
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
    stall_timeout: float = 60.0,
) -> PackedSource:
    """Write a dataset as Arrow IPC shards, which any Arrow reader opens, and a manifest.

    The same input gives the same bytes, whatever the runner, the number of workers and however often the call was
    interrupted. A call that was killed leaves nothing that opens as a dataset; repeated, it continues. An iterable
    is read again from its start then, and compared with what is there. The input is never changed.

    Args:
        source_or_iterable: a source, or dicts of numbers, arrays, tensors, strings and bytes with the same keys.
            A field whose arrays all have one shape becomes dense, one whose first dimensions differ ragged.
        dest: directory, new or of an interrupted call; returned as it is if it contains this input already.
        runner: "local": on this machine. "ray": on the Ray cluster that this process is connected to or finds,
            else on one that it starts. "ranks": on the ranks of the job that this process belongs to; all of them
            call. The last two take a source, whose files and ``dest`` all nodes see under the same path.
        workers: processes for a source; None: one per core (Ray: of the cluster); 0 or 1: the calling process. An
            iterable is read by the calling process.
        shard_bytes: approximate size of a shard.
        progress: show a progress bar if standard error is a terminal.
        resume: keep what an interrupted call left; False starts over, which "ranks" refuses.
        map: called with each sample, returns what is written instead: a dict, None (left out), or several dicts (a
            list, a generator). Called as ``map(sample, rng)`` if it takes a second argument: a numpy Generator
            keyed by ``seed`` and the sample's id.
        map_batch: if not 0, ``map`` is called with lists of that many samples (the last one may be shorter), and
            its generator is keyed by the first.
        key: name of what rankfeed cannot identify: the function and its version, the content of an iterable or of
            a Dataset. Without one, a second call reads such an input again to compare its rows; with one, it
            trusts the key. "ranks" needs one for such an input.
        order: of the rows: "stored", or "shuffled": that of ``Plan(len(source), seed=seed)`` in epoch 0.
        seed: of the shuffled order, and of the generators for ``map``.
        append: add shards to a finished dataset, whose own are not changed. An input that it contains already is
            not added again, so one that rankfeed cannot identify needs a ``key``.
        stall_timeout: seconds without progress. "ranks" reassigns the task of a rank that makes none, and gives up
            what it cannot reassign after five times as long; "ray" warns, and gives up a cluster without cores
            after five times as long.

    Returns:
        The dataset, opened.

    Raises:
        WriteError: a sample cannot be stored (named by row and field), ``map`` raised, the directory cannot be
            written or contains other files, or workers crashed repeatedly.
        ArgumentError: an argument has an invalid type or value.
        MissingExtraError: Ray is not installed.

    Examples:
        >>> import tempfile, numpy as np
        >>> clips = ({"frames": np.ones((n, 2)), "label": n % 2} for n in (3, 1, 2))
        >>> source = write(clips, tempfile.mkdtemp() + "/clips", progress=False)
        >>> source.fields["frames"], source[2]["frames"].shape
        (Field(kind='ragged', dtype='float64', shape=(2,)), (2, 2))
        >>> def long_ones(clip):
        ...     return {"frames": clip["frames"]} if len(clip["frames"]) > 1 else None
        >>> len(write(source, tempfile.mkdtemp() + "/long", map=long_ones, progress=False))
        2
    """
    given: Any = source_or_iterable
    runner = check_choice("runner", runner, get_args(RunnerName))
    workers = check_optional(check_int, "workers", workers, at_least=0, at_most=_MAX_WORKERS)
    shard_bytes = check_int("shard_bytes", shard_bytes, at_least=1, at_most=2**63 - 1)
    progress = check_bool("progress", progress)
    resume = check_bool("resume", resume)
    append = check_bool("append", append)
    map_batch = check_int("map_batch", map_batch, at_least=0, at_most=2**31 - 1)
    seed = check_int("seed", seed)
    stall_timeout = check_seconds("stall_timeout", stall_timeout, above=0)
    key = check_str("key", key)
    no_rows = getattr(given, "shape", None) == ()  # an array or tensor of one number
    if not isinstance(given, (Source, Iterable)) or isinstance(given, (str, bytes, dict, type)) or no_rows:
        remedy = "pass what rankfeed.open or rankfeed.from_dataset returns, or a generator of dicts"
        raise invalid("source_or_iterable", "a source, or an iterable of samples", given, remedy)
    if map is None and map_batch:
        raise ArgumentError("map_batch needs map", found=map_batch)
    if runner != "local" and not isinstance(given, Source):
        raise ArgumentError(
            f"runner={runner!r} cannot partition an iterable",
            expected="a source",
            found=type(given).__name__,
            remedy='pass a source (rankfeed.open, rankfeed.from_dataset), or use runner="local"',
        )
    sample_map = None if map is None else SampleMap(map, map_batch, seed)
    plan = None
    if check_choice("order", order, get_args(Order)) == "shuffled":
        if not isinstance(given, Source):
            raise ArgumentError(
                "an iterable is written in its own order",
                expected='a source for order="shuffled"',
                found=type(given).__name__,
                remedy="write it, then write the dataset in shuffled order",
            )
        plan = Plan(len(given), shuffle="global", seed=seed)
    path = check_path("dest", dest)
    if "://" in path:
        raise invalid("dest", "a directory of a mounted file system; object stores are not supported yet", dest)
    target = Path(os.path.abspath(path))  # other processes need not have the same working directory
    request = WriteRequest(given, target, shard_bytes, progress, resume, sample_map, plan, append, key)
    if (append or runner == "ranks") and not request.origin:
        raise ArgumentError(
            f"{'append=True' if append else f'runner={runner!r}'} needs a key for this input",
            expected="key=..., by which each call, or rank, recognises the rows",
            found="a map function" if map is not None else type(given).__name__,
            remedy='name the rows, such as key="2024-05-01", and change the name whenever they change',
        )
    if runner == "ray":
        from rankfeed.writer.runners.ray import RayCluster

        cluster = RayCluster(workers, stall_timeout)
        return coordinate(request, cluster.run, cluster.session())
    if runner == "ranks":
        from rankfeed.writer.runners.ranks import write_on_ranks

        if workers is not None:
            raise ArgumentError('runner="ranks" uses the ranks as its workers', found=f"workers={workers}")
        if not resume:
            raise ArgumentError(
                'runner="ranks" cannot start over: a rank would remove what another one has written',
                found="resume=False",
                remedy=f"remove {request.dest / STAGING_NAME} before the job starts",
            )
        return write_on_ranks(request, stall_timeout)
    return coordinate(request, partial(run_locally, workers))
