"""Running native libraries in a helper process, where a crash cannot end this process.

Also for libraries whose threads do not survive a fork: a forked child uses them through a helper process.
"""

import os
import signal
import subprocess
import sys
import threading
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rankfeed.errors import RankfeedError

#: Seconds between two checks of the helper process that its parent still exists.
_PARENT_CHECK_SECONDS = 5.0
_PROGRAM = "import sys; from rankfeed.sources.helper_process import serve; serve(int(sys.argv[1]))"


class HelperCrash(Exception):
    """The helper process ended during a call."""


class HelperProcess:
    """An object in another process, made there by ``factory`` ("module:name"). It ends with this process."""

    def __init__(self, factory: str, *arguments: Any) -> None:
        self._lock = threading.Lock()
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        try:
            self.call(factory, *arguments)
        except RankfeedError:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object; raises its RankfeedErrors, and HelperCrash if the process ended."""
        with self._lock:
            try:
                self._pipe.send((method, arguments))
                answer = self._pipe.recv()
            except BaseException as error:  # if interrupted, the next call must not receive this answer
                self.close()
                if isinstance(error, (EOFError, OSError)):
                    raise HelperCrash(f"exit status {self._process.returncode}") from error
                raise
        if isinstance(answer, RankfeedError):
            raise answer
        return answer

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its process ended during a call."""
        return self._pipe.closed

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def serve(descriptor: int) -> None:
    """The main function of the helper process: make the object, and answer calls until the parent ends."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent
    target: Any = None
    with Connection(descriptor) as pipe:
        while True:
            while not pipe.poll(_PARENT_CHECK_SECONDS):
                if os.getppid() != parent:
                    return
            try:
                method, arguments = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                if target is None:
                    module, name = method.split(":")
                    target = getattr(import_module(module), name)(*arguments)
                    pipe.send(None)
                else:
                    pipe.send(getattr(target, method)(*arguments))
            except RankfeedError as error:
                pipe.send(error)
