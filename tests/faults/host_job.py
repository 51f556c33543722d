"""What every process of a host does: have a folder prepared and compare every byte, or read it all the time.

host_job.py prepare PATH KEY OUT SECONDS [LOCAL]
    who builds first, does so for that long; where SECONDS is below zero, it fails in the end;
    then the same on the host's own disk, told in OUT/node
host_job.py serve PATH
    forks a process that prepares for each line "KEY OUT SECONDS", and writes OUT/HOST-PID.ended
host_job.py read PATH OUT
    until OUT/stop is there
"""

import json
import os
import select
import socket
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Literal

from tests.faults.prepare_job import build, committed, read_held

from rankfeed.errors import PrepareError
from rankfeed.prepare import prepare_once, wait
from rankfeed.storage import lease

#: Lost hosts are noticed soon, and waiting processes look how far the build is all the time, for the tests' sake.
HEARTBEAT, STALE, PATIENCE = 0.2, 4.0, 0.1


def me() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def prepare(path: Path, key: str, out: Path, seconds: float, scope: Literal["shared", "node"] = "shared") -> None:
    lease.HEARTBEAT, lease.DURATION, wait._FIRST_REPORT = HEARTBEAT, STALE, PATIENCE

    def make(staging: Path) -> None:
        first = not list(out.glob("*.building"))
        (out / f"{me()}.building").touch()
        (staging / "grows.txt").write_text("half of it")
        time.sleep(abs(seconds) if first else 0)
        if seconds < 0:
            raise ValueError("no such data")
        with open(staging / "grows.txt", "a") as file:
            file.write(", and the rest")
        build(staging, key, out)

    (out / f"{me()}.started").touch()
    try:
        folder = prepare_once(path, make, key=key, timeout=90, scope=scope)
    except PrepareError as error:
        (out / f"{me()}.failed").write_text(error.args[0])
        return
    assert committed(folder, key)
    assert (folder / "grows.txt").read_text() == "half of it, and the rest"
    (out / f"{me()}.done").touch()


def serve(path: Path) -> None:
    outs: dict[int, Path] = {}
    poll = select.poll()
    poll.register(sys.stdin)
    while True:
        if poll.poll(10):
            line = os.read(0, 4096).decode()  # the test sends them one by one, and waits for the answer
            if not line:
                return
            key, out, seconds = line.split()
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    prepare(path, key, Path(out), float(seconds))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            outs[pid] = Path(out)
            (Path(out) / f"{socket.gethostname()}-{pid}.forked").touch()
        with suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                ended = outs[pid] / f"{socket.gethostname()}-{pid}.ended"
                ended.write_text(str(os.waitstatus_to_exitcode(status)))


def read(path: Path, out: Path) -> None:
    """Read the directory all the time, as a process that does not build it."""
    seen: Counter[str] = Counter()
    while not (out / "stop").exists():
        with suppress(OSError):
            _, right = read_held(path)
            seen["right" if right else "wrong"] += 1
        time.sleep(0.005)
    (out / f"{me()}.looks").write_text(json.dumps(seen))


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1] == "serve":
        serve(Path(sys.argv[2]))
    else:
        prepare(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), float(sys.argv[5]))
        for local in sys.argv[6:]:
            prepare(Path(local), sys.argv[3], Path(sys.argv[4]) / "node", 0, "node")
