"""Statuses of all ranks, exchanged through the store of torch.distributed without a collective.

Each rank writes one key and reads one. Two ranks, so that each is judged by the other, read all statuses and write
the judgement that all ranks read. So a job of a thousand ranks costs the store a few thousand small requests a
second, and no rank waits for another.
"""

import msgspec
from msgspec import structs

from rankfeed.diagnostics.lockstep.find_cause import JobHistory, find_cause
from rankfeed.diagnostics.lockstep.job_store import JobStore
from rankfeed.diagnostics.lockstep.status import Cause, RankStatus
from rankfeed.storage.commit import decodable

_JUDGES = (0, 1)


@decodable
class Judgement(msgspec.Struct, frozen=True):
    """What a judging rank publishes."""

    judge: int = -1
    beat: int = 0
    closed: bool = False  # whether rank 0 begins no other step
    over: bool = False  # whether no rank does
    cause: Cause | None = None


class Exchange:
    """One rank's exchange with all others, by one thread, since a store may not answer."""

    def __init__(self, store: JobStore, rank: int, history: JobHistory) -> None:
        self._store, self._rank, self._history = store, rank, history
        self._keys = [f"status/{rank}" for rank in history.statuses]
        self._begun = False
        # Neighbours whose processes this rank watches: on hosts of consecutive ranks, or of every n-th rank.
        size = len(self._keys)
        near = {(rank + way * 2**power) % size for power in range(size.bit_length()) for way in (1, -1)}
        self._unknown = (near | {0}) - {rank}
        self.peers: dict[int, RankStatus] = {}
        self.written: RankStatus | None = None
        self.judgement = Judgement()
        self.judged = 0.0  # when the last one was read

    def round(self, status: RankStatus, now: float) -> None:
        """Publish the status of this rank and read that of the job; raises what the store raises."""
        self._store.write(self._keys[self._rank], status)
        self.written = status
        judgement = self._store.read("judgement", Judgement())
        if self._rank in _JUDGES:
            judgement = self._judge(judgement.cause, status.beat, now)
            self._store.write("judgement", judgement)
        if (judgement.judge, judgement.beat) != (self.judgement.judge, self.judgement.beat):
            self.judgement, self.judged = judgement, now
        for rank in sorted(self._unknown):
            peer = self._store.read(self._keys[rank], RankStatus(rank))
            if peer.beat:
                self.peers[rank] = peer
        self._unknown -= self.peers.keys()

    def leave(self, status: RankStatus) -> None:
        """Make the last request: rank 0 may end, and the store with it."""
        self._store.write(self._keys[self._rank], structs.replace(status, has_left=True))

    def needs_store(self) -> bool:
        """For rank 0: whether another rank is alive that has not made its last request, and is not the cause."""
        done = {0, self.judgement.cause.rank if self.judgement.cause is not None else 0}
        return any(
            not (each.rank in done or each.has_left or self._history.is_silent(each)) for each in self._history
        )

    def _judge(self, cause: Cause | None, beat: int, now: float) -> Judgement:
        history = self._history
        if not self._begun:
            for rank, key in enumerate(self._keys):
                self._store.read(key, RankStatus(rank))
            self._begun = True
        history.update(self._store.read_all(self._keys, RankStatus), now)
        cause = cause or self.judgement.cause
        if cause is None and (found := find_cause(history)):
            cause = self._store.read("cause", found)  # both judges report what the first one has found
        closed = [status.progress.closed for status in history]
        return Judgement(self._rank, beat, closed[0], all(closed), cause)
