"""A pool of worker processes, and the server process that they are forked from."""

import atexit
import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from rankfeed._util.pickling import dumps
from rankfeed._util.remote_traceback import RemoteTraceback
from rankfeed._util.signals import reraise_interrupt
from rankfeed._util.workers.channel import Channel, PeerGoneError, poll_descriptors
from rankfeed._util.workers.server import MESSAGE_BYTES
from rankfeed.errors import WorkerError

_log = logging.getLogger("rankfeed")
#: Seconds that a request to the server takes at most, and its imports (torch, from a network disk).
_REQUEST_LIMIT, _IMPORT_LIMIT = 60.0, 300.0
#: Seconds between messages about a worker that is waited for.
_REPORT_INTERVAL = 60.0
_ALIGNMENT = 64
_SERVER_COMMAND = (
    "import json, sys; sys.path[:], *arguments = json.loads(sys.argv[1]);"
    "from rankfeed._util.workers.server import serve; serve(*arguments)"
)


def is_supported() -> bool:
    """Whether this system has what worker processes need: Linux 5.3 or newer."""
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open") and hasattr(socket, "send_fds")):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class Payload:
    """A handler in a memfd that all workers map: its arrays, then its pickle and the environment to run it in."""

    def __init__(self, handler: Any) -> None:
        content, arrays = dumps(handler)
        context = {"environ": dict(os.environ), "path": sys.path, "argv": sys.argv, "directory": os.getcwd()}
        self.file = os.fdopen(os.memfd_create("rankfeed-payload", os.MFD_CLOEXEC), "wb")
        places, end = [], 0
        for array in arrays:
            self.file.seek(end)
            self.file.write(array)
            places.append((end, array.nbytes))
            end += array.nbytes + -array.nbytes % _ALIGNMENT
        self.file.seek(end)
        pickle.dump((context, content, places), self.file)
        self.file.flush()
        #: Offset of what comes after the arrays.
        self.offset = end


