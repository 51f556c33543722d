"""``rankfeed.audit``: iterates any loader on all ranks and counts how often each sample is delivered."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rankfeed._util.validate import check_callable, check_int, check_iterable, check_optional, check_path, invalid
from rankfeed.diagnostics.audit.reader import AuditReader, RankSummary, as_own, dataset_of
from rankfeed.diagnostics.audit.report import AuditReport
from rankfeed.diagnostics.deliveries import INTERVALS, LoaderTraits, report_of
from rankfeed.diagnostics.judge import Expectation, JudgedFacts, KeyKind
from rankfeed.diagnostics.keys import USUAL, Key, KeyArray, key_array
from rankfeed.diagnostics.multiset import HashPartitions, KeyCounts, count, distinct, joined, partition_ranges
from rankfeed.errors import ArgumentError, AuditError, RankfeedError, safe_str
from rankfeed.topology import Topology, process_group

_T = TypeVar("_T")
#: Declared ids that become keys together.
_CHUNK = 1 << 20


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
    disk: 12 bytes for each sample with a whole number as id, 20 for others.

    The verdict is "sound" if each expected sample was delivered once in each epoch and all ranks took the same
    number of steps, "diseased" if they did not, and "not proven" if it could not be counted: without ids, or if
    it is not known which samples are expected.

    Args:
        loader: any iterable of batches: a `Loader`, a torch ``DataLoader``, or of another library.
        key: where a batch has its samples' ids: a field's name (in dicts, in objects, in lists of dicts), a place
            in a tuple, a path of both (``"0.meta.id"``), or a function of the batch. In batches without the usual
            name, samples are identified by a hash of their content. A `Loader` has its own ``id_column``.
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
        >>> report.sound, report.findings[0].code, report.findings[0].evidence[1]
        (False, 'repeated-samples', 'epoch 0: 1 of 5 samples are not delivered: 3')
    """
    processes = AuditProcesses()
    with ExitStack() as stack:
        reader: AuditReader
        expected: Universe

        def begin() -> tuple[object, ...]:
            nonlocal reader, expected, epochs, max_steps, memory
            check_iterable("loader", loader, "an iterable of batches")
            if isinstance(key, bool | np.bool_) or not (isinstance(key, str | int | np.integer) or callable(key)):
                raise invalid("key", "the name of a field, its place in a tuple, or a function of the batch", key)
            check_optional(check_callable, "before_epoch", before_epoch)
            check_optional(check_path, "folder", folder)
            epochs = check_int("epochs", epochs, at_least=1, at_most=10**6)
            max_steps = check_optional(check_int, "max_steps", max_steps, at_least=1)
            memory = check_int("memory", memory, at_least=1)
            own, ids, samples = as_own(loader), key, universe
            if own is not None and own.id_column is not None and key in (USUAL, own.id_column):
                ids = own.id_column
                if samples is None and (dataset := dataset_of(own)) is not None:
                    samples = dataset[0]  # of its plan
            expected = Universe(samples)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankfeed-audit-", dir=folder)))
            reader = AuditReader(loader, ids, scratch, processes.rank, memory)
            return epochs, memory, max_steps, expected.known, expected.size

        def read() -> RankSummary:
            for epoch in range(epochs):
                if before_epoch is not None:
                    before_epoch(epoch)
                reader.read(max_steps)
            return reader.summary

        arguments = processes.each(begin, "the audit could not begin")
        if len({*arguments}) > 1:
            raise AuditError(
                "ranks were called with different arguments",
                expected="the same epochs, memory, max_steps and universe on all of them",
                found=dict(enumerate(arguments)),
            )
        counted: dict[object, RankSummary] = {}  # of tensor-parallel peers, which read the same samples, the first
        for summary in processes.each(read, "the loader failed"):
            first = counted.setdefault((summary.rank,) if summary.share is None else summary.share, summary)
            if [epoch.order for epoch in first.epochs] != [epoch.order for epoch in summary.epochs]:
                raise AuditError(
                    "parallel peers were given different samples",
                    expected="the same batches on all processes of a data-parallel rank",
                    where=f"processes {first.rank} and {summary.rank}",
                )
        return _count(processes, reader, [*counted.values()], expected, memory)


