"""The server process that ranks are forked from: it has imported torch, and nothing of the user's.

Its arguments are the directory of the examination and modules to import. Each line on stdin starts one rank;
answers on stdout give its process id, and later its exit code. If stdin closes, the server ends all ranks and
removes the directory.
"""

import atexit
import faulthandler
import importlib
import io
import os
import select
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import msgspec
import numpy as np

from rankfeed.diagnostics.doctor.rank import run_rank
from rankfeed.diagnostics.doctor.records import Job
from rankfeed.storage.commit import decodable

#: Environment variable that marks all processes of an examination, by which they are found and ended.
MARK = "RANKFEED_EXAMINATION"
#: What is imported here, once for all ranks.
_ONCE = ("torch.distributed", "torch.multiprocessing", "torch.utils.data", "psutil")


@decodable
class Order(msgspec.Struct, frozen=True):
    """Start a rank.

    Attributes:
        job: of the run.
        rank: which.
        log: file for its records.
        output: file for its stdout and stderr.
        over: file whose existence lets the rank end: others may need what it serves.
        environ: variables to set.
    """

    job: Job
    rank: int
    log: str
    output: str
    over: str
    environ: dict[str, str]


@decodable
class Started(msgspec.Struct, frozen=True, tag=True):
    """A rank was started; in the order of the orders."""

    pid: int


@decodable
class Exited(msgspec.Struct, frozen=True, tag=True):
    """A rank ended: an exit code, or a negative signal."""

    pid: int
    code: int


def main() -> None:
    """Start ranks until stdin closes."""
    for module in _ONCE:
        import_module(module)
    orders, answers = io.FileIO(os.dup(0), "rb"), io.FileIO(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    folder, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    with suppress(BrokenPipeError):
        _serve(orders, answers)
    end_all(os.environ[MARK], os.getpid(), trackers=True)
    shutil.rmtree(folder, ignore_errors=True)


def _serve(orders: io.FileIO, answers: io.FileIO) -> None:
    """Until stdin closes."""
    running: set[int] = set()
    pending = b""
    try:
        while True:
            ready, _, _ = select.select([orders], [], [], 0.02)
            if ready:
                content = orders.read(1 << 16)
                if not content:
                    return
                *lines, pending = (pending + content).split(b"\n")
                for line in lines:
                    pid = _start(msgspec.json.decode(line, type=Order), (orders, answers))
                    running.add(pid)
                    answers.write(msgspec.json.encode(Started(pid)) + b"\n")
            for pid in sorted(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    running.discard(pid)
                    answers.write(msgspec.json.encode(Exited(pid, os.waitstatus_to_exitcode(status))) + b"\n")
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _start(order: Order, ours: tuple[io.FileIO, io.FileIO]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for file in ours:
            file.close()
        output = os.open(order.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(order.environ)
        np.random.seed()  # as in a process that begins; Python's own generator does so by itself
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        with open(order.log, "ab", buffering=0) as log:
            run_rank(order.job, order.rank, log)
            while not Path(order.over).exists():
                time.sleep(0.02)
        atexit._run_exitfuncs()  # what loaders clean up in the end
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_all(mark: str, spared: int, *, trackers: bool = False) -> None:
    """Kill all processes with the mark.

    Python's resource trackers get time to remove what killed processes left.

    Args:
        mark: of an examination.
        spared: id of a process to keep.
        trackers: whether resource trackers that do not end are killed, too.
    """
    import psutil

    for pause in (0.0, 0.05, 0.2, 1.0):
        time.sleep(pause)
        left = [one for one in psutil.process_iter() if one.pid != spared and _has(one, mark)]
        doomed = [one for one in left if not _is_tracker(one) or (trackers and pause >= 1)]
        for one in doomed:
            with suppress(psutil.Error):
                one.kill()
        if not (left if trackers else doomed):
            return


def _has(process: object, mark: str) -> bool:
    with suppress(OSError):
        environ = Path(f"/proc/{process.pid}/environ").read_bytes()  # type: ignore[attr-defined]
        return f"{MARK}={mark}".encode() in environ
    return False


def _is_tracker(process: object) -> bool:
    with suppress(OSError):
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()  # type: ignore[attr-defined]
        return b"resource_tracker" in command
    return False
