"""What every process of a host does: have a folder prepared and compare every byte, or read it all the time.

host_job.py prepare PATH KEY OUT SECONDS [SCOPE]
    who builds first, does so for that long; where SECONDS is below zero, it fails in the end
host_job.py read PATH OUT
    until OUT/stop is there
"""

import os
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.faults.prepare_job import FILES, build, content

from rankfeed.building import lease, patience, prepare_once
from rankfeed.errors import PrepareError

#: Lost hosts are noticed soon, and waiting processes look how far the build is all the time, for the tests' sake.
RENEWED, STALE, PATIENCE = 0.2, 4.0, 0.1
ME = f"{socket.gethostname()}-{os.getpid()}"


def prepare(path: Path, key: str, out: Path, seconds: float, scope: str) -> None:
    lease.RENEWED, patience._PATIENCE = RENEWED, PATIENCE
    lease.Leases.__init__.__kwdefaults__["stale"] = STALE

    def make(staging: Path) -> None:
        first = not list(out.glob("*.building"))
        (out / f"{ME}.building").touch()
        (staging / "grows.txt").write_text("half of it")
        time.sleep(abs(seconds) if first else 0)
        if seconds < 0:
            raise ValueError("no such data")
        with open(staging / "grows.txt", "a") as file:
            file.write(", and the rest")
        build(staging, key, out)

    (out / f"{ME}.started").touch()
    try:
        folder = prepare_once(path, make, key=key, timeout=90, scope="node" if scope == "node" else "shared")
    except PrepareError as error:
        (out / f"{ME}.failed").write_text(error.args[0])
        return
    for number in range(FILES):
        assert (folder / f"{number}.txt").read_text() == content(key, number)
    assert (folder / "grows.txt").read_text() == "half of it, and the rest"
    (out / f"{ME}.done").touch()


def read(path: Path, out: Path) -> None:
    """Look at the folder all the time, as somebody who knows nothing of its making."""
    seen: Counter[str] = Counter()
    while not (out / "stop").exists():
        with suppress(OSError):
            look(path, seen)
        time.sleep(0.005)
    (out / f"{ME}.looks").write_text("\n".join(f"{name} {count}" for name, count in seen.items()))


def look(path: Path, seen: Counter[str]) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = []
        for number in range(FILES):
            with open(os.open(f"{number}.txt", os.O_RDONLY, dir_fd=folder)) as file:
                found.append(file.read())
    finally:
        os.close(folder)
    key = found[0].split(" ", 1)[0]
    seen["right" if found == [content(key, number) for number in range(FILES)] else "wrong"] += 1


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        prepare(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), float(sys.argv[5]), "".join(sys.argv[6:]))
