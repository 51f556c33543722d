"""Disks that are full, read-only or not ours, clocks that are moved: the right error on every rank, and soon."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.machine import mounted, need_root

import rankfeed as rf
from rankfeed.prepare.marker import changed_files

RANKS = 4


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk."""
    with mounted("tmpfs", tmp_path, "size=1m"):
        yield tmp_path


def build(staging: Path) -> None:
    (staging / "a").write_bytes(b"a" * 1000)


def in_one_launch(index: int) -> None:
    """So that a rank that calls when the others have failed already fails too."""
    os.environ.update(PMI_RANK=str(index), PMI_SIZE=str(RANKS))


def fill(staging: Path) -> None:
    time.sleep(1)  # so that the others call, too: the failure of an earlier launch does not count
    (staging / "a").write_bytes(b"a" * (4 << 20))


def rank(
    path: Path, make: Callable[[Path], Any], before: Callable[[int], Any], index: int, said: Any, all_started: Any
) -> None:
    before(index)
    all_started.wait(600)
    try:
        rf.prepare_once(path, make, timeout=50)
        said.put("done")
    except rf.errors.PrepareError as error:
        said.put(str(error))
    except BaseException as error:
        said.put(f"wrong: {error!r}")


def on_all_ranks(path: Path, make: Callable[[Path], Any], before: Callable[[int], Any] = int) -> Counter[str]:
    """What each of four processes has to say."""
    context = multiprocessing.get_context("fork")
    said, all_started = context.Queue(), context.Barrier(RANKS)
    processes = [
        context.Process(target=rank, args=(path, make, before, index, said, all_started)) for index in range(RANKS)
    ]
    for process in processes:
        process.start()
    told = Counter(said.get(timeout=600) for _ in processes)
    for process in processes:
        process.join(600)
    return told


def test_a_full_disk_is_one_error_on_all_ranks_and_the_next_build_succeeds(disk: Path) -> None:
    told = on_all_ranks(disk / "data", fill, in_one_launch)
    assert told.total() == RANKS
    assert len(told) == 1, told
    assert "No space left on device" in next(iter(told))
    assert not list(disk.rglob("a"))
    assert on_all_ranks(disk / "data", build) == Counter({"done": RANKS})
    assert [path.name for path in disk.iterdir()] == ["data"]


def test_a_read_only_disk_is_an_error_on_all_ranks_unless_the_data_are_there(disk: Path) -> None:
    rf.prepare_once(disk / "there", build)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    told = on_all_ranks(disk / "data", build)
    assert all("Read-only file system" in item and "choose a directory" in item for item in told), told
    assert told.total() == RANKS
    assert on_all_ranks(disk / "there", build) == Counter({"done": RANKS})


def test_a_directory_of_another_user_is_an_error_on_all_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:  # where others may look: not below pytest's own
        os.chmod(folder, 0o755)
        theirs = Path(folder, "theirs")
        theirs.mkdir(mode=0o555)
        told = on_all_ranks(theirs / "data", build, drop_root)
        assert all("Permission denied" in item for item in told), told
        assert told.total() == RANKS
        assert not list(theirs.iterdir())


def test_the_start_time_of_a_process_hidden_by_hidepid_is_unknown_and_not_zero() -> None:
    """As on clusters that mount /proc with `hidepid`."""
    need_root("mounting /proc")
    code = (
        "import os\n"
        "from rankfeed._util.process_info import process_start_time as started\n"
        "theirs, over = os.getppid(), os.fork()\n"
        "if over == 0: os._exit(0)\n"
        "os.waitpid(over, 0)\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(os.path.exists(f'/proc/{theirs}'), started(theirs), started(over), started(os.getpid()) > 0)\n"
    )
    inside = 'mount -t proc -o hidepid=2 proc /proc && "$0" -c "$1"; exit $?'  # the shell is the other process
    command = ["unshare", "--mount", "sh", "-c", inside, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "False -1 0 True\n", done.stderr


def drop_root(_: int) -> None:
    """This process loses root's rights, should it have them."""
    if os.geteuid():
        return
    os.setgid(65534)
    os.setuid(65534)


def moved(index: int) -> None:
    """This process's clock is days off."""
    offset, true = (index - 2) * 86_400.0, time.time
    time.time = lambda: true() + offset


def test_ranks_whose_clocks_differ_by_days_build_once(tmp_path: Path) -> None:
    made = tmp_path / "made"

    def slow(staging: Path) -> None:
        made.write_text((made.read_text() if made.exists() else "") + "once")
        time.sleep(0.5)
        build(staging)

    assert on_all_ranks(tmp_path / "data", slow, moved) == Counter({"done": RANKS})
    assert made.read_text() == "once"
    assert changed_files(tmp_path / "data") == []
