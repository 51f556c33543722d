"""Which process builds after lost replies and stopped processes, and on unusual file systems."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.jobs import run_python, until
from tests.support.prepared import CountedBuild, acquire, build, control, names

import rankfeed as rf
from rankfeed.errors import PrepareError
from rankfeed.prepare import marker
from rankfeed.prepare.build import BuildAttempt
from rankfeed.prepare.marker import MARKER_NAME, changed_files
from rankfeed.storage import lease as lease_module
from rankfeed.storage.lease import HeldLease, Lease, LeaseOwner


def test_a_builder_that_lost_its_lease_returns_the_new_build(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stalls longer than its lease lasts, and another process builds meanwhile."""
    monkeypatch.setattr(LeaseOwner, "is_local", False)
    monkeypatch.setattr(lease_module, "DURATION", 0.2)
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
        until(lambda: list(control(path).glob("build-*")))
        pool.submit(rf.prepare_once, path, second).result(30)
        go.set()
        assert paused.result(30) == path
    assert built == ["second", "first"]
    assert (path / "a.txt").read_text() == "second"


def test_a_damaged_lease_does_not_block_the_build(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "DURATION", 0.2)
    control(path).mkdir(parents=True)
    (control(path) / "lease").write_text("{")
    rf.prepare_once(path, build)
    assert changed_files(path) == []