class Server:
    """The client's side of a server process, which imports modules before it forks the first worker."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        arguments = json.dumps([sys.path, theirs.fileno(), os.getpid(), modules])
        # It is forked, so numpy's BLAS and OpenMP must not start threads.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _SERVER_COMMAND, arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **single},
            )
        # Reentrant: the garbage collector may end a worker in the middle of a request.
        self._lock = threading.RLock()
        self._is_ready = self._is_busy = self._has_failed = False

    @property
    def is_alive(self) -> bool:
        return not self._has_failed and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self, seconds: float) -> bool:
        """Whether its imports are done, after waiting at most ``seconds``."""
        if not self._is_ready and _is_readable(self._socket.fileno(), seconds):
            with self._lock:
                if not self._is_ready:
                    self._receive()
                    self._is_ready = True
        return self._is_ready

    def fork(self, payload: Payload) -> tuple[int, int, Channel]:
        if not self.is_ready(_IMPORT_LIMIT):
            raise self._error(f"it did not start within {_IMPORT_LIMIT:.0f} s")
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("rankfeed-batches", os.MFD_CLOEXEC)
        try:
            with theirs:
                descriptors = [payload.file.fileno(), theirs.fileno(), memory]
                reply, (pidfd,) = self._request({"fork": payload.offset}, descriptors)
        except BaseException:
            ours.close()
            os.close(memory)
            raise
        return reply["pid"], pidfd, Channel(ours, pidfd, memory)

    def exit_status(self, pid: int) -> int | None:
        """Exit status of a worker that has ended, negative for a signal; None if it is unknown."""
        try:
            status: int | None = self._request({"status": pid})[0]["status"]
        except WorkerError as error:
            reraise_interrupt(error)
            return None
        return status

    def close(self) -> None:
        if not self._is_ready:
            self._process.kill()  # it is importing, and has no workers
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REQUEST_LIMIT)

    def forget(self) -> None:
        """Free what a forked child inherits of it: the server is not a child of that process."""
        self._socket.close()
        self._process.returncode = 0

    def _request(
        self, request: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            if self._is_busy:
                raise self._error("another request is in progress in this thread")
            self._is_busy = True
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                if not _is_readable(self._socket.fileno(), _REQUEST_LIMIT):
                    raise self._error(f"no answer within {_REQUEST_LIMIT:.0f} s")
                return self._receive()
            except BaseException as error:
                # Also an interrupt: the answer would be taken for that of the next request.
                self._has_failed = True
                self._process.kill()
                reraise_interrupt(error)
                if isinstance(error, OSError):
                    raise self._error(str(error)) from error
                raise
            finally:
                self._is_busy = False

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        reply, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
        if not reply:
            raise self._error("it ended")
        return json.loads(reply), descriptors

    def _error(self, reason: str) -> WorkerError:
        return WorkerError(
            "the server of worker processes failed",
            found=reason,
            remedy="see its messages on standard error; worker_kind='thread' needs no processes",
        )


class Worker:
    """A worker process."""

    def __init__(self, server: Server, payload: Payload) -> None:
        self._server = server
        self.pid, self._pidfd, self.channel = server.fork(payload)
        self._is_ready = self._has_ended = False

    def wait_ready(self, seconds: float) -> bool:
        """Whether it unpickles the handler within ``seconds``; raises PeerGoneError or WorkerError."""
        if not self._is_ready and self.channel.poll(seconds):
            if failure := self.channel.receive().decode():
                raise WorkerError(
                    "a worker process could not unpickle what it runs",
                    found=failure.strip().rsplit("\n", 1)[-1],
                    remedy="make sure that worker processes can import the modules of your functions and classes",
                ) from RemoteTraceback(failure)
            self._is_ready = True
        return self._is_ready

    def kill(self) -> None:
        """Kill it; it has nothing to clean up."""
        if not self._has_ended:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except OSError as error:  # it has ended, and perhaps another thread has closed the descriptor
                reraise_interrupt(error)

    def end(self) -> str:
        """Kill it, wait for it, and free what it holds. Returns how it ended."""
        self.kill()
        if self._has_ended:
            return ""
        self._has_ended = True
        _is_readable(self._pidfd, _REQUEST_LIMIT)
        status = self._server.exit_status(self.pid)
        self.release()
        if status is not None and status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {'unknown' if status is None else status}"

    def release(self) -> None:
        """Close the descriptors of this process, without waiting for the worker."""
        if self.channel.socket.fileno() >= 0:
            self.channel.close()
            os.close(self._pidfd)


class WorkerPool:
    """Workers that call ``handler(message, channel)`` for each message; only `replace` replaces one."""

    def __init__(self, payload: Payload, preload: Sequence[str] = ()) -> None:
        self.workers: list[Worker] = []
        self._payload, self._preload = payload, tuple(preload)
        self._owner = os.getpid()
        self._is_closed = False
        _pools.add(self)
        _server_of(self._preload)  # it starts while the caller continues

    @property
    def is_mine(self) -> bool:
        """Whether this process created the pool, and not one that it was forked from."""
        return self._owner == os.getpid()

    @property
    def server_pid(self) -> int:
        """Process of which all that the workers start are descendants, also after a worker has ended."""
        return _server_of(self._preload).pid

    def start(self, count: int, seconds: float) -> bool:
        """Start the missing ones of ``count`` workers; whether all are ready in time. Raises WorkerError."""
        deadline = time.monotonic() + seconds
        if len(self.workers) < count and not _server_of(self._preload).is_ready(seconds):
            return False
        while len(self.workers) < count:
            self.workers.append(self._fork())
        for index, worker in enumerate(self.workers):
            try:
                if not worker.wait_ready(max(0.0, deadline - time.monotonic())):
                    return False
            except PeerGoneError:
                self.replace(index)
        return True

    def receive(self, index: int, task: str) -> bytearray:
        """The next message of a worker, about a ``task`` that logs name; raises PeerGoneError or WorkerError."""
        worker, waited = self.workers[index], 0.0
        while not (worker.wait_ready(_REPORT_INTERVAL) and worker.channel.poll(_REPORT_INTERVAL)):
            waited += _REPORT_INTERVAL
            _log.warning("waited %.0f s for %s from worker process %d", waited, task, worker.pid)
        return worker.channel.receive()

    def replace(self, index: int) -> str:
        """End a worker and start another one in its place. Returns how it ended."""
        ending = self.workers[index].end()
        self.workers[index] = self._fork()
        if self._is_closed:  # by another thread, which has not seen the new one
            self.workers[index].kill()
        return ending

    def kill(self) -> None:
        """Kill the workers and start none from now on; a thread that waits for one gets an error."""
        self._is_closed = True
        for worker in self.workers if self.is_mine else ():
            worker.kill()

    def close(self) -> None:
        """Kill the workers, also in the middle of a task, and free what they hold."""
        self.kill()
        for worker in self.workers if self.is_mine else ():
            worker.end()
        self.release()

    def release(self) -> None:
        """Close the descriptors of this process, without waiting for the workers."""
        for worker in self.workers:
            worker.release()
        self._payload.file.close()

    def _fork(self) -> Worker:
        if self._is_closed:
            raise WorkerError("the worker processes were ended")
        return Worker(_server_of(self._preload), self._payload)


_pools: WeakSet[WorkerPool] = WeakSet()
#: The servers of this process, by the modules that they import.
_servers: dict[tuple[str, ...], Server] = {}
_servers_lock = threading.Lock()
_is_exiting = False


def _server_of(modules: tuple[str, ...]) -> Server:
    with _servers_lock:
        if _is_exiting:
            raise WorkerError("the interpreter is exiting")
        server = _servers.get(modules)
        if server is None or not server.is_alive:
            if server is not None:
                server.close()
            server = _servers[modules] = Server(modules)
        return server


@atexit.register
def _stop_servers() -> None:
    global _is_exiting
    _is_exiting = True
    for pool in list(_pools):
        pool.kill()
        pool.release()
    for server in _servers.values():
        server.close()


def _forget_servers() -> None:
    global _servers, _servers_lock
    for server in _servers.values():
        server.forget()
    _servers, _servers_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget_servers)  # a forked child starts its own


def _is_readable(descriptor: int, seconds: float) -> bool:
    return bool(poll_descriptors({descriptor: select.POLLIN}, seconds))
