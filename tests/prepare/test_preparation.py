"""One process builds, all others get its complete directory, or its error."""

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.environ import of_no_launcher
from tests.support.jobs import until
from tests.support.marks import slow
from tests.support.prepared import CountedBuild, build, control

import rankfeed as rf
from rankfeed._util.remote_traceback import RemoteTraceback
from rankfeed.errors import ArgumentError, PrepareError
from rankfeed.prepare.build import BuildAttempt, raise_failure
from rankfeed.prepare.marker import MARKER_NAME, changed_files, key_with_inputs
from rankfeed.prepare.wait import WaitReporter
from rankfeed.storage import lease
from rankfeed.storage.failure import Failure, write_failure
from rankfeed.storage.lease import LeaseOwner


def test_another_key_replaces_the_directory_and_open_files_stay_readable(path: Path) -> None:
    rf.prepare_once(path, build, key="1")
    with open(path / "a.txt") as held:
        rf.prepare_once(path, lambda staging: (staging / "a.txt").write_text("other"), key="2")
        assert held.read() == "a"
    assert (path / "a.txt").read_text() == "other"
    assert sorted(os.listdir(path)) == [MARKER_NAME, "a.txt"]


def test_changed_inputs_cause_a_new_build(path: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    copy = CountedBuild(lambda staging: shutil.copy(raw / "x", staging))
    for text, times in (("1", 1), ("22", 2)):
        (raw / "x").write_text(text)
        for _ in range(2):
            rf.prepare_once(path, copy, inputs=[raw])
        assert ((path / "x").read_text(), copy.times) == (text, times)


def test_the_key_of_inputs_follows_linked_directories_but_no_cycles(tmp_path: Path) -> None:
    raw, images = tmp_path / "raw", tmp_path / "images"
    raw.mkdir()
    images.mkdir()
    (raw / "x").write_text("1")
    (images / "y").write_text("1")
    (raw / "images").symlink_to(images)
    (images / "back").symlink_to(raw)
    raw.joinpath("all").symlink_to(tmp_path)
    keys = [key_with_inputs("", [raw]), key_with_inputs("", [raw])]
    (images / "y").write_text("22")
    keys.append(key_with_inputs("", [raw]))
    assert Counter(keys) == Counter({keys[0]: 2, keys[2]: 1})


@pytest.mark.parametrize("change", ["truncated file", "deleted file", "marker"])
def test_a_directory_with_a_changed_file_or_marker_is_built_again(path: Path, change: str) -> None:
    rf.prepare_once(path, build)
    if change == "truncated file":
        os.truncate(path / "sub" / "b.txt", 1)
    elif change == "deleted file":
        (path / "a.txt").unlink()
    else:
        marker = msgspec.json.decode((path / MARKER_NAME).read_bytes())
        (path / MARKER_NAME).write_bytes(msgspec.json.encode({**marker, "key": "x"}))
    rf.prepare_once(path, build)
    assert (path / "sub" / "b.txt").read_text() == "bb"
    assert changed_files(path) == []


def test_changed_files_lists_a_file_with_other_bytes_of_the_same_size(path: Path) -> None:
    rf.prepare_once(path, build)
    (path / "a.txt").write_text("b")
    assert changed_files(path) == ["a.txt"]


def test_a_directory_that_was_not_prepared_raises_unless_it_is_empty(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "mine").write_text("1")
    with pytest.raises(PrepareError, match=r"prepare_once did not create[\s\S]*mine[\s\S]*another directory"):
        rf.prepare_once(path, build)
    assert (path / "mine").read_text() == "1"
    (path / "mine").unlink()
    rf.prepare_once(path, build)  # an empty folder is as good as none
    assert changed_files(path) == []


def test_each_retry_of_a_build_starts_in_an_empty_directory(path: Path) -> None:
    seen: list[list[str]] = []

    def flaky(staging: Path) -> None:
        seen.append(os.listdir(staging))
        (staging / "half").write_text("")
        if len(seen) < 3:
            raise ConnectionError("lost")
        build(staging)

    rf.prepare_once(path, flaky, retries=2)
    assert seen == [[], [], []]


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyError("x"), "KeyError: 'x'"), (SystemExit(7), "SystemExit: 7"), (SystemExit(0), "SystemExit: 0")],
    ids=str,
)
def test_a_failed_build_is_an_error_in_all_waiting_threads(error: BaseException, said: str, path: Path) -> None:
    def fails(staging: Path) -> None:
        raise error

    counted = CountedBuild(fails, seconds=0.5)

    def caught(_: int) -> PrepareError:
        with pytest.raises(PrepareError, match=said) as caught:
            rf.prepare_once(path, counted)
        return caught.value

    with ThreadPoolExecutor(6) as pool:
        errors = list(pool.map(caught, range(6)))
    assert counted.times == 1
    assert len({str(error) for error in errors}) == 1
    causes = [error.__cause__ for error in errors]
    assert Counter(map(type, causes)) == Counter({type(error): 1, RemoteTraceback: 5})
    assert all("in fails" in str(cause) for cause in causes if isinstance(cause, RemoteTraceback))
    assert not path.exists()
    assert not list(control(path).glob("build-*"))
    with pytest.raises(PrepareError, match=said), rf.prepare_once(path):
        raise error
    rf.prepare_once(path, build)  # another launch builds again, and nothing is left
    assert not control(path).exists()


