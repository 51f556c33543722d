"""Two threads that monitor a rank: one exchanges statuses, one keeps time, watches processes and ends this one.

They are two, since a store whose host is stopped does not answer, and a request to it does not return.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from typing import Literal

from rankfeed._util.process_info import pid_namespace_id, process_start_time
from rankfeed.diagnostics.lockstep import exit_hooks
from rankfeed.diagnostics.lockstep.collectives import abort_nccl
from rankfeed.diagnostics.lockstep.exchange import Exchange, accepts_connections, connect, port_of
from rankfeed.diagnostics.lockstep.find_cause import SETTLE, SILENT
from rankfeed.diagnostics.lockstep.local_progress import LocalProgress, Observer
from rankfeed.diagnostics.lockstep.siblings import SiblingProcesses
from rankfeed.diagnostics.lockstep.status import Cause, RankStatus
from rankfeed.errors import LockstepError

#: With which a process ends that hangs, or waits in a collective for a rank that does.
EXIT_CODE = 86
#: Seconds between two statuses, and between two observations.
_EVERY, _TICK = 1.0, 0.25
#: Seconds in which the ranks get to know each other, and before the limit, in which they exchange faster.
_START, _SOON = 3.0, 2.0
#: Seconds that closing and failing wait for the store, and rank 0 for the other ranks.
_FLUSH, _DRAIN, _LEFT = 5.0, 8.0, 3.0
#: Seconds in which a blocked rank may still raise; one that hangs ends first, so that gloo fails on the others.
_BLOCKED, _HANGING = 2.0, 0.5


class RankMonitor:
    """Monitors this rank until all ranks have closed their loops; see Lockstep for the arguments."""

    def __init__(self, name: str, limit: float, uneven: bool, grace: float) -> None:
        from torch import distributed

        self.local = LocalProgress()
        self.rank, self._world_size = distributed.get_rank(), distributed.get_world_size()
        self.cause: Cause | None = None
        self.over = False
        self.pid = os.getpid()
        self._name, self._limit, self._grace = name, limit, grace
        born, self._namespace = process_start_time(self.pid), pid_namespace_id()
        identity = RankStatus(self.rank, socket.gethostname(), self.pid, born, self._namespace)
        self._observer = Observer(identity, self.local)
        self._siblings = SiblingProcesses(self.rank)
        self._standing = 0.0
        self._store_is_gone = False
        self._acknowledged, self._decided, self._hurry = (threading.Event() for _ in range(3))
        store, self._store = connect(name)
        # Of the store: under torchrun it belongs to the launcher (-1), and outlives all ranks.
        self._owner = -1 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        self._has_store = self.rank == self._owner and port_of(self._store) > 0
        self._exchange = Exchange(
            store,
            self.rank,
            self._world_size,
            self._status,
            lambda: self._observer.now,
            lambda rank: rank in self._siblings.dead,
            limit,
            uneven,
        )
        exit_hooks.register(self)
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._exchange_statuses, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    # Called by the training thread.

    def error(self) -> LockstepError | None:
        """What the training thread must raise."""
        if self.cause is None or (self.cause.rank == self.rank and self.local.progress.state == "failed"):
            return None
        self._acknowledged.set()
        return self.cause.error(self._status(0))

    def end_pass(self, state: Literal["ended", "left"]) -> None:
        """A pass is over; published when this returns, unless the store hangs."""
        self.local.end_pass(state)
        self._flush()

    def close(self, most: float = _FLUSH) -> None:
        """No other step will begin; published when this returns, unless the store hangs."""
        if self.pid == os.getpid():
            self.local.close()
            self._hurry.set()
            self._flush(most)

    def fail(self, error: BaseException) -> LockstepError | None:
        """Publish an error of the training thread; returns what to raise instead, if another rank is the cause."""
        self._acknowledged.set()
        if isinstance(error, LockstepError) or self.pid != os.getpid():
            self.drain()
            return None
        # An error passes here more than once: in the loop, the with and at the end of the process.
        if self.cause is None and self.local.progress.state != "failed":
            self.local.fail(error)
            if not self.local.is_echo:  # a launcher may end the other ranks before they report it
                status = self._status(0)
                _print(f"{status.name} failed {status.where}: {status.error}")
            self._flush()
            if self.local.is_echo:
                self._decided.wait(SETTLE + _FLUSH + 4 * _EVERY)
        cause = self.error()
        self.drain()
        return cause

    def drain(self) -> None:
        """If this process has the store: keep it until the others have made their last request, or for a while."""
        begun = time.monotonic()
        while self._has_store and not (self.over or self._store_is_gone):
            waited = time.monotonic() - begun
            if self.cause is not None and self._exchange.left >= self._exchange.others():
                return
            # A rank that left its loop will be missed in a collective, which fails when this process ends.
            if waited > (_LEFT if self.local.progress.state == "left" and self.cause is None else _DRAIN):
                return
            self._hurry.set()
            time.sleep(_TICK / 2)

    def stop(self) -> None:
        """End the threads: one that returns from the store while Python shuts down would crash the process."""
        self.over = True
        self._hurry.set()
        for thread in self._threads:
            thread.join(_FLUSH)

    # Called by the threads.

    def _status(self, beat: int) -> RankStatus:
        status = self._observer.status(beat, missing=self._siblings.missing())
        self._standing = status.standing
        return status

    def _flush(self, most: float = _FLUSH) -> None:
        """Wait until the progress of this rank is published."""
        deadline = time.monotonic() + most
        while not (self._store_is_gone or self.cause or self.over) and time.monotonic() < deadline:
            written = self._exchange.written
            if written is not None and written.progress.sequence == self.local.progress.sequence:
                return
            self._hurry.set()
            time.sleep(0.002)

    def _exchange_statuses(self) -> None:
        exchange = self._exchange
        while not self.over:
            # Rank 0 may have ended before the last request: torch would log at length that the store is gone.
            if self.local.progress.closed and self._lost_store():
                self._store_is_gone = True
                return
            try:
                exchange.round()
                if self.rank > 0 and (exchange.reply.cause is not None or exchange.reply.over):
                    exchange.leave()
                    self.over = exchange.reply.cause is None
                    return
            except Exception:
                if not self._reconnect():
                    self._store_is_gone = True
                    return
            if exchange.reply.over and exchange.left >= (self._world_size - 1 if self._has_store else 0):
                self.over = True
            self._hurry.wait(_TICK if self._is_urgent() else _EVERY)
            self._hurry.clear()

    def _is_urgent(self) -> bool:
        """Whether the ranks get to know each other, or something is about to be decided."""
        progress = self.local.progress
        return (
            progress.closed
            or progress.state == "failed"
            or self._exchange.reply.cause is not None
            or self._observer.now < _START
            or self._standing >= self._limit - _SOON
        )

    def _lost_store(self) -> bool:
        """Whether the store of a network is gone, without a request to it."""
        return not self._has_store and port_of(self._store) > 0 and not accepts_connections(self._store)

    def _reconnect(self) -> bool:
        """Open another connection after an error, if the store still exists: a late one is waited for."""
        if self._owner in self._siblings.dead or not accepts_connections(self._store):
            return False
        with suppress(Exception):
            self._exchange.store = connect(self._name)[0]
        return True

    def _guard(self) -> None:
        while not self.over:
            if self._siblings.wait(_TICK):
                self._hurry.set()
            if self._namespace:  # else process ids of other hosts cannot be told apart
                self._siblings.add(self._exchange.processes)
            standing = self._status(0).standing
            cause = self._exchange.reply.cause or self._cause_without_store(standing)
            if cause is not None:
                self._deliver(cause)
                break
            if self.local.progress.closed and self._store_is_gone:
                self.over = True
        self._siblings.close()

    def _cause_without_store(self, standing: float) -> Cause | None:
        """The cause if the store is gone or does not answer."""
        local, first = self.local, self._exchange.first
        if not (local.is_echo or (local.is_inside and not self._exchange.reply.closed)):
            return None
        rank, name = self._owner, first.name if first is not None else "rank 0"
        name = name if rank == 0 else "the launcher"
        silence = self._observer.now - self._exchange.answered
        is_dead = rank in self._siblings.dead
        if is_dead or self._store_is_gone or (silence >= SILENT and self._lost_store()):
            self._store_is_gone = True
            gone = "is gone" if is_dead else "is gone or cannot be reached"
            return Cause(rank, f"{name} {gone}, and the store of torch.distributed with it")
        if min(silence, standing) < self._limit:
            return None
        stopped = self._siblings.missing().get(rank) == "stopped"
        why = "its process is stopped (SIGSTOP, or a debugger)" if stopped else "its process or host hangs"
        text = f"{name} has published nothing for {silence:.0f} s: {why}; it has the store of the job"
        return Cause(rank, text, hangs=True)

    def _deliver(self, cause: Cause) -> None:
        """Print the cause; end this process if the training thread does not return to raise it."""
        self.cause = cause
        self._decided.set()
        error = cause.error(self._status(0))
        _print(str(error))
        if self.local.progress.closed or self.local.progress.state == "failed":
            return
        threading.Thread(target=abort_nccl, daemon=True).start()  # an abort may hang as well
        begun = time.monotonic()
        while not (self._acknowledged.is_set() or self.local.progress.closed):
            time.sleep(_TICK)
            patience = min(self._grace, self._limit)
            if cause.blocks(self._status(0)):
                patience = _HANGING if cause.rank == self.rank else _BLOCKED
            if time.monotonic() - begun > patience and not self._acknowledged.is_set():
                if self.rank == 0:
                    self._acknowledged.set()
                    self.drain()
                _print(f"this rank does not return to raise this, and ends with exit code {EXIT_CODE}")
                os._exit(EXIT_CODE)


def _print(text: str) -> None:
    """Write to stderr, which may be closed, in one piece."""
    with suppress(OSError):
        os.write(2, f"rankfeed.Lockstep: {text}\n".encode())
