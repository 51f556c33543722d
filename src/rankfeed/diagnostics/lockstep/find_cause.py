"""Find the rank that stops a job, from the last status of every rank, without store or clock.

Times of two hosts are never compared: a rank publishes how long it has made no progress, and the judging rank
counts for how long it has received nothing from it.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from rankfeed.diagnostics.lockstep.status import Cause, RankStatus

#: Seconds to wait for a better reason after a collective failed: it fails on all ranks, and one is the cause.
SETTLE = 3.0
#: The same if a rank is known to have left its loop.
_SETTLE_LEFT = 1.5
#: Seconds without a status after which none is expected.
SILENT = 5.0


class JobHistory:
    """The last status of each rank, when it was received, and what earlier ones prove."""

    def __init__(self, world_size: int, limit: float, uneven: bool = False, now: float = 0.0) -> None:
        self.limit, self.uneven, self.now = limit, uneven, now
        self.statuses = {rank: RankStatus(rank) for rank in range(world_size)}
        self.received = dict.fromkeys(range(world_size), now)
        self._earlier = dict(self.statuses)  # the last one at another step
        self._confirmed: set[int] = set()
        self._incomparable: set[str] = set()

    def __iter__(self) -> Iterator[RankStatus]:
        return iter(self.statuses.values())

    def update(self, statuses: Iterable[RankStatus], now: float) -> None:
        """Add what was received now."""
        self.now = now
        for new in statuses:
            old = self.statuses[new.rank]
            if new.beat == old.beat:
                continue
            self.statuses[new.rank], self.received[new.rank] = new, now
            if new.place != old.place:
                self._earlier[new.rank] = old
            self._confirmed.discard(new.rank)
            if (new.progress, new.numbers) == (old.progress, old.numbers):
                self._confirmed.add(new.rank)
        if not self.uneven:
            self._incomparable |= incomparable_groups([*self._earlier.values(), *self])

    def silence(self, status: RankStatus) -> float:
        """Seconds since it was received."""
        return self.now - self.received[status.rank]

    def is_silent(self, status: RankStatus) -> bool:
        """Whether no other status is expected from its rank."""
        return self.silence(status) >= SILENT

    def standing(self, status: RankStatus) -> float:
        """Seconds without progress, as far as two statuses or a silence confirm it."""
        if self.is_silent(status):
            return status.standing + self.silence(status)
        return status.standing if status.rank in self._confirmed else 0.0

    def age(self, status: RankStatus) -> float:
        """Seconds since its state changed, as far as is known."""
        return status.age + self.silence(status)

    def groups(self) -> dict[int, set[str]]:
        """Process groups of each rank whose numbers have changed under watch and can be compared."""
        active = {key for status in self for key in status.ages} - self._incomparable
        return {status.rank: active & status.numbers.keys() for status in self}


def incomparable_groups(statuses: Iterable[RankStatus]) -> set[str]:
    """Process groups whose collectives are not the same on all ranks.

    A rank in a later step has entered all collectives of earlier steps. If its number is lower than that of a rank
    in an earlier step, it counts something else: point-to-point calls, which count on two ranks only, or
    collectives of a background thread.

    Examples:
        >>> from rankfeed.diagnostics.lockstep.status import Progress
        >>> first = RankStatus(0, progress=Progress(passes=1, steps=4), numbers={"pipeline": 12})
        >>> other = RankStatus(1, progress=Progress(passes=1, steps=5), numbers={"pipeline": 9})
        >>> incomparable_groups([first, other])
        {'pipeline'}
    """
    found: set[str] = set()
    highest: dict[str, int] = {}
    for _, same in groupby(sorted(statuses, key=lambda status: status.place), key=lambda status: status.place):
        numbers = [item for status in same for item in status.numbers.items()]
        found |= {key for key, number in numbers if number < highest.get(key, 0)}
        for key, number in numbers:
            highest[key] = max(highest.get(key, 0), number)
    return found


def find_cause(job: JobHistory) -> Cause | None:
    """The most certain cause for which ranks wait in vain; None if the job is healthy, or may be.

    Examples:
        >>> from rankfeed.diagnostics.lockstep.status import Progress
        >>> job = JobHistory(2, limit=300.0)
        >>> ahead = RankStatus(0, "a", 7, beat=1, progress=Progress(1, 1, 5, "step"))
        >>> ended = RankStatus(1, "b", 8, beat=1, progress=Progress(1, 1, 4, "ended", done=(1, 4)))
        >>> job.update([ahead, ended], now=1.0)
        >>> find_cause(job).summary
        'rank 1 (host b, process 8) ran out of data after 4 steps of pass 1, and rank 0 has begun step 5'
    """
    rules: tuple[Callable[[JobHistory], Cause | None], ...] = (_failed, _uneven, _dead, _broken, _waited_for)
    return next((cause for rule in rules if (cause := rule(job))), None)


def _cause(status: RankStatus, text: str, remedy: str = "", hangs: bool = False) -> Cause:
    lines = status.lines if hangs or status.failed else []
    return Cause(status.rank, f"{status.name} {text}", lines, remedy, status, hangs)


def _failed(job: JobHistory) -> Cause | None:
    failed = [status for status in job if status.failed and not status.is_echo]
    if not failed:
        return None
    first = max(failed, key=job.age)
    return _cause(first, f"failed {first.where}: {first.error}")


def _uneven(job: JobHistory) -> Cause | None:
    if job.uneven:
        return None
    most: dict[int, tuple[int, int]] = {}  # by pass: steps that were begun in it, and the rank that did
    for status in job:
        for passes, steps in (status.place, status.progress.done):
            most[passes] = max(most.get(passes, (0, 0)), (steps, -status.rank))
    last = max(most)
    for status in sorted(job, key=lambda status: (status.progress.done, status.rank)):
        passes, steps = status.progress.done
        more, other = most[passes]
        if passes and more > steps:
            return _cause(
                status,
                f"{_ended(status)} after {steps} steps of pass {passes}, and rank {-other} has begun step {more}",
                "let all ranks take the same number of steps (rankfeed.Loader and rankfeed.DistributedSampler "
                "do); uneven=True if no step waits for another rank",
            )
        if status.progress.closed and status.progress.passes == passes < last and most[last][0]:
            begun = f"rank {-most[last][1]} has begun pass {last}"
            return _cause(status, f"closed its loop after pass {passes}, and {begun}")
    return None


def _dead(job: JobHistory) -> Cause | None:
    last = max(job, key=lambda status: (status.place, -status.rank))
    for rank in (rank for observer in job for rank, how in observer.missing.items() if how == "dead"):
        status = job.statuses[rank]
        # A rank at the end of its data may end, as long as no other rank begins another pass.
        awaited = status.is_inside or (status.beat and last.place[0] > status.place[0])
        if awaited and not (status.progress.closed or status.failed):
            return _cause(
                status,
                f"is gone: its process ended without an error; it was last seen {status.where}, and rank "
                f"{last.rank} was {last.where}",
                "see the end of its log, and the kernel log (dmesg) for the out-of-memory killer",
            )
    return None


def _broken(job: JobHistory) -> Cause | None:
    """A collective failed: likely because a rank that did not fail left its loop or its process."""
    failed = [status for status in job if status.failed and status.age >= _SETTLE_LEFT]
    if not failed:
        return None
    first = max(failed, key=job.age)
    effect = f"and a collective of rank {first.rank} failed {first.where}: {first.error}"
    away = [
        status
        for status in job
        if (status.progress.closed or (status.progress.state == "left" and first.failed_from != "ended"))
        and not status.failed
        and status.place <= first.place
        and job.age(status) >= _SETTLE_LEFT  # an error is seen to leave the loop before it is published
    ]
    if away:
        status = min(away, key=lambda status: (not status.progress.closed, status.place, status.rank))
        passes, steps = status.place
        return _cause(status, f"{_ended(status)} after {steps} steps of pass {passes}, {effect}")
    if first.age < SETTLE:
        return None
    silent = [status for status in job if job.is_silent(status)]
    if silent:
        return _silent(job, max(silent, key=job.silence), effect)
    text = f"a collective of {first.name} failed {first.where}: {first.error}; no rank is known to be the cause"
    return Cause(first.rank, text, first.lines, status=first)


def _waited_for(job: JobHistory) -> Cause | None:
    """A rank for which another one has waited beyond the limit while it made no progress."""
    waits = _waits(job)
    roots = waits.keys() - _ranks_ahead(job)
    stuck = {rank for rank in waits if job.standing(job.statuses[rank]) >= job.limit}
    stuck -= {status.rank for status in job if status.failed}
    if not roots and len(stuck) == len(waits):
        roots = stuck  # ranks that wait for each other in different groups
    candidates = [job.statuses[rank] for rank in sorted(roots & stuck)]
    if not candidates:
        return None
    status = max(candidates, key=lambda s: (job.is_silent(s), s.progress.state == "left", job.standing(s)))
    waiter = waits[status.rank]
    effect = f"and rank {waiter.rank} has waited for {waiter.standing:.0f} s, {waiter.where}"
    if job.is_silent(status) and not status.progress.closed:
        return _silent(job, status, effect)
    return _cause(
        status,
        f"has been {status.where} for {job.standing(status):.0f} s, {effect}",
        f"if it may take so long: limit= of more than {job.limit:.0f} s",
        hangs=True,
    )


def _ranks_ahead(job: JobHistory) -> set[int]:
    """Ranks that have entered a collective which another member of the group has not."""
    groups = job.groups()
    lowest: dict[str, int] = {}
    for status in job:
        for key in groups[status.rank]:
            lowest[key] = min(lowest.get(key, status.numbers[key]), status.numbers[key])
    return {each.rank for each in job if any(each.numbers[key] > lowest[key] for key in groups[each.rank])}


def _waits(job: JobHistory) -> dict[int, RankStatus]:
    """Ranks that are waited for beyond the limit, each with a rank that waits."""
    waiters = [
        each for each in job if not (each.failed or job.is_silent(each)) and job.standing(each) >= job.limit
    ]
    groups = job.groups()
    front: dict[str, RankStatus] = {}
    for waiter in waiters:
        for key in groups[waiter.rank]:
            if key not in front or waiter.numbers[key] > front[key].numbers[key]:
                front[key] = waiter
    stepped = max((each for each in waiters if each.progress.state != "data"), key=_place, default=None)
    inside = max((each for each in waiters if each.is_inside), key=_place, default=None)
    waits: dict[int, RankStatus] = {}
    for status in job:
        keys = groups[status.rank]
        ahead = [front[key] for key in keys & front.keys() if front[key].numbers[key] > status.numbers[key]]
        if ahead:
            waits[status.rank] = max(ahead, key=_place)
        elif stepped and not keys and stepped.place > status.place and not (job.uneven and status.beat):
            waits[status.rank] = stepped  # without numbers, places are compared
        elif inside and status.is_inside and job.silence(status) >= max(job.limit, SILENT):
            waits[status.rank] = inside  # it may hang in the same collective
    return waits


def _place(status: RankStatus) -> tuple[int, int, int]:
    return *status.place, -status.rank


def _silent(job: JobHistory, status: RankStatus, effect: str) -> Cause:
    seconds = job.silence(status)
    if not status.beat:
        text = f"rank {status.rank} has not reached its first step after {seconds:.0f} s, {effect}"
        return Cause(status.rank, text, status=status)
    stopped = any(each.missing.get(status.rank) == "stopped" for each in job)
    why = "its process is stopped (SIGSTOP, or a debugger)" if stopped else "its process or host hangs or is gone"
    text = f"has published nothing for {seconds:.0f} s: {why}; it was last seen {status.where}, {effect}"
    return _cause(status, text, hangs=True)


def _ended(status: RankStatus) -> str:
    return "left its loop" if status.progress.state == "left" else "ran out of data"