def test_a_child_forked_in_the_body_of_prepare_once_can_exit(path: Path) -> None:
    try:
        with rf.prepare_once(path) as staging:
            assert staging is not None
            build(staging)
            pid = os.fork()
            if pid == 0:
                sys.exit(4)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    except BaseException as error:
        if pid == 0:
            os._exit(error.code if isinstance(error, SystemExit) else 1)
        raise
    assert changed_files(path) == []


LAUNCHED = """\
import sys, time, rankfeed as rf
ahead, true = float(sys.argv[2]), time.time
time.time = lambda: true() + ahead
def build(staging): print('building', flush=True); raise ValueError('broken')
print('on', flush=True)
sys.stdin.readline()
for _ in range(2):
    try: rf.prepare_once(sys.argv[1], build)
    except rf.errors.PrepareError as error: print(error.summary, flush=True)
"""
STEP = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
ADDRESS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "5000"}
#: As of `torchrun --rdzv-id=nightly`, of which there is a launch every night.
NIGHTLY = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
NIGHTLY |= {"TORCHELASTIC_RUN_ID": "nightly", "TORCHELASTIC_RESTART_COUNT": "0"}
Started = tuple[dict[str, str], int, bool]
# case: processes that start together, and those that start when all is over: variables, seconds that the clock is
# ahead, whether the process builds
LAUNCHES: dict[str, tuple[list[Started], list[Started]]] = {
    "Slurm steps": (
        [(STEP, 0, True), (STEP, 0, False), ({**STEP, "SLURM_STEP_ID": "1"}, 0, True)],
        [(STEP, 0, True)],
    ),
    "a rank and an address": (
        [(ADDRESS, 0, True), ({**ADDRESS, "RANK": "1"}, 0, False), ({**ADDRESS, "MASTER_PORT": "5001"}, 0, True)],
        [],
    ),
    "clocks ahead": ([(NIGHTLY, 3600, True), (NIGHTLY, 0, False)], [(NIGHTLY, 0, True)]),
    "clocks behind": ([(NIGHTLY, 0, True), (NIGHTLY, 3600, False)], [(NIGHTLY, 3600, True)]),
    "clocks apart": ([(NIGHTLY, -3600, True), (NIGHTLY, 3600, False)], [(NIGHTLY, 3600, True)]),
}


