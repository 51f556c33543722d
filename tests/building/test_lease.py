"""A lease does not outlive its holder, nor a holder its lease: how one ends, and when one is taken for dead."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.prepared import build, control

import rankfeed as rf
from rankfeed.building import holder as holders
from rankfeed.building import lease as leases_module
from rankfeed.building.holder import Holder, Lock, Watch
from rankfeed.building.lease import Lease, Leases
from rankfeed.building.prepared import check
from rankfeed.building.turn import Turn
from rankfeed.errors import PrepareError


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Leases, Lease]]:
    leases = Leases(tmp_path / "leases", stale=10)
    with leases.claimed(None, "", "") as lease:
        assert lease is not None
        yield leases, lease


def until(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def after(leases: Leases, holder: Holder, seconds: float) -> bool:
    """Whether a holder is dead that was last heard of some seconds ago."""
    watch = Watch()
    leases.is_dead(holder, watch)
    watch.seen -= seconds
    return leases.is_dead(holder, watch)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("kept", ["in the function", "by the program"])
def test_a_builder_that_uses_up_the_file_handles_is_told_and_leaves_no_lease(path: Path, kept: str) -> None:
    code = (
        "import gc, os, resource, sys, rankfeed as rf\n"
        "from rankfeed.errors import PrepareError\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "def good(staging): (staging / 'a').write_text('a')\n"
        "rf.prepare_once(sys.argv[1] + '-before', good)\n"
        "whole = []\n"
        "def bad(staging):\n"
        "    files = [] if sys.argv[2] == 'in the function' else whole\n"
        "    for number in range(1000): files.append(open(staging / str(number), 'w'))\n"
        "try: rf.prepare_once(sys.argv[1], bad)\n"
        "except PrepareError as error: print(str(error).splitlines()[0])\n"
        "whole.clear(); gc.collect()\n"
        "print(*(name.rpartition('.')[2] for name in os.listdir(sys.argv[3])), flush=True)\n"
        "print(rf.prepare_once(sys.argv[1], good, timeout=5).name)\n"
    )
    command = [sys.executable, "-c", code, str(path), kept, str(control(path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    said, left, name = done.stdout.splitlines() or [done.stderr, "", ""]
    assert "Too many open files" in said
    assert left == "failed"
    assert name == path.name


def claims_and_is_killed(folder: Path, removed: int) -> bool:
    """A process that is killed when it has removed so many files; whether it came so far."""
    pid = os.fork()
    if not pid:
        real, left = os.unlink, removed

        def unlink(*arguments: Any, **options: Any) -> None:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            real(*arguments, **options)

        try:
            os.unlink = unlink
            with Leases(folder).claimed(None, "", ""):
                pass
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("alone", [True, False])
def test_who_is_killed_anywhere_in_its_end_leaves_nothing_once_another_has_ended(
    alone: bool, tmp_path: Path
) -> None:
    leases = Leases(tmp_path / "leases")
    for removed in count():
        with ExitStack() as stack:
            if alone:
                killed = claims_and_is_killed(leases.folder, removed)
            dead = leases.holder()
            assert stack.enter_context(leases.claimed(dead, "", "")) is not None
            if not alone:  # it comes too late for the lease
                killed = claims_and_is_killed(leases.folder, removed)
        assert names(leases.folder) == [], removed
        if not killed:
            break
    assert removed >= 3


def test_a_failure_is_told_where_the_leases_cannot_be_listed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.listdir

    def listdir(folder: Any) -> list[str]:
        if Path(folder) == control(path):
            raise OSError(errno.EIO, "Input/output error")
        return real(folder)

    def fails(staging: Path) -> None:
        monkeypatch.setattr(os, "listdir", listdir)
        raise ValueError("of the builder")

    with pytest.raises(PrepareError, match="of the builder"):
        rf.prepare_once(path, fails)
    monkeypatch.setattr(os, "listdir", real)
    left = names(control(path))
    assert [name.rpartition(".")[2] for name in left] == ["failed"]
    assert rf.prepare_once(path, build, timeout=5) == path


def test_each_step_of_the_end_is_taken_whatever_the_others_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(*_: Any) -> None:
        raise RuntimeError("no")

    def fails(leases: Leases) -> None:
        with monkeypatch.context() as patch, leases.claimed(None, "", ""):
            patch.setattr(Lease, "release", no)
            patch.setattr(Lock, "release", no)

    leases = Leases(tmp_path / "leases")
    with pytest.raises(RuntimeError):
        fails(leases)
    assert not leases.folder.exists()


def test_a_lease_can_be_read_by_all_who_may_look_into_its_folder(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o750)
    modes = []

    def look(staging: Path) -> None:
        modes.append(stat.S_IMODE((control(path) / "lease").stat().st_mode))
        build(staging)

    before = os.umask(0o077)
    try:
        rf.prepare_once(path, look)
    finally:
        os.umask(before)
    assert [oct(mode) for mode in modes] == ["0o640"]


def test_what_another_user_alone_can_remove_keeps_nobody_from_building(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = control(path) / ".tmp-host1-7-01234567"  # of a failure, by one that was killed
    half.parent.mkdir(parents=True)
    half.touch()
    unlink = Path.unlink

    def refused(file: Path, missing_ok: bool = False) -> None:
        if file == half:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(file))
        unlink(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert rf.prepare_once(path, build) == path
    monkeypatch.undo()
    half.unlink()  # it was left
    half.parent.rmdir()


def test_a_lease_that_this_process_left_is_nobodys(path: Path) -> None:
    control(path).mkdir(parents=True)
    left = Holder.here("", "")
    (control(path) / "lease").write_bytes(msgspec.json.encode(left))
    assert rf.prepare_once(path, build, timeout=5) == path
    assert not control(path).exists()


def test_who_was_taken_for_dead_does_not_take_the_lease_of_its_successor_away(tmp_path: Path) -> None:
    leases = Leases(tmp_path / "leases")
    with ExitStack() as paused, ExitStack() as building:
        first = paused.enter_context(leases.claimed(None, "", ""))
        assert first is not None
        second = building.enter_context(leases.claimed(first.me, "", ""))
        assert second is not None
        paused.close()
        assert second.held()
        building.close()
        assert not leases.folder.exists()


def test_the_sign_of_life_is_made_again_where_it_was_removed(
    held: tuple[Leases, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "RENEWED", 0.05)
    leases = held[0]
    with leases.claimed(held[1].me, "", "") as lease:
        assert lease is not None
        alive = leases.folder / f"{lease.me.name}.alive"
        until(alive)
        alive.unlink()
        until(alive)


def test_each_holder_that_comes_back_has_the_others_wait_for_twice_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "RENEWED", 0.05)
    leases = Leases(tmp_path / "leases", stale=10)
    far = Holder("x", "elsewhere", "boot", 1, 2, 3, True, "", "", 0.0)
    with ExitStack() as stack:
        last = stack.enter_context(leases.claimed(None, "", ""))
        for seconds in (10, 20, 40):
            assert not after(leases, far, seconds - 1)
            assert after(leases, far, seconds + 1)
            assert last is not None
            lost, last = last, stack.enter_context(leases.claimed(last.me, "", ""))
            until(leases.folder / f"{lost.me.name}.lost")
    assert not leases.folder.exists()


def test_a_process_that_is_kept_from_this_user_lives_as_long_as_it_renews(
    held: tuple[Leases, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    leases, lease = held
    theirs = msgspec.structs.replace(lease.me, pid=os.getppid(), born=7)
    assert leases.is_dead(theirs, Watch())
    monkeypatch.setattr(holders, "started", lambda pid: -1)
    assert not after(leases, theirs, 9)
    assert after(leases, theirs, 11)


def test_a_free_lock_tells_a_death_once_renewals_are_missing(held: tuple[Leases, Lease]) -> None:
    """In another container it may be free to this one: some file systems lock for each mount of them."""
    leases, lease = held
    leases.stale = 40
    theirs = msgspec.structs.replace(lease.me, name="theirs", space=1, locked=True)
    (leases.folder / "theirs.lock").touch()
    assert not after(leases, theirs, 8)
    assert after(leases, theirs, 15)
    lock = Lock(leases.folder / "theirs.lock")
    assert lock.acquire()
    assert not after(leases, theirs, 15)
    lock.release()


def test_hosts_that_do_not_tell_their_boots_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Holder.here("", "").is_of_this_host
    monkeypatch.setattr(holders, "boot", lambda: "")
    assert not Holder.here("", "").is_of_this_host


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, times = os.mkdir, iter(range(2))

    def mkdir(folder: Any, *args: Any, **kwargs: Any) -> None:
        if Path(folder) == control(path) and next(times, None) is not None:
            raise FileExistsError(errno.EEXIST, "File exists", str(folder))
        real(folder, *args, **kwargs)

    path.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(os, "mkdir", mkdir)
    assert rf.prepare_once(path, build) == path


def test_a_body_that_gets_no_folder_is_a_failure_that_all_are_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh(_: Turn) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Turn, "fresh", fresh)
    with pytest.raises(PrepareError, match="No space left"), rf.prepare_once(path):
        pass
    assert [name.rpartition(".")[2] for name in names(control(path))] == ["failed"]


@pytest.mark.filterwarnings("error")
def test_warnings_that_are_errors_do_not_end_it_where_there_are_no_locks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    rf.prepare_once(path, build)
    assert check(path) == []
    assert not control(path).exists()
