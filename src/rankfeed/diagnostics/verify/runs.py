"""What a job delivered, by the ledgers that its ranks left: finished or killed, over all its launches."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rankfeed.diagnostics.verify.deliveries import (
    Missing,
    Shape,
    Stretch,
    Timeline,
    by_habit,
    expected_end,
    gaps,
    merged,
    of_launch,
    reached,
    schedule_of,
)
from rankfeed.diagnostics.verify.ledgers import Launch, Member, Read, Went, launches_of, read_folder
from rankfeed.diagnostics.verify.run_verdict import EpochRun, LoaderRun, RunVerdict

#: Steps by which ranks that keep step may differ when they are killed; what frameworks fetch ahead is in it.
_SLACK = 2
#: Clocks of different hosts may differ by so many nanoseconds.
_SKEW = 10 * 10**9
#: Things that are listed one by one.
_LISTED = 8


def verify_run(
    folder: str | Path, *, limit: int = 100, progress: Callable[[float], None] = lambda share: None
) -> RunVerdict:
    """Say what a job delivered, from the ledgers that ``rf.Loader(..., audit=folder)`` wrote on each rank.

    Memory does not grow with the number of samples or steps.

    Args:
        folder: of the ledgers; those of several launches of one job lie in it together.
        limit: of missing stretches that are listed.
        progress: called with the share of ledgers that are read.

    Raises:
        SourceError: the folder cannot be read, or there are no ledgers in it.

    Examples:
        >>> import tempfile, rankfeed as rf
        >>> folder = tempfile.mkdtemp()
        >>> loader = rf.Loader(rf.from_dataset([{"x": i} for i in range(10)]), batch_size=4, audit=folder)
        >>> for batch in loader:
        ...     pass
        >>> verdict = verify_run(folder)
        >>> verdict.ok, verdict.loaders[0].epochs[0].delivered
        (True, 10)
    """
    read, foreign = read_folder(folder, progress)
    verdict = RunVerdict(str(folder), len(read))
    for each in _once(read, verdict):
        verdict.errors += each.damage
        verdict.notes += each.notes
    if foreign:
        verdict.notes.append(f"{len(foreign)} other files are no ledgers: {_listed(foreign)}")
    streams: dict[str, list[Went]] = {}
    for each in read:
        for went in each.passes:
            streams.setdefault(went.stream, []).append(went)
    for passes in streams.values():
        verdict.loaders.append(_loader(passes, limit))
    return verdict


def _once(read: list[Read], verdict: RunVerdict) -> list[Read]:
    """The ledgers; of one that was copied, its copy is told of, and says nothing more."""
    owner: dict[str, Path] = {}
    for each in read:
        for process in {went.content.process for went in each.passes}:
            if owner.setdefault(process, each.path) != each.path:
                verdict.errors.append(f"{each.path} is a copy of {owner[process]}: remove one of them")
                each.passes = []
    return read


def _loader(passes: list[Went], limit: int) -> LoaderRun:
    first, shape = passes[0], passes[0].shape
    launches = launches_of(passes)
    told = LoaderRun(first.content.data, dict(first.content.plan), first.content.source, shape=shape)
    told.launches = [_described(launch) for launch in launches]
    told.errors += _at_once(launches)
    lines = []
    for number, launch in enumerate(launches):
        lines.append(
            of_launch(shape, {rank: _of_rank(shape, each, number) for rank, each in launch.members.items()})
        )
        told.notes += _stopped(shape, launch, lines[-1], number)
    line = merged(shape, lines)
    line.stretches = by_habit(shape, line.stretches)
    last = line.stretches[-1]
    if line.stretches[0].epoch:
        told.notes.append(f"the ledgers begin with epoch {line.stretches[0].epoch}")
    if len(last.steps) < last.world_size and last.most() > _SLACK:
        told.errors.append(
            f"{_absent(last)} in launch {last.launch + 1} left no ledger of epoch {last.epoch}, while the others "
            f"delivered {last.most()} steps"
        )
    _epochs(told, line, limit)
    return told


def _of_rank(shape: Shape, members: Sequence[Member], launch: int) -> Timeline:
    """What a rank delivered in a launch; of parallel peers, who read the same, the one that came least far."""
    lines = []
    for member in members:
        line = Timeline(shape)
        for went in member.passes:
            line.push(went.stretch(launch))
        lines.append(line)
    return min(lines, key=lambda line: sum(each.most() for each in line.stretches))


def _epochs(told: LoaderRun, line: Timeline, limit: int) -> None:
    """Count by epochs what is there, what is missing and what came again."""
    shape = told.shape
    missing: Counter[int] = Counter()
    listed: dict[int, list[Missing]] = {}
    for each in gaps(shape, line.stretches):
        missing[each.epoch] += each.samples
        if sum(map(len, listed.values())) < limit:
            listed.setdefault(each.epoch, []).append(each)
    stretches = {epoch: list(some) for epoch, some in groupby(line.stretches, key=lambda each: each.epoch)}
    for epoch in sorted({*stretches, *missing, *line.again}):
        some = stretches.get(epoch, [])
        reach, end, left = shape.num_samples, shape.num_samples, False
        if some:
            place = line.stretches.index(some[-1])
            following = line.stretches[place + 1] if place + 1 < len(line.stretches) else None
            reach, end = expected_end(shape, some[-1], following), schedule_of(shape, some[-1]).end
            left = following is not None
        elif not missing[epoch]:
            reach = 0
        told.epochs.append(
            EpochRun(
                epoch=epoch,
                samples=shape.num_samples,
                delivered=reach - missing[epoch],
                missing=missing[epoch],
                again=line.again[epoch],
                ahead=_ahead(shape, some, reach),
                dropped=shape.num_samples - end,
                left_early=end - reach if left else 0,
                under_way=end - reach if not left else 0,
                gaps=listed.get(epoch, []),
                stretches=[_shown(shape, each, reach) for each in some],
            )
        )


def _ahead(shape: Shape, stretches: Sequence[Stretch], reach: int) -> int:
    """Samples that some ranks delivered behind what counts, because others had stopped."""
    line = Timeline(shape)
    if stretches:
        last = stretches[-1]
        line.stretches.append(last)
        line.push(replace(last, start=max(reach, last.start), steps={}))
    return line.again.total()


def _shown(shape: Shape, stretch: Stretch, reach: int) -> dict[str, Any]:
    """A pass of the timeline, for people and for JSON."""
    return {
        "launch": stretch.launch + 1,
        "from": stretch.start,
        "to": max(stretch.start, reach if stretch.until is None else min(stretch.until, reach)),
        "ranks": stretch.world_size,
        "batch_size": stretch.batch_size,
        "steps_of_each_rank": {"least": stretch.least(), "most": stretch.most()},
        "steps_planned": len(schedule_of(shape, stretch)),
    }


def _described(launch: Launch) -> dict[str, Any]:
    members = launch.all()
    return {
        "name": launch.name,
        "ranks": launch.world_size,
        "ledgers": len(members),
        "hosts": sorted({member.host for member in members}),
        "began_ns": min(member.first_ns for member in members),
        "ended_ns": max(member.last_ns for member in members),
    }


def _at_once(launches: Sequence[Launch]) -> Iterator[str]:
    """Launches that wrote while another did: two jobs in one folder, or one that lives on."""
    for number, launch in enumerate(launches):
        for earlier, other in enumerate(launches[:number]):
            if _overlap(other, launch):
                one = other.name == launch.name and launch.name and other.world_size == launch.world_size
                if one:
                    rank = next(rank for rank in launch.members if rank in other.members)
                    yield (
                        f"several processes of one launch take themselves for rank {rank} of {launch.world_size} "
                        "at the same time: each was given that rank's samples"
                    )
                else:
                    yield (
                        f"launches {earlier + 1} and {number + 1} were writing at the same time: two jobs "
                        "share this folder, or processes of the former live on"
                    )
                break


def _overlap(one: Launch, two: Launch) -> bool:
    return any(
        a.last_ns > b.first_ns + (0 if a.host == b.host else _SKEW) and b.last_ns > a.first_ns
        for a in _extremes(one)
        for b in _extremes(two)
    )


def _extremes(launch: Launch) -> list[Member]:
    """On each host, the process that began first and the one that ended last."""
    hosts: dict[str, list[Member]] = {}
    for member in launch.all():
        hosts.setdefault(member.host, []).append(member)
    return [
        each
        for members in hosts.values()
        for each in (min(members, key=lambda one: one.first_ns), max(members, key=lambda one: one.last_ns))
    ]


def _stopped(shape: Shape, launch: Launch, line: Timeline, number: int) -> Iterator[str]:
    """Ranks that came less far than others in what their launch did last."""
    last = line.stretches[-1]
    most = last.most()
    short = sorted((rank for rank, steps in last.steps.items() if steps < most), key=last.steps.__getitem__)
    where = f"epoch {last.epoch}, begun at position {last.start}"
    if short:
        told = [
            f"rank {rank} on {launch.members[rank][0].host} after {last.steps[rank]}" for rank in short[:_LISTED]
        ]
        more = f" and {len(short) - _LISTED} more" if len(short) > _LISTED else ""
        yield (
            f"launch {number + 1} stopped unevenly in {where}: {', '.join(told)}{more} of the {most} steps "
            f"that others delivered (to position {reached(shape, last, most)})"
        )
    if len(last.steps) < last.world_size:
        yield f"launch {number + 1}, {where}: {_absent(last)} left no ledger of it"


def _absent(stretch: Stretch) -> str:
    count = stretch.world_size - len(stretch.steps)
    some = list(islice((rank for rank in range(stretch.world_size) if rank not in stretch.steps), _LISTED))
    names = ", ".join(map(str, some)) + (", ..." if count > len(some) else "")
    return f"rank{'s' * (count > 1)} {names} of {stretch.world_size}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
