"""Verifies what a job delivered over all its launches, finished or killed, by the ledgers of its ranks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from rankfeed._util.validate import check_callable, check_int, check_path
from rankfeed.diagnostics.deliveries import EpochReport, RankEpoch
from rankfeed.diagnostics.findings import Finding, Judged, merged, rows_not_proven
from rankfeed.diagnostics.judge import JudgedFacts, judge_samples
from rankfeed.diagnostics.verify.ledgers import Launch, LedgerPass, launches_of, read_folder
from rankfeed.diagnostics.verify.timeline import DeliveryTimeline, expected_end, gaps_of, join_launches, join_ranks
from rankfeed.errors import listed
from rankfeed.plan import Coverage, Gap

#: Clocks of different hosts may differ by this, in nanoseconds.
_SKEW = 10 * 10**9
#: Findings about ledgers that lack deliveries.
_INCOMPLETE = ("damaged-ledger", "other-version", "killed-while-writing")


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
    gaps: list[Gap]
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
        for number, launch in enumerate(self.launches, 1):
            times = (datetime.fromtimestamp(launch[name] / 1e9, UTC) for name in ("began_ns", "ended_ns"))
            began, ended = (f"{time:%Y-%m-%d %H:%M:%S}" for time in times)
            ranks = f"{launch['ledgers']} of {launch['ranks']:,} rank{'s' * (launch['ranks'] != 1)}"
            lines.append(f"launch {number}  {ranks} on {listed(launch['hosts'])}, {began} to {ended} UTC")
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
    findings = [finding for ledger in ledgers for finding in ledger.findings]
    damaged = any(finding.code in _INCOMPLETE for finding in findings)
    if others:
        findings.append(Finding("other-files", "note", "some files are no ledgers", (listed(others, 8),)))
    streams: dict[str, list[LedgerPass]] = {}
    for one in chain.from_iterable(ledger.passes for ledger in ledgers):
        streams.setdefault(one.stream, []).append(one)
    loaders = []
    for passes in streams.values():
        loader, more = _loader(passes, limit, damaged)
        loaders.append(loader)
        findings += more
    if not streams and not any(finding.severity == "unproven" for finding in findings):
        what = "no ledger contains a delivery: no process came to its first step"
        findings.append(Finding("nothing-recorded", "unproven", what))
    return RunVerdict(folder, len(ledgers), loaders, merged(findings))


def _loader(passes: list[LedgerPass], limit: int, damaged: bool) -> tuple[LoaderRun, list[Finding]]:
    content, launches = passes[0].content, launches_of(passes)
    findings = [*_overlaps(launches)]
    uncertain = damaged or any(finding.code == "overlapping-launches" for finding in findings)
    lines = []
    for number, launch in enumerate(launches):
        lines.append(join_ranks({rank: _of_rank(peers, number) for rank, peers in launch.processes.items()}))
        findings += _uneven_end(launch, lines[-1].passes[-1])
    findings += [] if uncertain else _restarts(lines, content.data)
    line = join_launches(lines)
    first, last = line.passes[0], line.passes[-1]
    if first.epoch:
        text = f"{content.data}: the first recorded epoch is {first.epoch}"
        findings.append(Finding("recorded-later", "note", "the ledgers do not begin with epoch 0", (text,)))
    if len(launches[last.launch].processes) < last.world_size:
        findings.append(_absent_ledger(f"{_where(last)}: {_absent(last)}"))
    gaps: dict[int, list[Gap]] = {}
    for gap in gaps_of(line.passes):
        gaps.setdefault(gap.epoch, []).append(gap)
    facts = JudgedFacts("ids", "plan", where=content.data, recorded=not uncertain)
    unproven: dict[int, Counter[str]] = {}  # by epoch and function, steps of which the batch may lack samples
    for one in passes:
        unproven.setdefault(one.content.epoch, Counter()).update(one.unproven)
    epochs = [*_epochs(line, gaps, unproven, limit)]
    for epoch in epochs:
        recorded = []
        for gap in gaps.get(epoch.epoch, ()):
            coverage, rank = gap.coverage, gap.rank
            if coverage is None and (gap.epoch, gap.high) == (first.epoch, first.start):
                what = "the first recorded pass began within an epoch; what came before is in no ledger"
                remedy = "record all launches with audit="
                findings.append(Finding("not-recorded", "unproven", what, (str(gap),), remedy))
            elif coverage is not None and rank is not None and rank not in launches[coverage.launch].processes:
                findings.append(_absent_ledger(str(gap)))
            else:
                recorded.append(gap)
        if recorded:
            findings += judge_samples([_report(epoch, recorded)], facts)
        for function, count in unproven.get(epoch.epoch, Counter()).items():
            text = f"{content.data}, epoch {epoch.epoch}: {count:,} batches"
            findings.append(rows_not_proven(function, text))
    described = [launch.as_dict() for launch in launches]
    return LoaderRun(content.data, dict(content.plan), content.source, described, epochs), findings


def _report(epoch: EpochRun, gaps: Sequence[Gap]) -> EpochReport:
    """The figures of an epoch, without those of its ranks; gaps that no ledger could show are left out."""
    return EpochReport(
        epoch.epoch,
        samples=epoch.delivered,
        unique=epoch.delivered,
        missing=sum(gap.samples for gap in gaps),
        unknown=0,
        ranks=(RankEpoch(0, 0, 0, {}, {}),),
        missing_keys=tuple(str(gap).partition(", ")[2] for gap in gaps),
    )


def _of_rank(processes: Sequence[Sequence[LedgerPass]], launch: int) -> DeliveryTimeline:
    """The deliveries of a rank in a launch; of parallel peers, of the one with the fewest steps."""
    lines = []
    for process in processes:
        lines.append(DeliveryTimeline())
        for one in process:
            lines[-1].push(one.coverage(launch))
    return min(lines, key=lambda line: sum(coverage.most for coverage in line.passes))


def _epochs(
    line: DeliveryTimeline, gaps: Mapping[int, Sequence[Gap]], unproven: Mapping[int, Counter[str]], limit: int
) -> Iterator[EpochRun]:
    """Count by epochs the samples that were delivered, are missing and were delivered again."""
    passes = {epoch: list(group) for epoch, group in groupby(line.passes, key=lambda coverage: coverage.epoch)}
    following = dict(zip(map(id, line.passes), line.passes[1:], strict=False))
    samples = line.passes[0].order.num_samples
    for epoch in sorted({*passes, *gaps, *+line.again}):
        of_epoch, missing = passes.get(epoch, []), gaps.get(epoch, [])
        reach, end, ahead, after = samples if missing else 0, samples, 0, None
        if of_epoch:
            after = following.get(id(of_epoch[-1]))
            reach, end = expected_end(of_epoch[-1], after), of_epoch[-1].schedule().end
            ahead = of_epoch[-1].samples_from(reach)  # other ranks had stopped
        yield EpochRun(
            epoch=epoch,
            samples=samples,
            delivered=reach - sum(gap.samples for gap in missing),
            missing=sum(gap.samples for gap in missing),
            again=line.again[epoch],
            ahead=ahead,
            dropped=samples - end,
            left_early=0 if after is None else end - reach,
            under_way=end - reach if after is None else 0,
            gaps=[*missing[:limit]],
            passes=[
                {
                    "launch": coverage.launch + 1,
                    "from": coverage.start,
                    "to": max(coverage.start, min(coverage.until, reach)),
                    "ranks": coverage.world_size,
                    "batch_size": coverage.batch_size,
                    "steps_of_each_rank": {"least": coverage.least, "most": coverage.most},
                    "steps_planned": len(coverage.schedule()),
                }
                for coverage in of_epoch
            ],
            unproven_steps=unproven.get(epoch, Counter()).total(),
        )
        limit = max(0, limit - len(missing))


def _absent_ledger(text: str) -> Finding:
    what = "ranks left no ledger, so that their deliveries are not known"
    return Finding("absent-ledger", "unproven", what, (text,), "copy the ledgers of all hosts into one folder")


def _restarts(lines: Sequence[DeliveryTimeline], data: str) -> Iterator[Finding]:
    """Launches that began where the first one did, although they came after it."""
    first, *later = [(line.passes[0].epoch, line.passes[0].start) for line in lines]
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
        earlier = next((index for index in range(number) if _overlap(hosts[index], hosts[number])), None)
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


def _uneven_end(launch: Launch, last: Coverage) -> Iterator[Finding]:
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


def _where(coverage: Coverage) -> str:
    return f"launch {coverage.launch + 1}, epoch {coverage.epoch} from position {coverage.start:,}"


def _absent(coverage: Coverage) -> str:
    absent = [str(rank) for rank in range(coverage.world_size) if rank not in coverage.steps]
    return f"rank{'s' * (len(absent) > 1)} {listed(absent, 8)} of {coverage.world_size}"
