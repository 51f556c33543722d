"""Finds the rank that stops a job, from the last status of every rank, without store or clock.

Times of two hosts are never compared: a rank publishes how long it has made no progress, and the judging rank
counts for how long it has received nothing from it.
"""

from collections.abc import Iterable, Iterator

from rankfeed.diagnostics.lockstep.status import Cause, RankStatus

#: Seconds to wait for a better reason after a collective failed: it fails on all ranks, and one is the cause.
SETTLE = 3.0
#: The same if a rank is known to have left its loop.
_SETTLE_LEFT = 1.5
#: Seconds without a status after which a rank is silent.
SILENT = 5.0


class JobHistory:
    """The last status of each rank, when it was received, and what earlier ones prove."""

    def __init__(self, world_size: int, limit: float, uneven: bool = False) -> None:
        self.limit, self.uneven, self.now = limit, uneven, 0.0
        self.statuses = {rank: RankStatus(rank) for rank in range(world_size)}
        self.received = dict.fromkeys(range(world_size), 0.0)
        self._confirmed: set[int] = set()
        self._stopped: set[int] = set()  # processes, as ranks on their hosts see them
        self.active: set[str] = set()  # process groups whose numbers changed under watch

    def __iter__(self) -> Iterator[RankStatus]:
        return iter(self.statuses.values())

    def update(self, statuses: Iterable[RankStatus], now: float) -> None:
        self.now = now
        for new in statuses:
            old = self.statuses[new.rank]
            if new.beat == old.beat:
                continue
            self.statuses[new.rank], self.received[new.rank] = new, now
            self._confirmed.discard(new.rank)
            if (new.progress, new.numbers) == (old.progress, old.numbers):
                self._confirmed.add(new.rank)
        recent = [peer.peers for peer in self if self.silence(peer) < SILENT]
        self._stopped = {rank for peers in recent for rank, state in peers.items() if state == "stopped"}
        self.active = {key for status in self for key in status.ages}

    def silence(self, status: RankStatus) -> float:
        return self.now - self.received[status.rank]

    def is_silent(self, status: RankStatus) -> bool:
        """Whether no status is expected from it."""
        return self.silence(status) >= SILENT or status.rank in self._stopped

    def standing(self, status: RankStatus) -> float:
        """Seconds without progress, as far as two statuses or a silence confirm it."""
        if self.is_silent(status):
            return status.standing + self.silence(status)
        return status.standing if status.rank in self._confirmed else 0.0

    def age(self, status: RankStatus) -> float:
        """Seconds since its state changed, as far as is known."""
        return status.age + self.silence(status)

    def peer_state(self, status: RankStatus) -> str:
        """State of its process, as a rank of its host sees it that is not silent itself; else empty."""
        observers = (peer.peers for peer in self if status.rank in peer.peers and not self.is_silent(peer))
        return next((peers[status.rank] for peers in observers), "")


def find_cause(job: JobHistory) -> Cause | None:
    """The most certain cause for which ranks wait in vain; None if the job is healthy, or may be."""
    return _failed(job) or _uneven(job) or _dead(job) or _broken(job) or _mismatched(job) or _waited_for(job)


def _failed(job: JobHistory) -> Cause | None:
    failed = [status for status in job if status.failure and not status.failure.is_echo]
    first = max(failed, key=job.age, default=None)
    return first.cause(f"failed {first.where}: {first.error}") if first else None


def _uneven(job: JobHistory) -> Cause | None:
    most: dict[int, tuple[int, int]] = {}  # by pass: steps that were begun in it, and the rank that did
    for status in job:
        for passes, steps in (status.place, status.progress.done):
            most[passes] = max(most.get(passes, (0, 0)), (steps, -status.rank))
    for status in sorted(job, key=lambda status: (status.progress.done, status.rank)):
        done = status.progress.done
        for passes, steps in [done, (done[0] + 1, 0)][: 1 + status.progress.closed]:
            more, other = most.get(passes, (0, 0))
            if passes and more > steps and not job.uneven:
                return status.cause(
                    f"{status.end}, and rank {-other} has begun step {more} of pass {passes}",
                    "let all ranks take the same number of steps (rankfeed.Loader and rankfeed.DistributedSampler "
                    "do); uneven=True if no step waits for another rank",
                )
    return None


def _dead(job: JobHistory) -> Cause | None:
    last = max(job, key=_place)
    for rank in (rank for observer in job for rank, state in observer.peers.items() if state == "dead"):
        status = job.statuses[rank]
        # A rank at the end of its data may end, as long as no other rank begins another pass.
        between = (
            status.beat and not (status.progress.closed or status.failure) and last.place[0] > status.place[0]
        )
        if status.is_inside or between:
            return status.cause(
                f"is gone: its process ended without an error; it was last seen {status.where}, and rank "
                f"{last.rank} was {last.where}",
                "see the end of its log, and the kernel log (dmesg) for the out-of-memory killer",
            )
    return None


def _broken(job: JobHistory) -> Cause | None:
    """A collective failed: likely because a rank that did not fail left its loop or its process."""
    failed = [status for status in job if status.failure and status.age >= _SETTLE_LEFT]
    first = max(failed, key=job.age, default=None)
    if first is None:
        return None
    effect = f"and a collective of rank {first.rank} failed {first.where}: {first.error}"
    away = [
        status
        for status in job
        if (status.progress.closed or (status.progress.state == "left" and first.progress.state != "ended"))
        and not status.failure
        and status.place <= first.place
        and job.age(status) >= _SETTLE_LEFT  # an error is seen to leave the loop before it is published
    ]
    if away:
        status = min(away, key=lambda status: (not status.progress.closed, status.place, status.rank))
        return status.cause(f"{status.end}, {effect}")
    if first.age < SETTLE:
        return None
    silent = max(job, key=job.silence)
    if job.is_silent(silent):
        return _silent(job, silent, effect)
    return first.cause(
        f"failed in a collective {first.where}, and no rank is known to be the cause: {first.error}"
    )


