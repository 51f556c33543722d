"""A lease has one owner at a time: how it is acquired, renewed, lost, taken over and released."""

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.jobs import run_python, until
from tests.support.prepared import acquire, names

from rankfeed.storage import lease as lease_module
from rankfeed.storage.lease import HeldLease, Lease, LeaseOwner, StallDetector

REMOTE = LeaseOwner("x", "lease", "elsewhere", "boot", 1, 2, 3)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Lease, HeldLease]]:
    lease = Lease(tmp_path / "lease", duration=10)
    with acquire(lease) as mine:
        yield lease, mine


def expires_after(lease: Lease, owner: LeaseOwner, seconds: float) -> bool:
    """Whether the lease of an owner is expired when it has made no heartbeat for that long."""
    stalls = StallDetector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease_module.time, "monotonic", lambda: 0.0)
        lease.is_expired(owner, stalls)
        patch.setattr(lease_module.time, "monotonic", lambda: seconds)
        return lease.is_expired(owner, stalls)


def test_a_lease_cannot_be_acquired_twice_and_its_release_removes_it(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    assert lease.owner() is None
    with acquire(lease, None, "rank 0 of 2", 0) as held:
        assert lease.owner() == held.owner
        assert str(held.owner) == f"process {os.getpid()} on {held.owner.host} (rank 0 of 2)"
        assert lease.acquire(None) is None
        assert held.is_held()
    assert not lease.directory.exists()


def test_only_one_of_eight_threads_takes_over_a_lease(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with acquire(lease) as dead:
        start = threading.Barrier(8)

        def contend(_: int) -> bool:
            start.wait(10)
            held = lease.acquire(dead.owner)
            start.wait(10)
            if held is not None:
                held.release()
            return held is not None

        with ThreadPoolExecutor(8) as pool:
            assert Counter(pool.map(contend, range(8))) == Counter({False: 7, True: 1})


def test_an_owner_on_another_host_keeps_the_lease_as_long_as_it_renews_it(tmp_path: Path) -> None:
    lease, stalls = Lease(tmp_path, duration=0.3), StallDetector()
    file = tmp_path / "lease"
    for tick in range(6):
        file.touch()
        os.utime(file, ns=(tick, tick))  # by a clock that is at 1970
        assert not lease.is_expired(REMOTE, stalls)
        time.sleep(0.1)
    time.sleep(0.3)
    assert lease.is_expired(REMOTE, stalls)


def test_heartbeats_move_the_file_time_by_whole_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As file systems that store whole seconds need."""
    monkeypatch.setattr(lease_module, "HEARTBEAT", 0.02)
    seen: set[int] = set()
    with acquire(Lease(tmp_path / "lease")):
        deadline = time.monotonic() + 20
        while len(seen) < 4 and time.monotonic() < deadline:
            seen.add(int((tmp_path / "lease" / "lease").stat().st_mtime) // 2)
    assert len(seen) >= 4


def test_a_lease_renewed_by_progress_expires_without_progress(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease", duration=0.3, by_progress=True)
    with acquire(lease) as held:
        stalls = StallDetector()
        for _ in range(12):
            held.renew()
            assert not lease.is_expired(held.owner, stalls)
            time.sleep(0.05)
        time.sleep(0.4)
        assert lease.is_expired(held.owner, stalls)


def killed_after_removing(directory: Path, removed: int, after: LeaseOwner | None = None) -> bool:
    """Acquire the lease in a process that is killed after it removed some files; whether it was killed."""
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
            held = Lease(directory).acquire(after)
            if held is not None:
                held.release()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("alone", [True, False])
def test_the_next_owner_of_a_lease_removes_the_files_of_a_killed_process(alone: bool, tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    for removed in count():
        with ExitStack() as stack:
            if alone:
                killed = killed_after_removing(lease.directory, removed)
            dead = lease.owner()
            stack.enter_context(acquire(lease, dead))
            if not alone:  # it comes too late for the lease
                killed = killed_after_removing(lease.directory, removed)
        assert names(lease.directory) == [], removed
        if not killed:
            break
    assert removed >= 1


def test_an_interrupted_release_removes_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    held = acquire(Lease(tmp_path / "lease"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            held.release()
    assert not (tmp_path / "lease").exists()


def test_an_interrupted_acquisition_leaves_no_heartbeat_thread(tmp_path: Path) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Lease(tmp_path / "lease").acquire(None)
    beating = [thread for thread in threading.enumerate() if thread.name == "rankfeed-lease"]
    for thread in beating:
        thread.join(5)
    assert not any(thread.is_alive() for thread in beating)
    assert not (tmp_path / "lease").exists()


def test_a_lease_left_by_this_process_is_expired(tmp_path: Path) -> None:
    left = LeaseOwner.current()
    (tmp_path / "lease").write_bytes(msgspec.json.encode(left))
    assert Lease(tmp_path).is_expired(left, StallDetector())


def test_an_owner_that_lost_the_lease_does_not_release_that_of_its_successor(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    with ExitStack() as stopped, ExitStack() as building:
        first = stopped.enter_context(acquire(lease))
        second = building.enter_context(acquire(lease, first.owner))
        assert not first.is_held()
        stopped.close()
        assert second.is_held()
        building.close()
        assert not lease.directory.exists()


def test_each_lost_owner_that_returns_doubles_the_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT", 0.05)
    lease = Lease(tmp_path / "lease", duration=10)
    with ExitStack() as stack:
        last = stack.enter_context(acquire(lease))
        for seconds in (10, 20, 40):
            assert not expires_after(lease, REMOTE, seconds - 1)
            assert expires_after(lease, REMOTE, seconds + 1)
            lost, last = last, stack.enter_context(acquire(lease, last.owner))
            until((lease.directory / f"{lost.owner.token}.returned").exists)
    assert not lease.directory.exists()


@pytest.mark.parametrize("reason", ["of another user", "in another pid namespace"])
def test_the_lease_of_an_invisible_process_expires_only_without_heartbeats(
    reason: str, held: tuple[Lease, HeldLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, mine = held
    if reason == "of another user":
        other = msgspec.structs.replace(mine.owner, pid=os.getppid(), start_time=7)
        assert lease.is_expired(other, StallDetector())
        monkeypatch.setattr(lease_module, "process_start_time", lambda pid: -1)
    else:
        other = msgspec.structs.replace(mine.owner, pid_namespace=1, pid=1 << 22)  # no such process here
    assert not expires_after(lease, other, 9)
    assert expires_after(lease, other, 11)


def test_an_owner_without_a_boot_id_is_not_local(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LeaseOwner.current().is_local
    monkeypatch.setattr(lease_module, "boot_id", lambda: "")
    assert not LeaseOwner.current().is_local


def test_a_lease_that_cannot_be_written_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Lease(tmp_path / "lease").acquire(None)
    assert names(tmp_path) == []


@pytest.mark.parametrize("link", ["directory", "lease"])
def test_a_lease_is_not_written_through_a_symbolic_link(link: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    if link == "directory":
        elsewhere.mkdir()
        (tmp_path / "lease").symlink_to(elsewhere)
    else:
        (tmp_path / "lease").mkdir()
        (tmp_path / "lease" / "lease").symlink_to(elsewhere)
    lease = Lease(tmp_path / "lease")
    with pytest.raises(OSError, match=r"exists|symbolic links"):
        lease.acquire(lease.owner())
    assert link == "directory" or not elsewhere.exists()
    assert names(elsewhere) == []


def test_a_lease_whose_first_read_is_refused_is_read_again(
    held: tuple[Lease, HeldLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease of another user becomes readable a moment after it was created."""
    lease, mine = held
    real, refused = os.open, iter([PermissionError(errno.EACCES, "Permission denied")])

    def refusing(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).name == "lease" and (error := next(refused, None)) is not None:
            raise error
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    assert lease.owner() == mine.owner
    assert next(refused, None) is None


def test_leases_without_proc_expire_by_missing_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    for name, value in {"boot_id": "", "pid_namespace": 0, "process_start_time": -1}.items():
        monkeypatch.setattr(lease_module, name, lambda *_, value=value: value)
    monkeypatch.setattr(lease_module, "HEARTBEAT", 0.05)
    lease = Lease(tmp_path / "lease", duration=2)
    with acquire(lease) as held:
        stalls = StallDetector()
        for _ in range(30):
            assert not lease.is_expired(held.owner, stalls)
            time.sleep(0.1)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from rankfeed.storage.lease import Lease\n"
        "Lease(Path(sys.argv[1])).acquire(None)\n"
        "os._exit(0)\n"
    )
    run_python(code, tmp_path / "lease")
    dead = lease.owner()
    assert dead is not None
    assert not expires_after(lease, dead, 1)
    assert expires_after(lease, dead, 3)
