"""Two threads that monitor a rank: one exchanges statuses, one keeps time, watches processes and ends this one.

They are two, since a store whose host is stopped does not answer, and a request to it does not return.
"""

import atexit
import multiprocessing
import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Literal

from rankfeed._util.process_info import is_stopped, pid_namespace_id, process_start_time
from rankfeed.diagnostics.lockstep.collectives import abort_nccl
from rankfeed.diagnostics.lockstep.exchange import Exchange, JobStore, default_store
from rankfeed.diagnostics.lockstep.find_cause import SETTLE, SILENT, JobHistory
from rankfeed.diagnostics.lockstep.progress import LocalProgress, Observer
from rankfeed.diagnostics.lockstep.status import Cause, PeerState, RankStatus
from rankfeed.errors import LockstepError

#: With which a process ends that hangs, or waits in a collective for a rank that does.
EXIT_CODE = 86
#: Seconds between two statuses, and between two observations.
_EVERY, _TICK = 1.0, 0.25
#: Seconds in which the ranks get to know each other, and before the limit, in which they exchange faster.
_START, _SOON = 3.0, 2.0
#: Seconds that closing and failing wait for the store, and rank 0 for the other ranks.
_FLUSH, _DRAIN = 5.0, 8.0
#: Seconds in which a blocked rank may still raise; one that hangs ends first, so that gloo fails on the others.
_BLOCKED, _HANGING = 1.5, 0.5