def test_a_stopped_builder_on_this_host_keeps_its_lease(path: Path) -> None:
    code = (
        "import sys, time, rankfeed as rf\n"
        "def build(staging): print('on', flush=True); time.sleep(1); (staging / 'a').write_text('theirs')\n"
        "rf.prepare_once(sys.argv[1], build)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(PrepareError, match="after 1 s"):
            rf.prepare_once(path, build, timeout=1)
        other.send_signal(signal.SIGCONT)
        rf.prepare_once(path, build)
        other.wait(30)
    assert (path / "a").read_text() == "theirs"


#: Where a builder is killed, what it builds, and what is left of that.
KILLED = {
    "while it writes its failure": (
        "real = os.replace\n"
        "def replace(source, target):\n"
        "    if str(target).endswith('.failed'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(source, target)\n"
        "os.replace = replace\n",
        "lambda staging: 1 / 0",
        ["a.txt", "sub"],
    ),
    "when it has just committed": (
        "build.forget_failures = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n",
        "lambda staging: (staging / 'a').write_text('a')",
        ["a"],
    ),
}


@pytest.mark.parametrize("point", KILLED)
def test_the_next_call_removes_the_files_of_a_killed_builder(point: str, path: Path) -> None:
    kill, function, left = KILLED[point]
    code = f"import os, signal, sys\nfrom rankfeed.prepare import build, prepare_once\n{kill}"
    code += f"prepare_once(sys.argv[1], {function})\n"
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert list(control(path).iterdir())
    rf.prepare_once(path, build)
    assert not control(path).exists()
    assert names(path) == [MARKER_NAME, *left]


def test_a_prepared_directory_with_a_foreign_file_raises_instead_of_being_replaced(path: Path) -> None:
    rf.prepare_once(path, build, key="1")
    (path / "my-model.pt").write_text("weeks of work")
    with pytest.raises(PrepareError, match=r"prepare_once did not create[\s\S]*my-model.pt"):
        rf.prepare_once(path, build, key="2")
    os.truncate(path / "a.txt", 0)
    with pytest.raises(PrepareError, match=r"my-model.pt"):
        rf.prepare_once(path, build, key="1")
    assert (path / "my-model.pt").read_text() == "weeks of work"


def test_a_failed_build_of_another_key_is_not_raised(path: Path) -> None:
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
    assert changed_files(path) == []
    shutil.rmtree(control(path), ignore_errors=True)  # the other job's failure is kept for its late comers


def test_a_directory_committed_during_the_check_is_accepted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = marker.read_marker

    def slow(folder: Path) -> Any:
        result = real(folder)
        monkeypatch.setattr(marker, "read_marker", real)
        rf.prepare_once(path, build)  # by another caller, in between
        return result

    monkeypatch.setattr(marker, "read_marker", slow)
    assert rf.prepare_once(path, build) == path


@pytest.mark.parametrize(
    ("function", "error"),
    [("rankfeed.storage.lease.fsync_dir", KeyboardInterrupt), ("threading.Thread.start", RuntimeError)],
)
def test_an_interrupt_or_unstartable_thread_leaves_no_lease(function: str, error: Any, path: Path) -> None:
    def failing(*_: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, failing)
        with pytest.raises(error):
            rf.prepare_once(path, build)
    assert not control(path).exists()
    rf.prepare_once(path, build, timeout=5)


@pytest.mark.parametrize(
    ("end", "said"),
    [("sys.exit(0)", ""), ("return", "os._exit"), ("raise ValueError('in the child')", "in the child")],
)
def test_a_child_that_the_builder_forks_does_not_commit_or_report(end: str, said: str, path: Path) -> None:
    code = (
        "import os, sys, rankfeed as rf\n"
        "def build(staging):\n"
        "    print('building', flush=True)\n"
        "    (staging / 'a').write_text('a')\n"
        "    pid = os.fork()\n"
        f"    if pid == 0: {end}\n"
        "    os.waitpid(pid, 0)\n"
        "    (staging / 'b').write_text('b')\n"
        "rf.prepare_once(sys.argv[1], build, retries=1)\n"
        "print('built', flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "building\nbuilt\n"
    assert said in done.stderr
    assert names(path) == [MARKER_NAME, "a", "b"]
    assert changed_files(path) == []


def test_a_build_that_copies_a_prepared_directory_runs_once(path: Path, tmp_path: Path) -> None:
    rf.prepare_once(path, build)
    copy = CountedBuild(lambda staging: shutil.copytree(path, staging, dirs_exist_ok=True))
    for _ in range(2):
        rf.prepare_once(tmp_path / "copy", copy)
    assert copy.times == 1


@pytest.mark.parametrize("as_context", [False, True], ids=["function", "context"])
def test_of_twelve_concurrent_threads_one_builds(as_context: bool, path: Path) -> None:
    once, counted = rf.prepare_once(path), CountedBuild(seconds=0.2)

    def enter(_: int) -> Path:
        if not as_context:
            return rf.prepare_once(path, counted)
        with once as staging:
            if staging is not None:
                counted(staging)
        return path

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(enter, range(12))) == [path] * 12
    assert counted.times == 1
    assert changed_files(path) == []


def test_a_nested_preparation_of_the_same_directory_raises(path: Path) -> None:
    once = rf.prepare_once(path)
    with once as staging:
        assert staging is not None
        build(staging)
        with pytest.raises(PrepareError, match="deadlock: this thread"), once:
            pass
    assert changed_files(path) == []


def test_failed_and_replaced_builds_with_read_only_directories_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys, rankfeed as rf\n"
        "tries = []\n"
        "def build(staging):\n"
        "    tries.append(1)\n"
        "    (staging / 'sub').mkdir()\n"
        "    (staging / 'sub' / 'a').write_text('a')\n"
        "    (staging / 'sub').chmod(0o555)\n"
        "    if len(tries) < 3: raise ValueError('flaky')\n"
        # First as the user of the tests, to import what other users may not read.
        "rf.prepare_once(sys.argv[2], build, retries=2)\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "tries.clear()\n"
        "for key in '12': rf.prepare_once(sys.argv[1] + '/data', build, key=key, retries=2)\n"
        "print(sorted(os.listdir(sys.argv[1])))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        assert run_python(code, folder, tmp_path / "before") == "['data']\n"


def test_a_build_error_whose_str_raises_is_reported_by_its_class(path: Path) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    def fails(staging: Path) -> None:
        raise MuteError

    with pytest.raises(PrepareError, match="MuteError"):
        rf.prepare_once(path, fails)


def test_inputs_may_be_a_generator_and_another_path_is_another_key(path: Path, tmp_path: Path) -> None:
    counted = CountedBuild()
    for name in "fg":
        (tmp_path / name).write_text("same")
        os.utime(tmp_path / name, ns=(5, 5))
    prepared_twice = rf.prepare_once(path, inputs=(file for file in [tmp_path / "f"]))(counted)  # type: ignore[arg-type]
    prepared_twice()
    prepared_twice()
    assert counted.times == 1
    rf.prepare_once(path, counted, inputs=[tmp_path / "g"])
    assert counted.times == 2


def test_a_directory_name_of_255_characters_is_prepared(tmp_path: Path) -> None:
    long = tmp_path / ("n" * 255)
    assert rf.prepare_once(long, build) == long
    assert names(tmp_path) == [long.name]


@pytest.mark.parametrize("late", [False, True], ids=["before its successor sweeps", "after its successor swept"])
def test_a_builder_that_lost_its_lease_does_not_retry_or_change_the_new_build(path: Path, late: bool) -> None:
    path.parent.mkdir()
    lease_dir, lost, tried = Lease(control(path)), threading.Event(), Counter[str]()
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

    def run_first(lease: HeldLease) -> bool:
        starts.wait(30)
        return BuildAttempt(path, lease_dir.directory, "", lease).run(first, 1)

    with ThreadPoolExecutor(1) as pool, acquire(lease_dir) as lease:
        ours = pool.submit(run_first, lease)
        if not late:
            starts.set()
            assert begun.wait(30)
        with acquire(lease_dir, lease.owner) as next_lease:
            assert BuildAttempt(path, lease_dir.directory, "", next_lease).run(second, 0)
    assert tried == Counter({"first": 1})
    assert {"first half", "second half"} <= set(os.listdir(path))


@pytest.mark.parametrize("kept", ["in the function", "by the program"])
def test_a_builder_that_opens_too_many_files_raises_and_leaves_no_lease(path: Path, kept: str) -> None:
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
    said, left, name = run_python(code, path, kept, control(path)).splitlines()
    assert "Too many open files" in said
    assert left == "failed"
    assert name == path.name


def test_a_failure_is_raised_if_the_lease_cannot_be_listed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [name.rpartition(".")[2] for name in names(control(path))] == ["failed"]
    assert rf.prepare_once(path, build, timeout=5) == path


def test_an_undeletable_temporary_file_does_not_block_a_build(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_removed_lease_directory_is_created_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = os.mkdir, iter(range(2))

    def mkdir(folder: Any, *args: Any, **kwargs: Any) -> None:
        if Path(folder) == control(path) and next(times, None) is not None:
            raise FileExistsError(errno.EEXIST, "File exists", str(folder))
        real(folder, *args, **kwargs)

    path.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(os, "mkdir", mkdir)
    assert rf.prepare_once(path, build) == path


def test_a_missing_staging_directory_is_recorded_as_a_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh(_: BuildAttempt) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BuildAttempt, "new_staging_dir", fresh)
    with pytest.raises(PrepareError, match="No space left"), rf.prepare_once(path):
        pass
    assert [name.rpartition(".")[2] for name in names(control(path))] == ["failed"]


def test_a_lease_is_readable_for_the_group_that_may_read_its_directory(path: Path) -> None:
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


def test_a_lease_left_by_this_process_does_not_block_a_build(path: Path) -> None:
    control(path).mkdir(parents=True)
    (control(path) / "lease").write_bytes(msgspec.json.encode(LeaseOwner.current()))
    assert rf.prepare_once(path, build, timeout=5) == path
    assert not control(path).exists()