def _mismatched(job: JobHistory) -> Cause | None:
    """Ranks that entered different collectives, as the same one of a group, and have not left them since."""
    for key in sorted({key for peer in job for key in peer.calls}):
        members = [peer for peer in job if key in peer.calls]
        inside = max(peer.calls[key].inside for peer in members)
        for call in sorted({call for peer in members for call in peer.calls[key].kinds if call <= inside}):
            kinds: dict[str, list[RankStatus]] = {}
            for peer in members:
                if call in peer.calls[key].kinds:
                    kinds.setdefault(peer.calls[key].kinds[call], []).append(peer)
            # The fewest ranks are the cause; of equally many, those that have left their loop.
            ranked = sorted(kinds, key=lambda kind: (len(kinds[kind]), kinds[kind][0].progress.state != "left"))
            status, other = kinds[ranked[0]][0], kinds[ranked[-1]][0]
            if len(kinds) > 1 and min(job.standing(status), job.standing(other)) >= job.limit:
                return status.cause(
                    f"has been {status.where} for {job.standing(status):.0f} s, in {ranked[0]} as collective "
                    f"{call} of process group {key.split('/')[0]}, which is {ranked[-1]} on rank {other.rank}, "
                    f"{other.where}",
                    "enter the same collectives in the same order on all ranks",
                    hangs=True,
                )
    return None


def _waited_for(job: JobHistory) -> Cause | None:
    """A rank for which another one has waited beyond the limit while it made no progress."""
    entered = {peer.rank: {key: n for key, n in peer.entered.items() if key[0] in job.active} for peer in job}
    stuck = {peer.rank for peer in job if not peer.failure and job.standing(peer) >= job.limit}
    waiters = [peer for peer in job if peer.rank in stuck and not job.is_silent(peer)]
    front: dict[tuple[str, bool], RankStatus] = {}  # the waiter that is in the last collective of a group
    for peer in waiters:
        for key, call in peer.inside.items():
            if key not in front or call > front[key].inside[key]:
                front[key] = peer
    stepped = max((peer for peer in waiters if peer.progress.state != "data"), key=_place, default=None)
    blocked = [peer for peer in waiters if any(recorded for _, recorded in peer.inside)]
    unknown = [
        peer
        for peer in waiters
        if peer.is_inside and not (peer.calls and all(recorded for _, recorded in peer.inside))
    ]
    waits: dict[int, RankStatus] = {}  # ranks that are waited for, each with a rank that waits
    for rank, status in job.statuses.items():
        own, is_silent = entered[rank], job.silence(status) >= job.limit
        ahead = [front[key] for key in own if key in front and front[key].inside[key] > own[key]]
        if ahead:
            waits[rank] = max(ahead, key=_place)
        elif stepped and not own and stepped.place > status.place and not (job.uneven and status.beat):
            waits[rank] = stepped  # without numbers, places are compared
        elif is_silent and not status.progress.closed:
            # Its numbers are old. If it is alive and no rank is blocked, native code may hold the GIL in a pause.
            seen = blocked or (unknown if status.is_inside and job.peer_state(status) != "alive" else [])
            if seen:
                waits[rank] = max(seen, key=_place)
    # Who waits for another rank itself is not the cause, unless ranks wait for each other in different groups.
    lowest: dict[tuple[str, bool], int] = {}
    for key, call in (item for own in entered.values() for item in own.items()):
        lowest[key] = min(call, lowest.get(key, call))
    roots = {
        rank for rank in waits if all(n <= lowest.get(key, n) for key, n in job.statuses[rank].inside.items())
    }
    if not roots and waits.keys() <= stuck:
        roots = set(waits)
    candidates = [job.statuses[rank] for rank in sorted(roots & stuck)]
    if not candidates:
        return None
    status = max(candidates, key=lambda s: (job.is_silent(s), s.progress.state == "left", job.standing(s)))
    waiter = waits[status.rank]
    effect = f"and rank {waiter.rank} has waited for {waiter.standing:.0f} s, {waiter.where}"
    if job.is_silent(status) and not status.progress.closed:
        return _silent(job, status, effect)
    text = f"has been {status.where} for {job.standing(status):.0f} s, {effect}"
    return status.cause(text, f"if it may take so long: limit= of more than {job.limit:.0f} s", hangs=True)


def _silent(job: JobHistory, status: RankStatus, effect: str) -> Cause:
    seconds = job.silence(status)
    if not status.beat:
        text = f"rank {status.rank} has not reached its first step after {seconds:.0f} s, {effect}"
        return Cause(status.rank, text, status=status)
    why = {
        "stopped": "its process is stopped (SIGSTOP, or a debugger)",
        "alive": "its process is alive, and code that holds the interpreter's lock (GIL) stops all of its threads",
    }.get(job.peer_state(status), "its process or host hangs or is gone")
    text = f"has published nothing for {seconds:.0f} s: {why}; it was last seen {status.where}, {effect}"
    return status.cause(text, hangs=True)


def _place(status: RankStatus) -> tuple[int, int, int]:
    return *status.place, -status.rank
