"""Have a thread raise, wherever it is: in Python, asleep, or in a collective that will never end.

A signal reaches the main thread where it waits in Python or in a system call, and is kept for later where it waits
in a collective. Such a wait is ended by taking away what it waits for: NCCL has an abort; gloo's does nothing for
who waits (torch 2.13), but it fails at once when the connection to a peer is shut down, as if the peer had died.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from typing import Any

from rankfeed.errors import LockstepError

#: Does nothing where nobody handles it, and is hardly used.
_SIGNAL = getattr(signal, "SIGURG", None)
_pending: list[LockstepError] = []


def arm() -> None:
    """Get ready to raise in the main thread; called in it, else nothing happens."""
    if _SIGNAL is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(_SIGNAL, _raise)


def _raise(*_: object) -> None:
    if _pending:
        raise _pending.pop()


def take_back() -> None:
    """Raise it no more, since it has been raised in another way."""
    _pending.clear()


def was_raised() -> bool:
    """Whether what was to be raised has been, or was taken back."""
    return not _pending


def wake(thread: int, error: LockstepError) -> None:
    """Have a thread raise an error as soon as it is back in Python; a sleep or a wait for a queue ends at once."""
    main = threading.main_thread().ident
    _pending[:] = [error]
    if _SIGNAL is not None and thread == main and signal.getsignal(_SIGNAL) is _raise:
        signal.pthread_kill(thread, _SIGNAL)
        return

    def told(self: LockstepError) -> None:  # an interpreter makes it of its class, when the thread gets there
        _pending.clear()
        LockstepError.__init__(
            self, error.summary, expected=error.expected, found=error.found, where=error.where, remedy=error.remedy
        )
        self.rank = error.rank

    kind = type("LockstepError", (LockstepError,), {"__init__": told, "__reduce__": lambda _: error.__reduce__()})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def remind(thread: int) -> None:
    """Send the signal again: a system call may have begun in between."""
    main = thread == threading.main_thread().ident  # which is the one that handles it, whoever receives it
    if main and _pending and _SIGNAL is not None and signal.getsignal(_SIGNAL) is _raise:
        signal.pthread_kill(thread, _SIGNAL)


def listening(store_port: int) -> list[int]:
    """Ports at which this process takes connections, of its process groups among others; not that of the store."""
    with suppress(OSError):
        return sorted({at[1] for _, at, to in _connections() if to is None and at[1] != store_port})
    return []


def let_go(ports: Collection[int], store_port: int) -> None:
    """End all collectives of this process: they fail.

    Args:
        ports: at which processes of the job take connections.
        store_port: at which the store does, which goes on.
    """
    _abort_nccl()
    own = listening(store_port)
    ports = {*ports, *own}
    with suppress(OSError):
        for connection, at, to in _connections():
            if to is not None and (at[1] in own or to[1] in ports) and _has_timeouts(connection):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _abort_nccl() -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        with suppress(Exception):  # of another backend, or gone
            if distributed_c10d.get_backend(group) == "nccl":
                group._get_backend(torch.device("cuda")).abort()


def _has_timeouts(connection: socket.socket) -> bool:
    """Whether the kernel ends its waits: gloo asks for that, and hardly anybody else.

    Ports alone would not do: connections of the user's own, to a store of objects or to a server in this process,
    may have the numbers that gloo has on another machine.
    """
    waits = (
        connection.getsockopt(socket.SOL_SOCKET, which, 16) for which in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
    )
    return all(any(wait) for wait in waits)


def _connections() -> Iterator[tuple[socket.socket, Any, Any]]:
    """TCP sockets of this process: each (while it is looked at), its address, and the peer's or None."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            # Said to be one that does not block: else Python makes it so, for all who have it, where
            # socket.setdefaulttimeout was called.
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            with closing(socket.socket(fileno=os.dup(int(name)), type=kind)) as found:
                true = found.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
                if found.family not in (socket.AF_INET, socket.AF_INET6) or true != socket.SOCK_STREAM:
                    continue
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield found, found.getsockname(), None
                else:
                    yield found, found.getsockname(), found.getpeername()


def end_process(code: int, words: str) -> None:
    """End this process, whatever its threads are at."""
    with suppress(OSError, ValueError):
        os.write(2, words.encode())
    os._exit(code)
