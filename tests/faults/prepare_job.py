"""What every process of a round does: have the folder prepared, and compare every byte of it.

prepare_job.py PATH KEY OUT: writes OUT/PID.started before, OUT/PID.done after.
"""

import os
import random
import sys
import time
from pathlib import Path

from rankfeed.prepare import prepare_once

FILES, LINES = 6, 400


def content(key: str, index: int) -> str:
    return f"{key} {index}\n" * LINES


def build(staging: Path, key: str, out: Path) -> None:
    (out / f"{os.getpid()}.built-{time.monotonic_ns()}").touch()
    chance = random.Random(os.getpid())
    for index in range(FILES):
        with open(staging / f"{index}.txt", "w") as file:
            text = content(key, index)
            file.write(text[: len(text) // 2])
            time.sleep(chance.uniform(0, 0.03))
            file.write(text[len(text) // 2 :])


def read_held(path: Path) -> tuple[str, bool]:
    """The key of what stands in a folder that is held open while its files are read, and whether all is right."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        result = []
        for index in range(FILES):
            with open(os.open(f"{index}.txt", os.O_RDONLY, dir_fd=folder)) as file:
                result.append(file.read())
    finally:
        os.close(folder)
    key = result[0].split(" ", 1)[0]
    return key, result == [content(key, index) for index in range(FILES)]


def committed(path: Path, key: str) -> bool:
    return all((path / f"{index}.txt").read_text() == content(key, index) for index in range(FILES))


def join(path: Path, key: str, out: Path) -> None:
    (out / f"{os.getpid()}.started").touch()
    folder = prepare_once(path, lambda staging: build(staging, key, out), key=key, timeout=60)
    assert committed(folder, key)
    (out / f"{os.getpid()}.done").touch()


if __name__ == "__main__":
    join(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
