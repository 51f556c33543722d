"""The server process: forks workers on request.

It is started by exec, has one thread, ends when its client does, and takes its workers with it.
"""

from __future__ import annotations

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
import struct
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from rankfeed._util.workers.channel import Channel, PeerGoneError

#: Longest request and reply.
MESSAGE_BYTES = 1 << 16
#: Of a payload: lengths of context and pickle and the number of buffers; then offset and length of each buffer.
HEADER, BUFFER = struct.Struct("<QQQ"), struct.Struct("<QQ")
_PR_SET_PDEATHSIG = 1


def serve(descriptor: int, client_pid: int) -> None:
    """Answer the requests of a client until it ends.

    Each request is JSON and has one reply:

    - ``{"preload": modules}``: import modules. Replies ``{}``.
    - ``{"fork": true}`` with descriptors of a payload and a socket: fork a worker. Replies ``{"pid": pid}`` with a
      pidfd.
    - ``{"status": pid}``: wait for a worker that has ended. Replies ``{"status": exit status}``.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the job's process group: the client decides
        signal.signal(number, signal.SIG_IGN)
    client = socket.socket(fileno=descriptor)
    client_pidfd = os.pidfd_open(client_pid)
    poll = select.poll()
    poll.register(client, select.POLLIN)
    poll.register(client_pidfd, select.POLLIN)
    workers: set[int] = set()
    while client_pidfd not in dict(poll.poll()):
        message, descriptors, _, _ = socket.recv_fds(client, MESSAGE_BYTES, 2)
        if not message:
            break
        request = json.loads(message)
        reply: dict[str, Any] = {}
        if "preload" in request:
            for module in request["preload"]:
                importlib.import_module(module)
            gc.collect()
            gc.freeze()  # workers collect no garbage among these objects, which would copy their pages
        elif "fork" in request:
            pid = os.fork()
            if pid == 0:
                client.close()
                payload, connected = descriptors
                _run_worker(payload, connected, client_pidfd)
            workers.add(pid)
            for each in descriptors:
                os.close(each)
            descriptors, reply = [os.pidfd_open(pid)], {"pid": pid}
        else:
            pid, status = request["status"], None
            with suppress(ChildProcessError):
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            workers.discard(pid)
            reply = {"status": status}
        try:
            socket.send_fds(client, [json.dumps(reply).encode()], descriptors)
        except OSError:
            break
        for each in descriptors:
            os.close(each)
    for pid in workers:  # not reaped yet, so each pid is still that of the worker
        os.kill(pid, signal.SIGKILL)


def _run_worker(payload: int, connected: int, client_pidfd: int) -> NoReturn:
    """Unpickle the handler, report success, and call the handler with each message until the client ends."""
    status = 1
    try:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if the server is killed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        channel = Channel(socket.socket(fileno=connected), client_pidfd)
        try:
            handler = _load(payload)
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


def _load(payload: int) -> Any:
    """The handler of a payload, in the environment of the client; its arrays are mapped, and copied on write."""
    view = memoryview(mmap.mmap(payload, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    os.close(payload)
    context_bytes, pickle_bytes, count = HEADER.unpack_from(view)
    start = HEADER.size + count * BUFFER.size
    context = json.loads(bytes(view[start : start + context_bytes]))
    os.environ.clear()
    os.environ.update(context["environ"])
    sys.path[:], sys.argv[:] = context["path"], context["argv"]
    with suppress(OSError):
        os.chdir(context["directory"])
    places = [BUFFER.unpack_from(view, HEADER.size + index * BUFFER.size) for index in range(count)]
    content = view[start + context_bytes : start + context_bytes + pickle_bytes]
    return pickle.loads(content, buffers=[view[at : at + length] for at, length in places])  # noqa: S301
