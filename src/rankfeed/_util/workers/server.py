"""The server process: forks workers on request.

It is started by exec, has one thread, ends when its client does, and takes its workers with it.
"""

import ctypes
import gc
import importlib
import json
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from rankfeed._util.workers.channel import Channel, PeerGoneError, poll_descriptors

#: Longest request and reply.
MESSAGE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


def serve(descriptor: int, client_pid: int, modules: list[str]) -> None:
    """Import modules, reply ``{}``, and answer the requests of a client until it ends.

    Each request is JSON and has one reply:

    - ``{"fork": offset}`` with descriptors of a payload, a socket and a memfd: fork a worker. Replies
      ``{"pid": pid}`` with a pidfd.
    - ``{"status": pid}``: wait for a worker that has ended. Replies ``{"status": exit status}``.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):  # sent to the job's process group: the client decides
        signal.signal(signum, signal.SIG_IGN)
    client = socket.socket(fileno=descriptor)
    try:
        client_pidfd = os.pidfd_open(client_pid)
    except ProcessLookupError:  # it has ended
        client.close()
        return
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # workers collect no garbage among these objects, which would copy their pages
    workers: set[int] = set()
    reply: dict[str, Any] = {}
    descriptors: list[int] = []
    with client, suppress(OSError):
        while True:
            socket.send_fds(client, [json.dumps(reply).encode()], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            if client_pidfd in poll_descriptors({client.fileno(): select.POLLIN, client_pidfd: select.POLLIN}):
                break
            message, descriptors, _, _ = socket.recv_fds(client, MESSAGE_BYTES, 3)
            if not message:
                break
            request = json.loads(message)
            if "fork" in request:
                pid = os.fork()
                if pid == 0:
                    client.close()
                    payload, connected, memory = descriptors
                    _run_worker(payload, request["fork"], connected, client_pidfd, memory)
                workers.add(pid)
                for descriptor in descriptors:
                    os.close(descriptor)
                descriptors, reply = [os.pidfd_open(pid)], {"pid": pid}
            else:
                pid, status = request["status"], None
                with suppress(ChildProcessError):
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                workers.discard(pid)
                reply = {"status": status}
    for pid in workers:  # not reaped yet, so each pid is still that of the worker
        os.kill(pid, signal.SIGKILL)


def _run_worker(payload: int, offset: int, connected: int, client_pidfd: int, memory: int) -> NoReturn:
    """Unpickle the handler, report success, and call the handler with each message until the client ends."""
    status = 1
    try:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if the server is killed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        channel = Channel(socket.socket(fileno=connected), client_pidfd, memory)
        try:
            handler = _load(payload, offset)
        except BaseException:
            channel.send(traceback.format_exc().encode(errors="replace"))
            raise PeerGoneError from None
        channel.send(b"")
        while True:
            handler(channel.receive(), channel)
    except PeerGoneError:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _load(payload: int, offset: int) -> Any:
    """The handler of a payload, in the environment of the client; its arrays are mapped, and copied on write."""
    view = memoryview(mmap.mmap(payload, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    os.close(payload)
    context, content, buffers = pickle.loads(view[offset:])  # noqa: S301  (from the client)
    os.environ.clear()
    os.environ.update(context["environ"])
    sys.path[:], sys.argv[:] = context["path"], context["argv"]
    with suppress(OSError):
        os.chdir(context["directory"])
    return pickle.loads(content, buffers=[view[at : at + length] for at, length in buffers])  # noqa: S301