def _count(
    processes: AuditProcesses, reader: AuditReader, counted: Sequence[RankSummary], expected: Universe, memory: int
) -> AuditReport:
    """Count all epochs; each process counts some of the partitions."""
    key_types = {summary.key_type for summary in counted if summary.key_type}
    if len(key_types) > 1:
        raise AuditError("keys are whole numbers on some ranks and not on others", remedy="give all the same key=")
    kinds = {summary.keys for summary in counted}
    keys: KeyKind = "none" if "none" in kinds else "content" if "content" in kinds else "ids"
    #: Whether keys are compared with the universe; otherwise only their number is.
    keyed = expected.known and (keys == "ids" or not expected.is_number)
    if keyed:
        expected.check("".join(key_types))
    logs = reader.partitions
    if keys == "none" or processes.rank not in [summary.rank for summary in counted]:
        logs = [HashPartitions(reader.scratch) for _ in logs]
    due = HashPartitions(reader.scratch / "universe", memory)

    def prepare() -> int:
        if keyed and processes.rank == 0:
            for chunk in expected.chunks():
                due.add(chunk)
        return sum(log.size for log in (due, *logs))

    size = sum(processes.each(prepare, "keys could not be sorted"))
    step_logs = list(zip(*processes.gather([record.steps for record in reader.records]), strict=True))
    intervals = [max(1, -(-max(len(log.workers) for log in epoch) // INTERVALS)) for epoch in step_logs]
    counts = [KeyCounts() for _ in logs]
    for number, (low, high) in enumerate(partition_ranges(size, memory)):
        gathered = processes.gather([log.read(low, high) for log in (due, *logs)])
        if number % processes.world_size == processes.rank:
            universe, *epochs = zip(*gathered, strict=True)
            wanted = distinct(universe[0].keys if keyed else joined(log.keys for part in epochs for log in part))
            for epoch, parts in enumerate(epochs):
                counts[epoch] += count(parts, step_logs[epoch], wanted, interval=intervals[epoch])
    totals = [sum(parts, KeyCounts()) for parts in zip(*processes.gather(counts), strict=True)]
    traits = [summary.traits for summary in counted]
    declared = LoaderTraits(
        max(trait.workers for trait in traits),
        drops=any(trait.drops for trait in traits),
        replaces=any(trait.replaces for trait in traits),
        indexed=any(trait.indexed for trait in traits),
    )
    cut = any(summary.cut for summary in counted)
    facts = JudgedFacts(keys, *_expectation(expected, counted, totals), cut, declared)
    keyed = keys != "none" and (keyed or facts.expectation == "epochs")
    reports = []
    for epoch, total in enumerate(totals):
        ranks = [rank.epochs[epoch] for rank in counted]
        rank_logs = [step_logs[epoch][rank.rank] for rank in counted]
        names, interval = expected.names, intervals[epoch]
        report = report_of(epoch, total, ranks, rank_logs, interval=interval, keyed=keyed, names=names)
        if not keyed and facts.expected is not None and keys != "none":
            delivered = total.unique if facts.expectation == "dataset" else total.deliveries
            report = replace(report, missing=max(0, facts.expected - delivered))
        reports.append(report)
    return AuditReport(facts, tuple(reports))


def _expectation(
    expected: Universe, counted: Sequence[RankSummary], counts: Sequence[KeyCounts]
) -> tuple[Expectation | None, int | None]:
    if expected.known:
        return "declared", expected.size
    dataset = counted[0].dataset
    if dataset is not None and {summary.dataset for summary in counted} == {dataset}:
        limit = sum(rank.traits.drops * max(epoch.largest_batch for epoch in rank.epochs) for rank in counted)
        if all(dataset[0] - limit <= count.unique <= dataset[0] for count in counts):
            return "dataset", dataset[0]
    return ("epochs" if len(counts) > 1 else None), None


class Universe:
    """Declared ids, or a number n for 0 to n - 1 (``is_number``), or nothing (not ``known``)."""

    def __init__(self, given: Any) -> None:
        self.known, self.is_number = given is not None, False
        self._values: Any = [] if given is None else given
        if isinstance(given, (str, bytes)) or not getattr(self._values, "ndim", hasattr(self._values, "__iter__")):
            try:
                self._values = range(check_int("universe", given, at_least=1, at_most=2**62))
            except ArgumentError:
                raise invalid("universe", "a number of samples, or their ids", given) from None
            self.is_number = True
        elif not isinstance(self._values, (Sequence, np.ndarray)):
            self._values = list(given)
        self.size = len(self._values)
        #: Of their keys: "i" for whole numbers, "S" for digests, or empty.
        self.kind = key_array(self._values[:1]).dtype.kind if self.size else ""

    def chunks(self) -> Iterator[KeyArray]:
        """The keys."""
        for start in range(0, self.size, _CHUNK):
            keys = key_array(self._values[start : start + _CHUNK])
            if keys.dtype.kind != self.kind:
                raise AuditError("some of the declared ids are whole numbers and some are not", where="universe")
            yield keys

    def check(self, kind: str) -> None:
        """Raise AuditError unless delivered keys of this kind (empty: nothing was delivered) can be expected."""
        if self.kind and kind and self.kind != kind:
            raise AuditError(
                "the declared ids are of another kind than the delivered ones",
                expected="whole numbers" if kind == "i" else "no whole numbers",
                found=repr(self._values[0]),
                remedy="key= names the field that has them",
            )

    def names(self, keys: Sequence[Any]) -> tuple[str, ...]:
        """Keys for people."""
        if not keys or not isinstance(keys[0], bytes):
            return tuple(map(str, keys))
        names = {key: f"content {key[:8].hex()}" for key in keys}
        for number, chunk in enumerate(self.chunks() if self.kind == "S" else ()):
            for row in np.flatnonzero(np.isin(chunk, np.array(keys, chunk.dtype))).tolist():
                names[chunk[row]] = repr(self._values[number * _CHUNK + row])
        return tuple(names.values())


class AuditProcesses:
    """This process among all, as the launcher describes them."""

    def __init__(self) -> None:
        here = Topology.detect()
        if here.world_size > 1 and process_group() is None:
            raise AuditError(
                "an audit of several ranks needs a process group",
                found=f"rank {here.rank} of {here.world_size}, as {here.launcher} says",
                remedy='call torch.distributed.init_process_group("gloo") before it',
            )
        self.rank, self.world_size = here.rank, here.world_size

    def gather(self, value: _T) -> list[_T]:
        """The values of all processes, on each of them."""
        if self.world_size == 1:
            return [value]
        from rankfeed.loading.rank_group import TorchRankGroup

        return TorchRankGroup(f"rank {self.rank} of {self.world_size}").gather_last(value)

    def each(self, work: Callable[[], _T], summary: str) -> list[_T]:
        """Run a function in each process; if it fails in one, all of them raise."""
        result: Any = None
        failed, cause = "", None
        try:
            result = work()
        except BaseException as error:  # an interruption, too: the others wait
            failed, cause = f"{type(error).__name__}: {safe_str(error)}", error
        results = self.gather((failed, result))
        alone = self.world_size == 1 and isinstance(cause, RankfeedError)
        if cause is not None and (alone or not isinstance(cause, Exception)):
            raise cause
        for rank, (failed, _) in enumerate(results):
            if failed:
                raise AuditError(f"{summary} on rank {rank}", found=failed) from cause
        return [result for _, result in results]
