"""Who builds, when all goes wrong that can: lost answers, stopped processes, odd file systems, others' files."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.prepared import build, control

import rankfeed as rf
from rankfeed.building import prepared
from rankfeed.building.holder import Holder, Watch
from rankfeed.building.lease import Lease, Leases
from rankfeed.building.prepared import check
from rankfeed.building.turn import Turn
from rankfeed.errors import PrepareError


def test_a_holder_on_another_host_lives_as_long_as_it_renews(tmp_path: Path) -> None:
    leases = Leases(tmp_path, stale=0.3)
    far = Holder("x", "elsewhere", "boot", 1, 2, 3, True, "", "", 0.0)
    alive, watch = tmp_path / "x.alive", Watch()
    for sign in range(6):
        alive.touch()
        os.utime(alive, ns=(sign, sign))  # by a clock that stands in 1970
        assert not leases.is_dead(far, watch)
        time.sleep(0.1)
    time.sleep(0.3)
    assert leases.is_dead(far, watch)


def test_whoever_was_taken_for_dead_gives_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that was stopped for long finds another in its place, and takes what that one built."""
    monkeypatch.setattr(Holder, "is_visible", False)
    monkeypatch.setattr(Holder, "is_of_this_host", False)
    monkeypatch.setattr("rankfeed.building.prepare.Leases", lambda folder: Leases(folder, stale=0.2))
    go, built = threading.Event(), []

    def first(staging: Path) -> None:
        go.wait(30)
        built.append("first")
        staging.mkdir(exist_ok=True)
        (staging / "a.txt").write_text("first")

    def second(staging: Path) -> None:
        built.append("second")
        (staging / "a.txt").write_text("second")

    with ThreadPoolExecutor(2) as pool:
        paused = pool.submit(rf.prepare_once, path, first)
        while not list(control(path).glob("build-*")):
            time.sleep(0.01)
        pool.submit(rf.prepare_once, path, second).result(30)
        go.set()
        assert paused.result(30) == path
    assert built == ["second", "first"]
    assert (path / "a.txt").read_text() == "second"


def test_two_that_find_the_same_one_dead_do_not_both_succeed_it(tmp_path: Path) -> None:
    leases = Leases(tmp_path / "leases")
    with leases.claimed(None, "", "") as dead:
        assert dead is not None
        start = threading.Barrier(8)

        def claim(_: int) -> bool:
            start.wait(10)
            with leases.claimed(dead.me, "", "") as lease:
                start.wait(10)
                return lease is not None

        with ThreadPoolExecutor(8) as pool:
            assert Counter(pool.map(claim, range(8))) == Counter({False: 7, True: 1})


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_file_systems_without_hard_links(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def link(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: rf.prepare_once(path, build), range(4)))
    assert check(path) == []


