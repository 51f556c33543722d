"""Statuses of all ranks, exchanged through the store of torch.distributed without a collective.

Each rank writes one key and reads one. Two ranks, so that each is judged by the other, read all statuses and write
the judgement that all ranks read. So a job of a thousand ranks costs the store a few thousand small requests a
second, and no rank waits for another.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from rankfeed.diagnostics.lockstep.find_cause import JobHistory, find_cause
from rankfeed.diagnostics.lockstep.status import Cause, RankStatus
from rankfeed.errors import ArgumentError
from rankfeed.storage.commit import decodable

_T = TypeVar("_T")
#: Seconds that a connection to the store, and a request to it, may take.
_CONNECT, _REQUEST = 5.0, 30.0
_JUDGES = (0, 1)


class JobStore:
    """Values of msgspec types in a store; methods raise what the store raises."""

    def __init__(self, store: Any, name: str) -> None:
        # A job that torchrun restarts finds the keys of the previous one: they have another prefix.
        run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._prefix = f"rankfeed/lockstep/{run}/{name}"
        self._kept, self._inner = store, store
        while hasattr(self._inner, "underlying_store"):
            self._inner = self._inner.underlying_store
        self.port = int(getattr(self._inner, "port", 0))  # 0: a store without a network
        self.connect()

    def connect(self) -> None:
        from torch import distributed

        dist: Any = distributed  # much of it has no types
        own = self._inner
        if self.port:
            timeout = timedelta(seconds=_CONNECT)
            own = dist.TCPStore(own.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)
            own.set_timeout(timedelta(seconds=_REQUEST))
        self._keys = dist.PrefixStore(self._prefix, own)

    def exists(self) -> bool:
        """Whether it accepts connections, without a request; a slow or unreachable one counts as existing."""
        if not self.port:
            return False  # an error of a store without a network is final
        try:
            socket.create_connection((self._inner.host, self.port), _CONNECT).close()
        except (ConnectionRefusedError, ConnectionResetError):
            return False
        except OSError:
            pass
        return True

    def write(self, key: str, value: Any) -> None:
        self._keys.set(key, msgspec.json.encode(value).decode())

    def read(self, key: str, default: _T) -> _T:
        """Read a key; the default is written if there is none, so that no request waits for it."""
        content = self._keys.compare_set(key, "", msgspec.json.encode(default).decode())
        return msgspec.json.decode(content, type=type(default))

    def read_all(self, keys: Sequence[str], kind: type[_T]) -> list[_T]:
        """Read keys that exist."""
        extended = self._keys.has_extended_api()
        contents = self._keys.multi_get(keys) if extended else [self._keys.get(key) for key in keys]
        return [msgspec.json.decode(content, type=kind) for content in contents]


def default_store() -> Any:
    """The store of the default process group."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    if store is None:
        raise ArgumentError(
            "Lockstep needs the store of torch.distributed, and this process group has none",
            found=f"the backend {distributed_c10d.get_backend()!r}",
            remedy="use gloo or nccl",
        )
    return store


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
            not (peer.rank in done or peer.has_left or self._history.is_silent(peer)) for peer in self._history
        )

    def _judge(self, cause: Cause | None, beat: int, now: float) -> Judgement:
        history = self._history
        if not self._begun:
            for rank, key in enumerate(self._keys):
                self._store.read(key, RankStatus(rank))
            self._begun = True
        history.update(self._store.read_all(self._keys, RankStatus), now)
        cause = cause or self.judgement.cause
        if cause is None and (own_cause := find_cause(history)):
            cause = self._store.read("cause", own_cause)  # both judges report what the first one has found
        closed = [status.progress.closed for status in history]
        return Judgement(self._rank, beat, closed[0], all(closed), cause)
