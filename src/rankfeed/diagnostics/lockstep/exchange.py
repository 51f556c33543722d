"""Statuses of all ranks, exchanged through the store of torch.distributed without a collective.

Each rank writes one key and reads one. One rank, the judge, reads all statuses and writes the reply that all
others read; if it publishes nothing any more, the next rank takes over. So a job of a thousand ranks costs the
store a few thousand small requests a second, and no rank waits for another.
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

from rankfeed.diagnostics.lockstep.find_cause import SILENT, JobHistory, find_cause
from rankfeed.diagnostics.lockstep.status import Cause, RankStatus
from rankfeed.errors import ArgumentError
from rankfeed.storage.commit import decodable

#: Seconds without a reply after which the next rank judges; each further one waits longer.
_SUCCESSION, _EACH = 3.0, 1.0
#: Seconds that a connection to the store, and a request to it, may take.
_CONNECT, _REQUEST = 5.0, 30.0


@decodable
class JudgeReply(msgspec.Struct, frozen=True):
    """What the judging rank publishes."""

    judge: int
    beat: int
    complete: bool = False  # whether all ranks have published a status, and their processes are listed by host
    closed: bool = False  # whether rank 0 begins no other step
    over: bool = False  # whether no rank does
    cause: Cause | None = None


class Exchange:
    """One rank's exchange with all others, by one thread, since a store may not answer."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        status: Callable[[int], RankStatus],
        now: Callable[[], float],
        is_dead: Callable[[int], bool],
        limit: float,
        uneven: bool,
    ) -> None:
        self.store = store
        self._rank, self._world_size = rank, world_size
        self._status, self._now, self._is_dead = status, now, is_dead
        self._limit, self._uneven = limit, uneven
        self._beat = 0
        self._known: set[int] = set()
        self._history = JobHistory(world_size, limit, uneven, now())
        self._reply_seen: tuple[object, float] = (None, now())
        self._listed = False
        self.judging = rank == 0
        self.written: RankStatus | None = None
        self.reply = JudgeReply(0, 0)
        self.answered = now()
        self.first: RankStatus | None = None  # of rank 0, which has the store
        self.processes: dict[int, tuple[int, int]] = {}  # ranks on this host, with process id and start time
        self.left = 0  # for rank 0: ranks that have made their last request

    def round(self) -> None:
        """Publish the status of this rank and read that of the job; raises what the store raises."""
        self._beat += 1
        status = self._status(self._beat)
        self.store.set(f"status/{self._rank}", _encode(status))
        self.written = status
        reply = self._read_reply()
        if self.judging:
            self.reply = self._judge(reply)
            self.store.set("reply", _encode(self.reply))
        elif reply is not None:
            self.reply = reply
        if self.first is None and self.store.check(["status/0"]):
            self.first = _decode(self.store.get("status/0"), RankStatus)
        if self.reply.complete and not self.processes:
            self.processes = _decode(self.store.get(f"host/{status.namespace}"), dict[int, tuple[int, int]])
        if self._rank == 0:
            self.left = int(self.store.add("left", 0))
        self.answered = self._now()

    def leave(self) -> None:
        """Make the last request: rank 0 may end, and the store with it."""
        self.store.add("left", 1)

    def others(self) -> int:
        """For rank 0: how many of the other ranks are alive, and not the cause."""
        blamed = self.reply.cause.rank if self.reply.cause is not None else 0
        received, now = self._history.received, self._now()
        return sum(now - received[rank] < SILENT for rank in received if rank not in (0, blamed))

    def _read_reply(self) -> JudgeReply | None:
        """The reply of another judge; become the judge if there is none."""
        reply = _decode(self.store.get("reply"), JudgeReply) if self.store.check(["reply"]) else None
        now = self._now()
        beat = None if reply is None else (reply.judge, reply.beat)
        if beat != self._reply_seen[0]:
            self._reply_seen = beat, now
            if reply is not None and reply.judge != self._rank:
                self.judging = self.judging and self._rank < reply.judge  # of two, the lower rank remains
        silent = 0 if reply is None else reply.judge
        patience = _EACH * self._rank + (0.0 if self._is_dead(silent) else _SUCCESSION)
        if not self.judging and now - self._reply_seen[1] > patience:
            self.judging = True
            self._history = JobHistory(self._world_size, self._limit, self._uneven, now)
            self._history.update(self._read_statuses(), now)
            self._history.received[silent] = self._reply_seen[1]
        return reply

    def _judge(self, reply: JudgeReply | None) -> JudgeReply:
        self._history.update(self._read_statuses(), self._now())
        statuses = self._history.statuses
        cause = reply.cause if reply is not None else None
        if cause is None and (found := find_cause(self._history)):
            cause = _decode(self.store.compare_set("cause", "", _encode(found)), Cause)
        if len(self._known) == self._world_size and not self._listed:
            self._listed = True
            for namespace in {each.namespace for each in statuses.values()}:
                here = [each for each in statuses.values() if each.namespace == namespace]
                self.store.set(f"host/{namespace}", _encode({each.rank: (each.pid, each.born) for each in here}))
        closed = [status.progress.closed for status in statuses.values()]
        return JudgeReply(self._rank, self._beat, self._listed, closed[0], all(closed), cause)

    def _read_statuses(self) -> list[RankStatus]:
        for rank in range(self._world_size):
            if rank not in self._known and self.store.check([f"status/{rank}"]):
                self._known.add(rank)
        keys = [f"status/{rank}" for rank in sorted(self._known)]
        if self.store.has_extended_api():
            return [_decode(each, RankStatus) for each in self.store.multi_get(keys)]
        return [_decode(self.store.get(key), RankStatus) for key in keys]


def connect(name: str) -> tuple[Any, Any]:
    """Open a connection to the store of the default process group, which is returned too and must be kept."""
    import torch.distributed
    from torch.distributed.distributed_c10d import _get_default_store

    distributed: Any = torch.distributed  # much of it has no types
    store: Any = _get_default_store()
    if store is None:
        raise ArgumentError(
            "Lockstep needs the store of torch.distributed, and this process group has none",
            found=f"the backend {distributed.get_backend()!r}",
            remedy="use gloo or nccl",
        )
    # A job that torchrun restarts finds the keys of the previous one: they have another prefix.
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        own = store.clone()
    except (AttributeError, RuntimeError):  # torch before 2.8, or a store without a network
        own = _innermost(store)
        if port_of(store):
            own = distributed.TCPStore(
                own.host, own.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT)
            )
    own.set_timeout(timedelta(seconds=_REQUEST))
    return distributed.PrefixStore(f"rankfeed/lockstep/{run}/{name}", own), store


def port_of(store: Any) -> int:
    """Port of a store; 0 if it has no network."""
    return int(getattr(_innermost(store), "port", 0))


def accepts_connections(store: Any) -> bool:
    """Whether a store exists, which is seen without a request; a slow or unreachable one counts as existing."""
    if not port_of(store):
        return False  # an error of a store without a network is final
    try:
        socket.create_connection((_innermost(store).host, port_of(store)), _CONNECT).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    except OSError:
        pass
    return True


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _decode(data: bytes, kind: Any) -> Any:
    return msgspec.json.decode(data, type=kind)
