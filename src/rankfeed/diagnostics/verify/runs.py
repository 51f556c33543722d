"""What a job delivered, by the ledgers of its ranks: finished or killed, over all its launches."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from rankfeed._util.validate import check_callable, check_int, check_path
from rankfeed.diagnostics.findings import Finding, Judged, Severity, merged, rows_not_proven
from rankfeed.diagnostics.verify.ledgers import Launch, LedgerPass, launches_of, read_folder
from rankfeed.diagnostics.verify.positions import (
    DeliveryTimeline,
    MissingRange,
    PositionRange,
    expected_end,
    join_launches,
    join_ranks,
    missing_ranges,
)
from rankfeed.errors import listed

#: Clocks of different hosts may differ by this, in nanoseconds.
_SKEW = 10 * 10**9


@dataclass(frozen=True)
class EpochRun:
    """An epoch on the timeline that counts: a later pass takes back what had been delivered after its start.

    Attributes:
        epoch: which.
        samples: in an epoch.
        delivered: each exactly once.
        missing: not delivered according to the ledgers, although the job continued after them.
        again: deliveries that were taken back: the job continued from a position before them.
        ahead: deliveries of some ranks after the last step that all ranks delivered.
        dropped: left out by ``tail="drop"``.
        left_early: not delivered because the launch continued with another epoch (a break).
        under_way: not delivered because the job ended before.
        gaps: the first missing ranges.
        passes: that it consists of, with launch, positions, ranks, batch size and steps.
        unproven_steps: steps, over all ranks and passes, of which the batch may lack samples.
    """

    epoch: int
    samples: int
    delivered: int
    missing: int
    again: int
    ahead: int
    dropped: int
    left_early: int
    under_way: int
    gaps: list[MissingRange]
    passes: list[dict[str, Any]]
    unproven_steps: int = 0

    @property
    def complete(self) -> bool:
        """Whether each sample of the epoch was delivered exactly once, or dropped as declared."""
        return self.delivered + self.dropped == self.samples and not self.unproven_steps

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "complete": self.complete, "gaps": [str(gap) for gap in self.gaps]}

    def __str__(self) -> str:
        counts = {
            "missing": self.missing,
            "left out by tail=drop": self.dropped,
            "not reached before the next epoch": self.left_early,
            "not reached": self.under_way,
            "delivered again after a resume": self.again,
            "delivered by some ranks alone at the end": self.ahead,
            "batches that may lack samples": self.unproven_steps,
        }
        others = [f"{count:,} {what}" for what, count in counts.items() if count]
        first = "each" if self.delivered == self.samples else f"{self.delivered:,}"
        once = "went into batches" if self.unproven_steps else "exactly once"
        return ", ".join([f"epoch {self.epoch}: {first} of {self.samples:,} samples {once}", *others])


@dataclass
class LoaderRun:
    """What loaders of one order over one data set delivered.

    Attributes:
        data: the data set.
        plan: what the order depends on.
        source: fingerprint of the data.
        launches: in the order in which they began: ranks, ledgers, hosts, times.
        epochs: in their order.
    """

    data: str
    plan: dict[str, int | str]
    source: str
    launches: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[EpochRun] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Samples, over all epochs."""
        return sum(epoch.missing for epoch in self.epochs)

    @property
    def again(self) -> int:
        """Deliveries that were taken back, over all epochs."""
        return sum(epoch.again for epoch in self.epochs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        epochs = [epoch.as_dict() for epoch in self.epochs]
        return {**vars(self), "missing": self.missing, "again": self.again, "epochs": epochs}

    def __str__(self) -> str:
        lines = [self.data]
        for number, each in enumerate(self.launches, 1):
            times = (datetime.fromtimestamp(each[name] / 1e9, UTC) for name in ("began_ns", "ended_ns"))
            began, ended = (f"{time:%Y-%m-%d %H:%M:%S}" for time in times)
            ranks = f"{each['ledgers']} of {each['ranks']:,} rank{'s' * (each['ranks'] != 1)}"
            lines.append(f"launch {number}  {ranks} on {listed(each['hosts'])}, {began} to {ended} UTC")
        return "\n".join([*lines, *map(str, self.epochs)])


@dataclass(frozen=True)
class RunVerdict(Judged):
    """What a job delivered, up to where it is or ended.

    Attributes:
        folder: of the ledgers.
        ledgers: their number.
        loaders: one for each order over each data set.
        findings: what is wrong, could not be shown, or is worth knowing; the most severe first.
    """

    folder: str
    ledgers: int
    loaders: list[LoaderRun] = field(default_factory=list)
    findings: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        loaders = [loader.as_dict() for loader in self.loaders]
        return {**self.verdict_as_dict(), "folder": self.folder, "ledgers": self.ledgers, "loaders": loaders}

    def __str__(self) -> str:
        ledgers = f"{self.folder}: {self.ledgers} ledger{'s' * (self.ledgers != 1)}"
        return "\n".join([ledgers, *map(str, [*self.loaders, *self.findings]), f"verdict: {self.verdict}"])


def verify_run(
    folder: str | Path, *, limit: int = 100, progress: Callable[[float], None] = lambda share: None
) -> RunVerdict:
    """Report what a job delivered, from the ledgers that ``rf.Loader(..., audit=folder)`` wrote on each rank.

    The verdict is "sound" if each sample was delivered exactly once up to where the job is, "diseased" if samples
    are missing although the job continued after them, and "not proven" if a ledger is absent or damaged, two jobs
    wrote at the same time, or batches of a ``collate_fn`` or ``batch_transform`` may lack samples. Memory does not
    grow with the number of samples or steps.

    Args:
        folder: of the ledgers; those of several launches of one job are in it together.
        limit: of missing ranges that are listed.
        progress: called with the share of ledgers that have been read.

    Raises:
        SourceError: the folder cannot be read, or contains no ledgers.
        ArgumentError: an invalid argument.

    Examples:
        >>> import tempfile
        >>> import rankfeed as rf
        >>> folder = tempfile.mkdtemp()
        >>> loader = rf.Loader(rf.from_dataset([{"x": i} for i in range(10)]), batch_size=4, audit=folder)
        >>> for batch in loader:
        ...     pass
        >>> verdict = rf.verify_run(folder)
        >>> verdict.sound, verdict.loaders[0].epochs[0].delivered
        (True, 10)
    """
    folder, limit = check_path("folder", folder), check_int("limit", limit, at_least=0)
    ledgers, others = read_folder(folder, check_callable("progress", progress))
    found = [finding for each in ledgers for finding in each.findings]
    damaged = any(each.code in ("damaged-ledger", "killed-while-writing") for each in found)
    if others:
        found.append(Finding("other-files", "note", "some files are no ledgers", (listed(others, 8),)))
    streams: dict[str, list[LedgerPass]] = {}
    for one in chain.from_iterable(each.passes for each in ledgers):
        streams.setdefault(one.stream, []).append(one)
    loaders = []
    for passes in streams.values():
        loader, more = _loader(passes, limit, damaged)
        loaders.append(loader)
        found += more
    if not streams:
        what = "no ledger contains a delivery: no process came to its first step"
        found.append(Finding("nothing-recorded", "unproven", what))
    return RunVerdict(folder, len(ledgers), loaders, merged(found))


def _loader(passes: list[LedgerPass], limit: int, damaged: bool) -> tuple[LoaderRun, list[Finding]]:
    content, launches = passes[0].content, launches_of(passes)
    findings = [*_overlaps(launches)]
    uncertain = damaged or any(each.code == "overlapping-launches" for each in findings)
    lines = []
    for number, launch in enumerate(launches):
        lines.append(join_ranks({rank: _of_rank(each, number) for rank, each in launch.processes.items()}))
        findings += _uneven_end(launch, lines[-1].ranges[-1])
    findings += [] if uncertain else _restarts(lines, content.data)
    line = join_launches(lines)
    first, last = line.ranges[0], line.ranges[-1]
    if first.epoch:
        text = f"{content.data}: the first recorded epoch is {first.epoch}"
        findings.append(Finding("recorded-later", "note", "the ledgers do not begin with epoch 0", (text,)))
    if len(launches[last.launch].processes) < last.world_size:
        findings.append(_absent_ledger(f"{_where(last)}: {_absent(last)}"))
    gaps: dict[int, list[MissingRange]] = {}
    for gap in missing_ranges(line.ranges):
        gaps.setdefault(gap.epoch, []).append(gap)
        findings.append(_missing(gap, first, launches, uncertain))
    described = [launch.as_dict() for launch in launches]
    unproven: dict[int, Counter[str]] = {}
    for one in passes:
        unproven.setdefault(one.content.epoch, Counter()).update(one.unproven)
    for epoch, steps in unproven.items():
        for function, count in steps.items():
            findings.append(rows_not_proven(function, f"{content.data}, epoch {epoch}: {count:,} batches"))
    totals = {epoch: steps.total() for epoch, steps in unproven.items()}
    epochs = [replace(run, unproven_steps=totals.get(run.epoch, 0)) for run in _epochs(line, gaps, limit)]
    return LoaderRun(content.data, dict(content.plan), content.source, described, epochs), findings


def _of_rank(processes: Sequence[Sequence[LedgerPass]], launch: int) -> DeliveryTimeline:
    """What a rank delivered in a launch; of parallel peers, the one that came least far."""
    lines = []
    for process in processes:
        lines.append(DeliveryTimeline())
        for one in process:
            lines[-1].push(one.positions(launch))
    return min(lines, key=lambda line: sum(each.most for each in line.ranges))


def _epochs(line: DeliveryTimeline, gaps: dict[int, list[MissingRange]], limit: int) -> Iterator[EpochRun]:
    """Count by epochs what was delivered, what is missing and what was delivered again."""
    ranges = {epoch: list(some) for epoch, some in groupby(line.ranges, key=lambda each: each.epoch)}
    following = dict(zip(map(id, line.ranges), line.ranges[1:], strict=False))
    samples = line.ranges[0].shape.num_samples
    for epoch in sorted({*ranges, *gaps, *+line.again}):
        some, missing = ranges.get(epoch, []), gaps.get(epoch, [])
        reach, end, ahead, after = samples if missing else 0, samples, 0, None
        if some:
            after = following.get(id(some[-1]))
            reach, end = expected_end(some[-1], after), some[-1].schedule().end
            ahead = some[-1].rows_from(reach)  # other ranks had stopped
        yield EpochRun(
            epoch=epoch,
            samples=samples,
            delivered=reach - sum(gap.samples for gap in missing),
            missing=sum(gap.samples for gap in missing),
            again=line.again[epoch],
            ahead=ahead,
            dropped=samples - end,
            left_early=end - reach if after else 0,
            under_way=0 if after else end - reach,
            gaps=missing[:limit],
            passes=[
                {
                    "launch": each.launch + 1,
                    "from": each.start,
                    "to": max(each.start, min(each.until, reach)),
                    "ranks": each.world_size,
                    "batch_size": each.batch_size,
                    "steps_of_each_rank": {"least": each.least, "most": each.most},
                    "steps_planned": len(each.schedule()),
                }
                for each in some
            ],
        )
        limit = max(0, limit - len(missing))


def _missing(gap: MissingRange, first: PositionRange, launches: Sequence[Launch], uncertain: bool) -> Finding:
    """Missing samples: an error if the ledgers that would contain them are there and can be read."""
    if gap.source is None and (gap.epoch, gap.high) == (first.epoch, first.start):
        what = "the first recorded pass began within an epoch; what came before is in no ledger"
        return Finding("not-recorded", "unproven", what, (str(gap),), "record all launches with audit=")
    if gap.source is not None and gap.rank is not None and gap.rank not in launches[gap.source.launch].processes:
        return _absent_ledger(str(gap))
    severity: Severity = "unproven" if uncertain else "error"
    what = "samples are not delivered, although the job continued after them"
    remedy = "resume from loader.state_dict() of the step that was saved; if a host crashed, its ledger may be cut"
    return Finding("missing-samples", severity, what, (str(gap),), remedy)


def _absent_ledger(text: str) -> Finding:
    what = "ranks left no ledger, so that their deliveries are not known"
    return Finding("absent-ledger", "unproven", what, (text,), "copy the ledgers of all hosts into one folder")


def _restarts(lines: Sequence[DeliveryTimeline], data: str) -> Iterator[Finding]:
    """Launches that began where the first one did, although they came after it."""
    first, *later = [(line.ranges[0].epoch, line.ranges[0].start) for line in lines]
    what = "a launch began where the first one did, which takes back all that was delivered before it"
    remedy = (
        "load the state of the last checkpoint; give a new training a new folder; before an evaluation, call "
        "set_epoch(epoch) of its loader"
    )
    for number, begun in enumerate(later, 2):
        if begun == first:
            yield Finding("began-again", "note", what, (f"launch {number} of {data}",), remedy)


def _overlaps(launches: Sequence[Launch]) -> Iterator[Finding]:
    """Launches that wrote at the same time: two jobs in one folder, or one whose ranks were not detected."""
    hosts = [launch.by_host() for launch in launches]
    for number, launch in enumerate(launches):
        earlier = next((each for each in range(number) if _overlap(hosts[each], hosts[number])), None)
        if earlier is None:
            continue
        other = launches[earlier]
        if launch.name and (other.name, other.world_size) == (launch.name, launch.world_size):
            rank = next(rank for rank in launch.processes if rank in other.processes)
            what = "several processes of one launch have the same rank, so that each is given its samples"
            text = f"launch {launch.name!r}: rank {rank} of {launch.world_size}"
            remedy = "give every process its own rank, or leave topology out so that it is detected"
            yield Finding("same-rank", "error", what, (text,), remedy)
        else:
            what = "launches wrote at the same time, so that their deliveries cannot be separated"
            text = f"launches {earlier + 1} and {number + 1}"
            remedy = "give each job a folder of its own; end the processes of a launch before the next one"
            yield Finding("overlapping-launches", "unproven", what, (text,), remedy)


def _overlap(one: Mapping[str, tuple[int, int]], two: Mapping[str, tuple[int, int]]) -> bool:
    return any(
        last > low + (0 if host == other else _SKEW) and high > first
        for host, (first, last) in one.items()
        for other, (low, high) in two.items()
    )


def _uneven_end(launch: Launch, last: PositionRange) -> Iterator[Finding]:
    """Ranks that came less far than others in the last pass of their launch."""
    short = sorted((rank for rank in last.steps if last.steps[rank] < last.most), key=last.steps.__getitem__)
    if short:
        hosts = {rank: launch.processes[rank][0][0].content.host for rank in short}
        ends = [f"rank {rank} on {hosts[rank]} after {last.steps[rank]:,}" for rank in short]
        text = f"{_where(last)}: {listed(ends, 8)} of the {last.most:,} steps that others delivered"
        yield Finding("uneven-end", "note", "ranks of a launch stopped after different numbers of steps", (text,))
    if len(last.steps) < last.world_size:
        what = "some ranks of a launch left no ledger of its last pass"
        yield Finding("not-begun", "note", what, (f"{_where(last)}: {_absent(last)}",))


def _where(each: PositionRange) -> str:
    return f"launch {each.launch + 1}, epoch {each.epoch} from position {each.start:,}"


def _absent(each: PositionRange) -> str:
    absent = [str(rank) for rank in range(each.world_size) if rank not in each.steps]
    return f"rank{'s' * (len(absent) > 1)} {listed(absent, 8)} of {each.world_size}"