class SiblingProcesses:
    """Processes of other ranks on this host: a pidfd shows their end at once; without pidfds it watches none."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self.dead: set[int] = set()

    def add(self, rank: int, pid: int, born: int) -> None:
        """Watch the process of a rank, given its process id and start time."""
        if rank in self._pids:
            return
        with suppress(OSError, AttributeError):  # no more descriptors, or not on Linux
            try:
                self._fds[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                self.dead.add(rank)
            self._pids[rank] = pid
            if born > 0 and process_start_time(pid) not in (-1, born):
                self.dead.add(rank)  # its number belongs to another process

    def wait(self, seconds: float) -> bool:
        """Wait for the end of one of them; returns whether one has ended."""
        fds = {fd: rank for rank, fd in self._fds.items() if rank not in self.dead}
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        ended = {fds[fd] for fd, _ in poll.poll(1000 * seconds)}
        self.dead |= ended
        return bool(ended)

    def states(self) -> dict[int, PeerState]:
        pids = list(self._pids.items())
        return {r: "dead" if r in self.dead else "stopped" if is_stopped(pid) else "alive" for r, pid in pids}

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


class RankMonitor:
    """Monitors this rank until all ranks have closed their loops; see Lockstep for the arguments."""

    def __init__(self, name: str, limit: float, uneven: bool, grace: float) -> None:
        from torch import distributed

        self.local = LocalProgress()
        self.rank, self._world_size = distributed.get_rank(), distributed.get_world_size()
        self.cause: Cause | None = None
        self.over = False
        self.pid = os.getpid()
        self._limit, self._grace, self._namespace = limit, grace, pid_namespace_id()
        born = process_start_time(self.pid)
        identity = RankStatus(self.rank, socket.gethostname(), self.pid, born, self._namespace)
        self._observer, self._siblings = Observer(identity, self.local), SiblingProcesses()
        self._store_is_gone = False
        self._acknowledged, self._decided, self._hurry = (threading.Event() for _ in range(3))
        self._store = JobStore(default_store(), name)
        self._exchange = Exchange(self._store, self.rank, JobHistory(self._world_size, limit, uneven))
        # Of the store: under torchrun it belongs to the launcher (-1), and outlives all ranks.
        self._owner = -1 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        self._has_store = self.rank == self._owner and self._store.port > 0
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._talk, self._guard)]
        _monitor_process(self)
        for thread in self._threads:
            thread.start()

    # Called by the training thread.

    def check(self) -> None:
        """Raise the cause, if there is one."""
        error = self._error()
        if error is not None:
            self._drain()
            raise error

    def end_pass(self, state: Literal["ended", "left"]) -> None:
        """A pass is over; published when this returns, unless the store hangs."""
        self.local.end_pass(state)
        self._flush()

    def close(self, most: float = _FLUSH) -> None:
        """No other step will begin; published when this returns, unless the store hangs."""
        if self.pid == os.getpid():
            self.local.close()
            self._flush(most)

    def fail(self, error: BaseException) -> None:
        """Publish an error of the training thread; raise its cause if that is another rank."""
        self._acknowledged.set()
        cause = None
        if not isinstance(error, LockstepError) and self.pid == os.getpid():
            # An error passes here more than once: in the loop, the with and at the end of the process.
            if self.cause is None and self.local.failure is None:
                is_echo = self.local.fail(error).is_echo
                if not is_echo:  # a launcher may end the other ranks before they report it
                    status = self._status()
                    _print(f"{status.name} failed {status.where}: {status.error}")
                self._flush()
                if is_echo:
                    self._decided.wait(SETTLE + _FLUSH + 4 * _EVERY)
            if self.local.failure is None or self.local.failure.is_echo:
                cause = self._error()
        self._drain()
        if cause is not None:
            raise cause from error

    def stop(self) -> None:
        """Close, if that was not done, and end the threads: in the store while Python ends they would crash it."""
        if self.pid == os.getpid() and not self.over:
            self.close()
            self._drain()
        self.over = True
        self._hurry.set()
        for thread in self._threads:
            thread.join(_FLUSH)

    def _error(self) -> LockstepError | None:
        if self.cause is None or (self.cause.rank == self.rank and self.local.failure):
            return None
        self._acknowledged.set()
        return self.cause.error(self._status())

    def _flush(self, most: float = _FLUSH) -> None:
        """Wait until the progress of this rank is published."""
        deadline = time.monotonic() + most
        while not (self._store_is_gone or self.cause or self.over) and time.monotonic() < deadline:
            written = self._exchange.written
            if written is not None and written.progress.sequence == self.local.progress.sequence:
                return
            self._hurry.set()
            time.sleep(0.002)

    def _drain(self) -> None:
        """If this process has the store: keep it until the others have made their last request, or for a while."""
        deadline = time.monotonic() + _DRAIN
        while self._has_store and self._exchange.needs_store() and time.monotonic() < deadline:
            if self.over or self._store_is_gone:
                return
            self._hurry.set()
            time.sleep(_TICK / 2)

    # Called by the threads.

    def _status(self) -> RankStatus:
        return self._observer.status(self._siblings.states())

    def _talk(self) -> None:
        exchange = self._exchange
        while not (self.over or self._needs_no_store()):
            # Rank 0 may have ended before the last request: torch would log at length that the store is gone.
            if self.local.progress.closed and self._lost_store():
                self._store_is_gone = True
                return
            try:
                exchange.round(self._status(), self._observer.now)
            except Exception:
                if self._owner in self._siblings.dead or not self._store.exists():
                    self._store_is_gone = True
                    return
                with suppress(Exception):  # it is late, and is asked again
                    self._store.connect()
            # More often while the ranks get to know each other, or when something is about to be decided.
            is_urgent = (
                exchange.judgement.cause
                or self.local.failure
                or self.local.progress.closed
                or self._observer.now < _START
                or self._observer.standing >= self._limit - _SOON
            )
            self._hurry.wait(_TICK if is_urgent else _EVERY)
            self._hurry.clear()
        with suppress(Exception):
            exchange.leave(self._status())
        self.over = self.over or exchange.judgement.cause is None

    def _needs_no_store(self) -> bool:
        judgement = self._exchange.judgement
        if self._has_store:
            return judgement.over and not self._exchange.needs_store()
        return judgement.over or judgement.cause is not None

    def _lost_store(self) -> bool:
        return not self._has_store and self._store.port > 0 and not self._store.exists()

    def _guard(self) -> None:
        while not self.over:
            if self._siblings.wait(_TICK):
                self._hurry.set()
            for peer in list(self._exchange.peers.values()):
                if peer.namespace and peer.namespace == self._namespace:
                    self._siblings.add(peer.rank, peer.pid, peer.born)
            cause = self._exchange.judgement.cause or self._cause_without_judge(self._status())
            if cause is not None:
                self._deliver(cause)
                break
            if self.local.progress.closed and self._store_is_gone:
                self.over = True
        self._siblings.close()

    def _cause_without_judge(self, status: RankStatus) -> Cause | None:
        """The cause if the store is gone or does not answer, or no rank judges."""
        judgement, owner, failure = self._exchange.judgement, self._owner, status.failure
        is_echo = failure is not None and failure.is_echo
        if not is_echo and (failure or status.progress.closed or judgement.closed):
            return None
        first = self._exchange.peers.get(0)
        name = "the launcher" if owner < 0 else first.name if first else "rank 0"
        state = "dead" if owner in self._siblings.dead else status.peers.get(owner)
        silence = self._observer.now - self._exchange.judged
        if state == "dead" or self._store_is_gone or (silence >= SILENT and self._lost_store()):
            self._store_is_gone = True
            if is_echo or status.is_inside or status.standing >= self._limit:
                gone = "is gone" if state == "dead" else "is gone or cannot be reached"
                return Cause(owner, f"{name} {gone}, and the store of torch.distributed with it")
            return None
        is_stopped = state == "stopped"
        silent = min(silence, status.standing) >= (self._limit if is_stopped else max(self._limit, SILENT))
        if silent and state != "alive":
            why = "its process is stopped (SIGSTOP, or a debugger)" if is_stopped else "its host hangs"
            text = f"{name} has published nothing for {silence:.0f} s: {why}; it has the store of the job"
            return Cause(owner, text, hangs=True)
        return None

    def _deliver(self, cause: Cause) -> None:
        """Print the cause; end this process if the training thread does not return to raise it."""
        self.cause = cause
        self._decided.set()
        _print(str(cause.error(self._status())))
        if self.local.progress.closed or self.local.failure:
            return
        threading.Thread(target=abort_nccl, daemon=True).start()  # an abort may hang as well
        begun = time.monotonic()
        while not (self._acknowledged.is_set() or self.local.progress.closed):
            time.sleep(_TICK)
            patience = min(self._grace, self._limit)
            if cause.blocks(self._status()):
                patience = _HANGING if cause.rank == self.rank else _BLOCKED
            if time.monotonic() - begun > patience and not self._acknowledged.is_set():
                self._drain()
                _print(f"this rank does not return to raise this, and ends with exit code {EXIT_CODE}")
                os._exit(EXIT_CODE)


# At the end of the process.

_monitors: list[RankMonitor] = []
_previous_hook = None


def _monitor_process(monitor: RankMonitor) -> None:
    """Report to a monitor when this process fails or ends."""
    global _previous_hook
    if _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _report_error
        os.register_at_fork(after_in_child=_forget)
        atexit.register(_leave)
        if multiprocessing.parent_process() is not None:  # children of multiprocessing do not run atexit functions
            Finalize(None, _leave, exitpriority=0)
    _monitors[:] = [monitor for monitor in _monitors if not monitor.over]
    _monitors.append(monitor)


def _report_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Publish the error that ends this process, and show the cause instead if that is another rank."""
    for monitor in _monitors:
        try:
            if not monitor.over:
                monitor.fail(error)
        except LockstepError as cause:
            kind, error, trace = type(cause), cause, None
        except Exception:
            continue
    (_previous_hook or sys.__excepthook__)(kind, error, trace)


def _leave() -> None:
    for monitor in _monitors:
        with suppress(Exception):
            monitor.stop()


def _forget() -> None:
    """A forked child has none of the threads."""
    for monitor in _monitors:
        monitor.over = True
    _monitors.clear()


def _print(text: str) -> None:
    """Write to stderr, which may be closed, in one piece."""
    with suppress(OSError):
        os.write(2, f"rankfeed.Lockstep: {text}\n".encode())