def test_a_damaged_lease_is_waited_for_and_then_passed_by(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankfeed.building.prepare.Leases", lambda folder: Leases(folder, stale=0.2))
    control(path).mkdir(parents=True)
    (control(path) / "lease").write_text("{")
    rf.prepare_once(path, build)
    assert check(path) == []


def test_a_stopped_process_on_this_host_is_not_taken_for_dead(path: Path) -> None:
    code = (
        "import sys, time, rankfeed as rf\n"
        "def build(staging): print('on', flush=True); time.sleep(1); (staging / 'a').write_text('theirs')\n"
        "rf.prepare_once(sys.argv[1], build)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(PrepareError, match="within 1 s"):
            rf.prepare_once(path, build, timeout=1)
        other.send_signal(signal.SIGCONT)
        rf.prepare_once(path, build)
        other.wait(30)
    assert (path / "a").read_text() == "theirs"


def test_a_builder_that_is_killed_when_it_has_just_committed_is_tidied_up_after(path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from rankfeed.building import prepare_once, turn\n"
        "turn.forget_failures = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare_once(sys.argv[1], lambda staging: (staging / 'a').write_text('a'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert list(control(path).iterdir())
    rf.prepare_once(path, build)
    assert not control(path).exists()
    assert (path / "a").read_text() == "a"


def test_what_others_put_into_a_prepared_folder_is_not_removed_with_it(path: Path) -> None:
    rf.prepare_once(path, build, key="1")
    (path / "my-model.pt").write_text("weeks of work")
    with pytest.raises(PrepareError, match=r"nobody prepared[\s\S]*my-model.pt"):
        rf.prepare_once(path, build, key="2")
    os.truncate(path / "a.txt", 0)
    with pytest.raises(PrepareError, match=r"my-model.pt"):
        rf.prepare_once(path, build, key="1")
    assert (path / "my-model.pt").read_text() == "weeks of work"


def test_the_failure_of_a_job_with_another_key_is_not_ours(path: Path) -> None:
    building = threading.Event()

    def fails(staging: Path) -> None:
        building.set()
        time.sleep(0.4)
        raise ValueError("of another job")

    with ThreadPoolExecutor(2) as pool:
        theirs = pool.submit(rf.prepare_once, path, fails, key="1")
        building.wait(10)
        assert pool.submit(rf.prepare_once, path, build, key="2").result(30) == path
        assert isinstance(theirs.exception(10), PrepareError)
    assert check(path) == []
    shutil.rmtree(control(path), ignore_errors=True)  # the other job's failure is kept for its late comers


def test_a_commit_in_the_middle_of_a_look_is_no_foreign_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, times = prepared.read_marker, Counter[str]()

    def slow(folder: Path) -> Any:
        found = real(folder)
        times["looks"] += 1
        if times["looks"] == 1:
            monkeypatch.setattr(prepared, "read_marker", real)
            rf.prepare_once(path, build)  # by somebody else, in between
        return found

    monkeypatch.setattr(prepared, "read_marker", slow)
    assert rf.prepare_once(path, build) == path


def test_signs_of_life_are_seen_by_file_systems_that_count_seconds(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signs: set[int] = set()
    real = os.utime
    monkeypatch.setattr("rankfeed.building.lease.RENEWED", 0.05)

    def utime(file: Any, times: Any = None, *, ns: tuple[int, int] | None = None) -> None:
        if ns is None:
            return real(file, times)
        signs.add(ns[1] // 2_000_000_000)
        return real(file, ns=ns)

    monkeypatch.setattr(os, "utime", utime)
    rf.prepare_once(path, lambda staging: (build(staging), time.sleep(0.5)))
    assert len(signs) > 3


def test_an_interrupt_or_a_want_of_threads_leaves_no_lease(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for name, raising in {
        "rankfeed.building.lease.make_durable": interrupted,
        "threading.Thread.start": no_thread,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(name, raising)
            with pytest.raises((KeyboardInterrupt, RuntimeError)):
                rf.prepare_once(path, build)
        assert not control(path).exists()
    rf.prepare_once(path, build, timeout=5)


def test_a_link_whose_answer_was_lost_was_made_nevertheless(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def lost(source: Any, target: Any) -> None:
        real(source, target)
        raise FileExistsError

    monkeypatch.setattr(os, "link", lost)
    assert rf.prepare_once(path, build, timeout=5) == path


def test_a_child_that_the_builder_forks_ends_nothing_of_its_parent(path: Path) -> None:
    code = (
        "import os, sys, rankfeed as rf\n"
        "def build(staging):\n"
        "    print('building', flush=True)\n"
        "    pid = os.fork()\n"
        "    if pid == 0: sys.exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "    (staging / 'a').write_text('a')\n"
        "rf.prepare_once(sys.argv[1], build)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "building\n"
    assert check(path) == []


@pytest.mark.parametrize("end", ["return", "raise ValueError('in the child')"])
def test_a_child_that_comes_out_of_the_build_commits_and_tells_nothing(end: str, path: Path) -> None:
    code = (
        "import os, sys, rankfeed as rf\n"
        "def build(staging):\n"
        "    (staging / 'a').write_text('a')\n"
        "    pid = os.fork()\n"
        f"    if pid == 0: {end}\n"
        "    os.waitpid(pid, 0)\n"
        "    (staging / 'b').write_text('b')\n"
        "rf.prepare_once(sys.argv[1], build)\n"
        "print('built', flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "built\n"
    assert ("in the child" if "raise" in end else "os._exit") in done.stderr
    assert sorted(each.name for each in path.iterdir() if each.suffix != ".json") == ["a", "b"]
    assert check(path) == []


def test_a_copy_of_a_prepared_folder_is_built_once(path: Path, tmp_path: Path) -> None:
    rf.prepare_once(path, build)
    built: Counter[str] = Counter()

    def copy(staging: Path) -> None:
        built["times"] += 1
        shutil.copytree(path, staging, dirs_exist_ok=True)

    for _ in range(2):
        rf.prepare_once(tmp_path / "copy", copy)
    assert built == Counter({"times": 1})


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_file_systems_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: rf.prepare_once(path, build), range(4)))
    assert check(path) == []


def test_one_preparation_entered_by_many_threads_and_by_itself(path: Path) -> None:
    once, built = rf.prepare_once(path), Counter[str]()

    def enter(_: int) -> None:
        with once as staging:
            if staging is not None:
                built["times"] += 1
                time.sleep(0.2)
                build(staging)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(enter, range(6)))
    assert built == Counter({"times": 1})
    again = rf.prepare_once(path, key="2")
    with again as staging:
        assert staging is not None
        build(staging)
        with pytest.raises(PrepareError, match="this very thread"), again:
            pass
    assert check(path) == []


def test_an_interrupted_body_leaves_nothing(path: Path) -> None:
    once = rf.prepare_once(path)
    staging = once.__enter__()
    assert staging is not None
    build(staging)
    once.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not path.exists()


def test_read_only_folders_are_removed_too(tmp_path: Path) -> None:
    code = (
        "import os, sys, rankfeed as rf\n"
        "tries = []\n"
        "def build(staging):\n"
        "    tries.append(1)\n"
        "    (staging / 'sub').mkdir()\n"
        "    (staging / 'sub' / 'a').write_text('a')\n"
        "    (staging / 'sub').chmod(0o555)\n"
        "    if len(tries) < 3: raise ValueError('flaky')\n"
        # Once as whoever runs the tests, so that all is imported that others may not read.
        "rf.prepare_once(sys.argv[2], build, retries=2)\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "tries.clear()\n"
        "for key in '12': rf.prepare_once(sys.argv[1] + '/data', build, key=key, retries=2)\n"
        "print(sorted(os.listdir(sys.argv[1])))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        command = [sys.executable, "-c", code, folder, str(tmp_path / "before")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "['data']\n", done.stderr


def test_an_exception_without_a_message_of_its_own_is_told(path: Path) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    def fails(staging: Path) -> None:
        raise MuteError

    with pytest.raises(PrepareError, match="MuteError"):
        rf.prepare_once(path, fails)


def test_inputs_of_any_kind(path: Path, tmp_path: Path) -> None:
    built: list[str] = []

    def note(staging: Path) -> None:
        built.append("once")
        build(staging)

    for name in "fg":
        (tmp_path / name).write_text("same")
        os.utime(tmp_path / name, ns=(5, 5))
    prepared_twice = rf.prepare_once(path, inputs=(each for each in [tmp_path / "f"]))(note)  # type: ignore[arg-type]
    prepared_twice()
    prepared_twice()
    assert built == ["once"]
    rf.prepare_once(path, note, inputs=[tmp_path / "g"])
    assert built == ["once"] * 2


def test_long_names(tmp_path: Path) -> None:
    long = tmp_path / ("n" * 255)
    assert rf.prepare_once(long, build) == long
    assert [each.name for each in tmp_path.iterdir()] == [long.name]


@pytest.mark.parametrize("late", [False, True], ids=["before its successor sweeps", "after its successor swept"])
def test_a_lost_builder_that_tries_again_leaves_its_successors_build_alone(path: Path, late: bool) -> None:
    leases, lost, tried = Leases(control(path)), threading.Event(), Counter[str]()
    starts, begun = threading.Event(), threading.Event()

    def first(staging: Path) -> None:
        tried["first"] += 1
        begun.set()
        lost.wait(30)
        raise ValueError("flaky")

    def second(staging: Path) -> None:
        (staging / "first half").touch()
        starts.set()
        assert begun.wait(30)
        lost.set()
        assert ours.result(30) is False
        staging.mkdir(exist_ok=True)  # as builders do that make the folders of each file
        (staging / "second half").touch()

    def run_first(lease: Lease) -> bool:
        starts.wait(30)
        return Turn(path, leases.folder, "", lease).run(first, 1)

    with ThreadPoolExecutor(1) as pool, leases.claimed(None, "", "") as lease:
        assert lease is not None
        ours = pool.submit(run_first, lease)
        if not late:
            starts.set()
            assert begun.wait(30)
        with leases.claimed(lease.me, "", "") as next_lease:
            assert next_lease is not None
            assert Turn(path, leases.folder, "", next_lease).run(second, 0)
    assert tried == Counter({"first": 1})
    assert {"first half", "second half"} <= set(os.listdir(path))


@pytest.mark.parametrize("seen", [False, True], ids=["lost before", "stopped after the look at the lease"])
def test_only_builds_of_the_dead_are_swept(tmp_path: Path, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    leases = Leases(control(path))
    with leases.claimed(None, "", "") as lease, leases.claimed(lease and lease.me, "", "") as next_lease:
        assert lease is not None
        assert next_lease is not None
        turn, successor = (Turn(path, leases.folder, "", each) for each in (lease, next_lease))
        theirs = []
        if seen:
            monkeypatch.setattr(lease, "held", lambda: not theirs.append(successor.fresh()))
        else:
            theirs.append(successor.fresh())
        turn.fresh()
        assert [build.is_dir() for build in theirs] == [True]