@pytest.mark.parametrize(
    "case", [slow(case) if case in ("clocks behind", "clocks apart") else case for case in LAUNCHES]
)
def test_late_processes_of_a_launch_get_its_error_and_those_of_another_launch_build(case: str, path: Path) -> None:
    def start(variables: dict[str, str], ahead: int, _: bool) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHED, str(path), str(ahead)],
            env={**of_no_launcher(), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        return process

    failed = "preparing the data failed: ValueError: broken"
    for launched in LAUNCHES[case]:
        processes = [start(*process) for process in launched]
        # Each call is an attempt of its own; a late process comes late to both of them.
        for process, (_, _, builds) in zip(processes, launched, strict=True):
            said = process.communicate("\n", timeout=60)[0].splitlines()
            assert said == (["building"] * builds + [failed]) * 2


@pytest.mark.parametrize(
    ("job", "raises"),
    [("node1:5000", True), ("", True), ("on host1 parent 7 8 0", True), ("node1:5001", False)],
    ids=["same job", "unknown job", "job of this host", "another job"],
)
def test_a_waiting_process_raises_the_failure_of_a_build_unless_it_is_of_another_job(
    job: str, raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = "0123456789abcdef"
    monkeypatch.setattr("rankfeed.storage.failure.job_id", lambda: "node1:5000")
    failure = Failure.of(ValueError("full"), "process 1 on host1", tmp_path, "key", "parent 1 2 0 1")
    write_failure(tmp_path, holder, failure)
    monkeypatch.setattr("rankfeed.prepare.build.job_id", lambda: job)
    with pytest.raises(PrepareError, match="full") if raises else nullcontext():
        raise_failure(tmp_path, {holder}, "parent 7 8 0 1", "key")


def test_a_build_after_a_lost_lease_is_the_same_attempt(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    attempts: Counter[str] = Counter()
    real = BuildAttempt.run

    def lost_at_first(turn: BuildAttempt, *arguments: Any) -> bool:
        attempts[turn.attempt] += 1
        return attempts.total() > 1 and real(turn, *arguments)

    monkeypatch.setattr(BuildAttempt, "run", lost_at_first)
    rf.prepare_once(path, build)
    assert list(attempts.values()) == [2]


FAILING_RANK = """
import sys, time
from pathlib import Path
import rankfeed as rf
from rankfeed.prepare.wait import WaitReporter

waiting, wait = Path(sys.argv[3]), WaitReporter.wait

def note_and_wait(*arguments):
    (waiting / sys.argv[4]).touch()
    wait(*arguments)

def build(staging):
    with open(sys.argv[2], "a") as builds:
        builds.write("1")
    while len(list(waiting.iterdir())) < 2:
        time.sleep(0.05)
    raise ValueError("no data")

WaitReporter.wait = note_and_wait
try:
    rf.prepare_once(sys.argv[1], build)
except rf.errors.PrepareError as error:
    assert "no data" in str(error)
    print("failed")
"""


def test_ranks_that_are_each_started_by_a_shell_get_the_error_of_one_build(path: Path, tmp_path: Path) -> None:
    (waiting := tmp_path / "waiting").mkdir()
    builds = tmp_path / "builds"
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", FAILING_RANK, path, builds, waiting]
    ranks = []
    for rank in map(str, range(3)):
        environ = os.environ | {"PMI_RANK": rank, "PMI_SIZE": "3"}
        ranks.append(subprocess.Popen([*command, rank], env=environ, stdout=subprocess.PIPE, text=True))
    assert [rank.communicate(timeout=100)[0] for rank in ranks] == ["failed\n"] * 3
    assert builds.read_text() == "1"


def test_a_wait_that_times_out_raises_and_names_the_builder(path: Path) -> None:
    go = threading.Event()

    def waits(staging: Path) -> None:
        (staging / "half").write_text("12345")
        go.wait(30)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rf.prepare_once, path, waits)
        until(lambda: list(control(path).glob("build-*/half")))
        try:
            with pytest.raises(PrepareError, match=rf"after 0.2 s[\s\S]*process {os.getpid()} on [\s\S]*1 files"):
                rf.prepare_once(path, build, timeout=0.2)
        finally:
            go.set()
        first.result(30)


def test_a_waiting_process_logs_the_builder_and_the_directory(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankfeed.prepare.wait._FIRST_REPORT", 0.1)
    with caplog.at_level(logging.WARNING, "rankfeed"), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: rf.prepare_once(path, CountedBuild(seconds=0.8)), range(2)))
    assert f"process {os.getpid()} on" in caplog.text
    assert str(path) in caplog.text


@pytest.mark.parametrize(("builder", "reporters"), [(0, [1]), (2, [0]), (-1, [0])])
def test_only_one_waiting_rank_of_a_node_logs(
    builder: int, reporters: list[int], path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("rankfeed.prepare.wait._FIRST_REPORT", 0.0)
    owner = LeaseOwner.current(local_rank=builder)
    with caplog.at_level(logging.WARNING, "rankfeed"):
        for rank in range(4):
            topology = rf.Topology(rank=rank, world_size=4, local_rank=rank, local_world_size=4)
            monkeypatch.setattr(rf.Topology, "detect", lambda topology=topology: topology)
            if rank != builder:
                WaitReporter(path, None).wait(owner, control(path))
    assert [int(line.message.split()[1]) for line in caplog.records] == reporters


def test_without_proc_one_thread_replaces_a_killed_builder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: no /proc, no boot id, no PID namespace."""
    for name, value in {"boot_id": "", "pid_namespace": 0, "process_start_time": -1}.items():
        monkeypatch.setattr(lease, name, lambda *_, value=value: value)
    monkeypatch.setattr(lease, "DURATION", 1.0)
    code = (
        "import os, sys, rankfeed as rf\n"
        "from rankfeed.storage import lease\n"
        "lease.boot_id, lease.pid_namespace, lease.process_start_time = lambda: '', lambda: 0, lambda pid: -1\n"
        "rf.prepare_once(sys.argv[1], lambda staging: os._exit(9))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=600).returncode == 9
    counted = CountedBuild()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: rf.prepare_once(path, counted), range(4)))
    assert counted.times == 1
    assert changed_files(path) == []


def test_prepare_once_as_a_context_manager_builds_once_and_raises_errors_of_its_body(path: Path) -> None:
    with rf.prepare_once(path) as staging:
        assert staging is not None
        build(staging)
    with rf.prepare_once(path) as staging:
        assert staging is None
    with pytest.raises(PrepareError, match="ZeroDivisionError"), rf.prepare_once(path, key="2") as staging:
        1 / 0  # noqa: B018
    assert changed_files(path) == []  # what was there before is there still


def test_prepare_once_as_a_decorator_returns_the_path(path: Path) -> None:
    @rf.prepare_once(path, key="7")
    def corpus(staging: Path) -> None:
        """A corpus."""
        build(staging)

    assert (corpus(), corpus.__name__, corpus.__doc__) == (path, "corpus", "A corpus.")


def test_an_interrupted_build_raises_and_leaves_no_files(path: Path) -> None:
    def interrupted(staging: Path) -> None:
        build(staging)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rf.prepare_once(path, interrupted)
    with pytest.raises(KeyboardInterrupt), rf.prepare_once(path) as staging:
        interrupted(staging)  # type: ignore[arg-type]
    assert not path.exists()
    assert not control(path).exists()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda staging: None, "produced no files"),
        (lambda staging: os.mkfifo(staging / "pipe"), "something other than files"),
        (lambda staging: open(os.fsencode(staging) + b"/\xff", "w").close(), "not valid UTF-8"),
    ],
)
def test_a_build_without_files_or_with_special_files_or_names_raises(path: Path, make: Any, said: str) -> None:
    with pytest.raises(PrepareError, match=said):
        rf.prepare_once(path, make)
    assert not path.exists()


def test_a_prepared_directory_may_contain_symbolic_links(path: Path) -> None:
    def linked(staging: Path) -> None:
        build(staging)
        (staging / "link").symlink_to("a.txt")
        (staging / "folder").symlink_to("sub")

    rf.prepare_once(path, linked)
    assert (path / "folder" / "b.txt").read_text() == "bb"
    assert changed_files(path) == []


@pytest.mark.parametrize(
    "options",
    [
        *({"path": ""}, {"path": "/"}, {"path": "s3://bucket/data"}, {"path": 5}, {"scope": "world"}),
        *({"retries": -1}, {"retries": 1.5}, {"timeout": -1}, {"timeout": float("nan")}, {"key": 5}),
        *({"key": "\udcff"}, {"key": "two\nlines"}, {"timeout": "5"}, {"inputs": "raw"}),
    ],
)
def test_invalid_arguments_of_prepare_once_raise(options: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"path": tmp_path / "data", **options}
    with pytest.raises((ArgumentError, rf.errors.PlanError)):
        rf.prepare_once(build=build, **arguments)


def test_a_missing_input_raises_and_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="absent"):
        rf.prepare_once(path, build, inputs=[tmp_path / "absent"])


def test_the_key_of_inputs_ignores_a_cached_stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "raw"
    raw.write_text("1")
    os.mkfifo(tmp_path / "pipe")  # is not opened
    seen = os.stat(raw)
    raw.write_text("22")
    right = key_with_inputs("", [raw, tmp_path / "pipe"])
    real = os.stat

    def cached(file: Any, **options: Any) -> os.stat_result:
        return seen if file == raw else real(file, **options)

    monkeypatch.setattr(os, "stat", cached)
    assert key_with_inputs("", [raw, tmp_path / "pipe"]) == right
