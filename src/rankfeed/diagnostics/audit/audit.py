"""What any loader delivers, on all ranks: every sample is counted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from rankfeed._util.validate import check_callable, check_int, check_iterable, check_optional, check_path, invalid
from rankfeed.diagnostics.audit.collectives import AuditProcesses
from rankfeed.diagnostics.audit.epochs import INTERVALS, EpochReport, LoaderTraits, Place, RankEpoch, Repeat
from rankfeed.diagnostics.audit.reader import AuditReader, RankSummary, as_own, dataset_of
from rankfeed.diagnostics.audit.report import AuditReport
from rankfeed.diagnostics.audit.rules import AuditFacts, Expectation, KeyKind
from rankfeed.diagnostics.audit.universe import Universe
from rankfeed.diagnostics.keys import USUAL, Key, Words
from rankfeed.diagnostics.multiset import (
    EXAMPLES,
    HashPartitions,
    KeyCounts,
    Repeats,
    count,
    distinct,
    partition_ranges,
    repeats,
    unpack_places,
)
from rankfeed.errors import AuditError

#: Places that are named of a sample that was delivered more than once.
_PLACES = 4


def audit(
    loader: Iterable[Any],
    *,
    key: Key = USUAL,
    epochs: int = 1,
    universe: int | Iterable[Any] | None = None,
    before_epoch: Callable[[int], object] | None = None,
    max_steps: int | None = None,
    memory: int = 256 << 20,
    folder: str | Path | None = None,
) -> AuditReport:
    """Read a loader to its end and count what it delivers, over all ranks.

    A collective: every process of the job calls it with its own loader. Keys that exceed the memory are kept on
    disk: 16 bytes for each sample with a whole number as id, 24 for others.

    The verdict is "sound" if each expected sample was delivered once in each epoch and all ranks took the same
    number of steps, "diseased" if they did not, and "not proven" if it could not be counted: without ids, or if
    it is not known which samples are expected.

    Args:
        loader: any iterable of batches: a `Loader`, a torch ``DataLoader``, or of another library.
        key: where a batch has its samples' ids: a field's name (in dicts, in objects, in lists of dicts), a place
            in a tuple, or a function of the batch. In batches without the usual name, samples are identified by a
            hash of their content. A `Loader` has its own ``id_column``.
        epochs: how often to read it.
        universe: which samples are expected in each epoch: their ids, or a number n for 0 to n - 1. It is known of
            a `Loader`; of a torch ``DataLoader`` the length of its dataset is compared.
        before_epoch: called with the epoch's number before each, as a training loop does (``set_epoch``).
        max_steps: end each epoch after this many steps; a loader without an end needs it.
        memory: bytes for counting, approximately.
        folder: for keys on disk; the directory of temporary files if None.

    Returns:
        the same report on all ranks.

    Raises:
        AuditError: the loader raised an error, on any rank; batches have no such key; there are several processes
            and no process group of torch.distributed.
        ArgumentError: an invalid argument.

    Examples:
        >>> import rankfeed as rf
        >>> batches = [{"sample_id": [0, 1, 2]}, {"sample_id": [2, 4]}]
        >>> report = rf.audit(batches, universe=5)
        >>> print(report.epochs[0])
        epoch 0: 5 samples, 4 different, 1 missing, 1 repeated; 2 steps a rank
        >>> report.sound, [(each.code, each.evidence) for each in report.findings][1]
        (False, ('missing-samples', ('epoch 0: 1 samples: 3',)))
    """
    processes = AuditProcesses.detect()
    with ExitStack() as stack:
        reader: AuditReader
        expected: Universe

        def begin() -> tuple[object, ...]:
            nonlocal reader, expected, epochs, max_steps, memory
            epochs, max_steps, memory = _check(loader, key, epochs, before_epoch, max_steps, memory, folder)
            found, due = _of_own(loader, key, universe)
            expected = Universe(due)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankfeed-audit-", dir=folder)))
            reader = AuditReader(loader, found, scratch, processes.rank, memory)
            return epochs, memory, max_steps, expected.known, expected.size

        def read() -> RankSummary:
            for epoch in range(epochs):
                if before_epoch is not None:
                    before_epoch(epoch)
                reader.read(max_steps)
            return reader.summary()

        arguments = processes.each(begin, "the audit could not begin")
        if len({*arguments}) > 1:
            raise AuditError(
                "ranks were called with different arguments",
                expected="the same epochs, memory, max_steps and universe on all of them",
                found=dict(enumerate(arguments)),
            )
        summaries = processes.each(read, "the loader failed")
        _check_peers(summaries)
        return _count(processes, reader, summaries, expected, memory)


def _check(
    loader: Any, key: Any, epochs: Any, before_epoch: Any, max_steps: Any, memory: Any, folder: Any
) -> tuple[int, int | None, int]:
    """The counts, once all arguments are known to be valid."""
    check_iterable("loader", loader, "an iterable of batches")
    if isinstance(key, bool | np.bool_) or not (isinstance(key, str | int | np.integer) or callable(key)):
        raise invalid("key", "the name of a field, its place in a tuple, or a function of the batch", key)
    check_optional(check_callable, "before_epoch", before_epoch)
    check_optional(check_path, "folder", folder)
    return (
        check_int("epochs", epochs, at_least=1, at_most=10**6),
        check_optional(check_int, "max_steps", max_steps, at_least=1),
        check_int("memory", memory, at_least=1),
    )


def _of_own(loader: Any, key: Key, universe: Any) -> tuple[Key, Any]:
    """Where a `Loader` has its ids, and the samples of its plan."""
    own = as_own(loader)
    if own is None or own.id_column is None or key not in (USUAL, own.id_column):
        return key, universe
    size, _ = dataset_of(own) or (None, 0)
    return own.id_column, size if universe is None else universe


def _check_peers(summaries: Sequence[RankSummary]) -> None:
    """Tensor-parallel peers must read the same samples."""
    shares: dict[int, RankSummary] = {}
    for each in summaries:
        if each.share is not None:
            first = shares.setdefault(each.share, each)
            if [epoch.orders[-1] for epoch in first.epochs] != [epoch.orders[-1] for epoch in each.epochs]:
                raise AuditError(
                    "parallel peers were given different samples",
                    expected="the same batches on all processes of a data-parallel rank",
                    where=f"processes {first.rank} and {each.rank}",
                )


def _count(
    processes: AuditProcesses,
    reader: AuditReader,
    summaries: Sequence[RankSummary],
    expected: Universe,
    memory: int,
) -> AuditReport:
    """Count all epochs; each process counts some of the partitions."""
    if len({each.width for each in summaries if each.width}) > 1:
        raise AuditError("keys are whole numbers on some ranks and not on others", remedy="give all the same key=")
    kinds = {each.keys for each in summaries}
    keys: KeyKind = "none" if "none" in kinds else "content" if "content" in kinds else "ids"
    delivered = max(each.width for each in summaries)
    if keys == "ids" or not expected.is_number:
        expected.check(delivered)
    #: Whether keys are compared with the universe; otherwise only their number is.
    keyed = expected.known and (keys == "ids" or not expected.is_number)
    first = {each.share: each.rank for each in reversed(summaries)}
    # Of processes that read one share (tensor-parallel peers) one counts.
    counted = [each for each in summaries if each.share is None or first[each.share] == each.rank]
    width = delivered or expected.width or 1
    due = HashPartitions(reader.scratch / "universe", width, memory)
    logs = [each.partitions for each in reader.logs]
    if keys == "none" or processes.rank not in [each.rank for each in counted]:
        logs = [None for _ in logs]

    def prepare() -> int:
        if keyed and processes.rank == 0:
            for chunk in expected.chunks():
                due.add(chunk)
        return len(due) + sum(len(each or ()) for each in logs)

    total = sum(processes.each(prepare, "keys could not be sorted"))
    counts = [KeyCounts.none(width) for _ in logs]
    tallies = [_Tally([each.epochs[epoch] for each in counted]) for epoch in range(len(logs))]
    for number, (low, high) in enumerate(partition_ranges(total, width + 1, memory)):
        parts = [np.empty((0, width + 1), np.uint64) if each is None else each.read(low, high) for each in logs]
        gathered = processes.gather((parts, due.read(low, high)))
        if number % processes.world_size == processes.rank:
            together = [np.concatenate([each[epoch] for each, _ in gathered]) for epoch in range(len(logs))]
            some = gathered[0][1] if keyed else np.concatenate(together)[:, :-1]
            for epoch, records in enumerate(together):
                ranks = np.repeat(np.arange(len(gathered)), [len(each[epoch]) for each, _ in gathered])
                found = count(records[:, :-1], distinct(some)[0])
                counts[epoch] += found
                if found.unique < found.deliveries:
                    tallies[epoch].add(repeats(records[:, :-1], records[:, -1], ranks))
    every = processes.gather((counts, tallies))
    counts = [reduce(add, each) for each in zip(*(counts for counts, _ in every), strict=True)]
    tallies = [reduce(add, each) for each in zip(*(tallies for _, tallies in every), strict=True)]
    facts = AuditFacts(keys, *_expectation(expected, counted, counts), *_declared(counted))
    pairs = zip(counts, tallies, strict=True)
    return AuditReport(
        facts, tuple(_epoch(number, *each, facts, expected, keyed) for number, each in enumerate(pairs))
    )


def _expectation(
    expected: Universe, counted: Sequence[RankSummary], counts: Sequence[KeyCounts]
) -> tuple[Expectation | None, int | None]:
    if expected.known:
        return "declared", expected.size
    dataset = counted[0].dataset
    if dataset is not None and {each.dataset for each in counted} == {dataset}:
        limit = sum(each.traits.drops * max(epoch.largest_batch for epoch in each.epochs) for each in counted)
        if all(dataset[0] - limit <= each.unique <= dataset[0] for each in counts):
            return "dataset", dataset[0]
    return ("epochs" if len(counts) > 1 else None), None


def _declared(counted: Sequence[RankSummary]) -> tuple[bool, LoaderTraits]:
    traits = [each.traits for each in counted]
    workers = max(each.workers for each in traits)
    together = LoaderTraits(workers, any(each.drops for each in traits), any(each.replaces for each in traits))
    return any(each.cut for each in counted), together


def _epoch(
    number: int, counts: KeyCounts, tally: _Tally, facts: AuditFacts, expected: Universe, keyed: bool
) -> EpochReport:
    missing: int | None = None
    keyed = facts.keys != "none" and (keyed or facts.expectation == "epochs")
    if keyed:
        missing = counts.missing
    elif facts.expected is not None and facts.keys != "none":
        delivered = counts.unique if facts.expectation == "dataset" else counts.deliveries
        missing = max(0, facts.expected - delivered)
    return EpochReport(
        number,
        counts.deliveries,
        counts.unique,
        missing,
        counts.unknown if keyed else None,
        tuple(tally.figures()),
        tally.between_ranks,
        tally.between_workers,
        tally.interval,
        tuple(tally.repeats(expected)),
        expected.names(counts.missing_keys) if keyed else (),
        expected.names(counts.unknown_keys) if keyed else (),
        counts.digest,
        counts.missing_digest,
    )


class _Tally:
    """The repeats of an epoch, added up by rank and interval of steps."""

    def __init__(self, ranks: Sequence[RankEpoch]) -> None:
        self.ranks = sorted(ranks, key=lambda each: each.rank)
        self.interval = max(1, -(-max(each.steps for each in ranks) // INTERVALS))
        self.repeated = np.zeros((len(ranks), INTERVALS), np.int64)
        self.at_end = np.zeros(len(ranks), np.int64)
        self.between_ranks = self.between_workers = 0
        self.examples: list[tuple[Words, int, tuple[Place, ...]]] = []

    def add(self, found: Repeats) -> None:
        self.between_ranks += found.between_ranks
        self.between_workers += found.between_workers
        first = found.first
        steps, rows, workers = unpack_places(found.places)
        numbers = np.searchsorted([each.rank for each in self.ranks], found.ranks)
        last = np.array([each.steps - 1 for each in self.ranks])
        np.add.at(self.repeated, (numbers[~first], steps[~first] // self.interval), 1)
        np.add.at(self.at_end, numbers[~first & (steps == last[numbers])], 1)
        starts = np.flatnonzero(first)
        ends = [*starts[1:].tolist(), len(first)]
        for low, high in list(zip(starts.tolist(), ends, strict=True))[: EXAMPLES - len(self.examples)]:
            some = slice(low, min(high, low + _PLACES))
            columns = (each[some].tolist() for each in (found.ranks, workers, steps, rows))
            places = [
                Place(rank, None if worker < 0 else worker, step, row)
                for rank, worker, step, row in zip(*columns, strict=True)
            ]
            self.examples.append((found.keys[low : low + 1], high - low, tuple(places)))

    def __add__(self, other: _Tally) -> _Tally:
        total = _Tally(self.ranks)
        total.repeated, total.at_end = self.repeated + other.repeated, self.at_end + other.at_end
        total.between_ranks = self.between_ranks + other.between_ranks
        total.between_workers = self.between_workers + other.between_workers
        total.examples = [*self.examples, *other.examples][:EXAMPLES]
        return total

    def figures(self) -> Iterator[RankEpoch]:
        for each, counts, at_end in zip(self.ranks, self.repeated, self.at_end.tolist(), strict=True):
            yield replace(each, repeated=tuple(np.trim_zeros(counts, "b").tolist()), repeated_at_end=at_end)

    def repeats(self, expected: Universe) -> Iterator[Repeat]:
        keys = [keys for keys, _, _ in self.examples]
        names = expected.names(np.concatenate(keys)) if keys else ()
        for name, (_, times, places) in zip(names, self.examples, strict=True):
            yield Repeat(name, times, places)
