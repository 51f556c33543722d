"""One process builds, all others get what it built: whole, or its error."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rankfeed as rf
from rankfeed.building.failure import BuilderTraceback
from rankfeed.building.holder import Holder, Watch
from rankfeed.building.lease import Leases
from rankfeed.building.prepared import MARKER_NAME, check
from rankfeed.errors import ArgumentError, PrepareError


def build(staging: Path) -> None:
    (staging / "sub").mkdir()
    (staging / "a.txt").write_text("a")
    (staging / "sub" / "b.txt").write_text("bb")


def control(path: Path) -> Path:
    return path.with_name(f".{path.name}.prepare")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "some" / "data"
    yield target
    assert not control(target).exists() or list(control(target).glob("*.failed")), list(control(target).iterdir())


def test_many_threads_at_once_build_once(path: Path) -> None:
    built: Counter[str] = Counter()

    def slow(staging: Path) -> None:
        built["times"] += 1
        time.sleep(0.2)
        build(staging)

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda _: rf.prepare_once(path, slow), range(12)))
    assert found == [path] * 12
    assert built == Counter({"times": 1})
    assert (path / "sub" / "b.txt").read_text() == "bb"
    assert check(path) == []


def test_another_key_replaces_what_is_there_and_open_files_stay_readable(path: Path) -> None:
    rf.prepare_once(path, build, key="1")
    with open(path / "a.txt") as held:
        rf.prepare_once(path, lambda staging: (staging / "a.txt").write_text("other"), key="2")
        assert held.read() == "a"
    assert (path / "a.txt").read_text() == "other"
    assert sorted(os.listdir(path)) == [MARKER_NAME, "a.txt"]


def test_changed_inputs_are_another_key(path: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "x").write_text("1")
    built: list[str] = []

    def copy(staging: Path) -> None:
        built.append((raw / "x").read_text())
        shutil.copy(raw / "x", staging)

    for text in ("1", "1", "22", "22"):
        if (raw / "x").read_text() != text:
            (raw / "x").write_text(text)
        rf.prepare_once(path, copy, inputs=[raw])
    assert built == ["1", "22"]


@pytest.mark.parametrize("harm", ["cut", "gone", "marker"])
def test_what_was_changed_afterwards_is_built_again(path: Path, harm: str) -> None:
    rf.prepare_once(path, build)
    if harm == "cut":
        os.truncate(path / "sub" / "b.txt", 1)
    elif harm == "gone":
        (path / "a.txt").unlink()
    else:
        marker = msgspec.json.decode((path / MARKER_NAME).read_bytes())
        (path / MARKER_NAME).write_bytes(msgspec.json.encode({**marker, "key": "x"}))
    rf.prepare_once(path, build)
    assert (path / "sub" / "b.txt").read_text() == "bb"
    assert check(path) == []


def test_changed_bytes_of_the_same_size_are_found_by_a_check(path: Path) -> None:
    rf.prepare_once(path, build)
    (path / "a.txt").write_text("b")
    assert check(path) == ["a.txt"]


def test_what_nobody_prepared_is_neither_believed_nor_removed(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "mine").write_text("1")
    with pytest.raises(PrepareError, match=r"nobody prepared[\s\S]*mine[\s\S]*another folder"):
        rf.prepare_once(path, build)
    assert (path / "mine").read_text() == "1"
    (path / "mine").unlink()
    rf.prepare_once(path, build)  # an empty folder is as good as none
    assert check(path) == []


def test_a_failing_build_is_tried_again_in_a_new_folder(path: Path) -> None:
    seen: list[list[str]] = []

    def flaky(staging: Path) -> None:
        seen.append(os.listdir(staging))
        (staging / "half").write_text("")
        if len(seen) < 3:
            raise ConnectionError("lost")
        build(staging)

    rf.prepare_once(path, flaky, retries=2)
    assert seen == [[], [], []]


def test_a_build_that_fails_for_good_fails_everybody_with_its_error(path: Path) -> None:
    built: Counter[str] = Counter()

    def fails(staging: Path) -> None:
        built["times"] += 1
        time.sleep(0.5)
        raise KeyError("no such column")

    def caught(_: int) -> PrepareError:
        with pytest.raises(PrepareError, match="KeyError: 'no such column'") as error:
            rf.prepare_once(path, fails)
        return error.value

    with ThreadPoolExecutor(6) as pool:
        errors = list(pool.map(caught, range(6)))
    assert built == Counter({"times": 1})
    assert len({str(error) for error in errors}) == 1
    causes = Counter(type(error.__cause__) for error in errors)
    assert causes == Counter({KeyError: 1, BuilderTraceback: 5})
    assert all("in fails" in str(e.__cause__) for e in errors if isinstance(e.__cause__, BuilderTraceback))
    assert not path.exists()
    assert not list(control(path).glob("build-*"))
    rf.prepare_once(path, build)  # another launch builds anew, and nothing is left
    assert not control(path).exists()


def test_late_comers_of_a_launch_get_its_error_without_building(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    code = (
        "import sys, rankfeed as rf\n"
        "def build(staging): print('building'); raise ValueError('broken')\n"
        "for _ in range(2):\n"
        "    try: rf.prepare_once(sys.argv[1], build)\n"
        "    except rf.errors.PrepareError as error: print(error.summary)\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_NODE")}
    told = [
        subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env={**clean, "SLURM_STEP_ID": step},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.splitlines()
        for step in ("0", "0", "1")
    ]
    failed = "preparing the data failed: ValueError: broken"
    # Each call is an attempt of its own; the second process comes late to both of them.
    assert told == [["building", failed] * 2, [failed] * 2, ["building", failed] * 2]


def test_a_killed_builder_is_replaced(path: Path) -> None:
    code = (
        "import sys, time, rankfeed as rf\n"
        "def build(staging): (staging / 'half').write_text(''); print('on', flush=True); time.sleep(60)\n"
        "rf.prepare_once(sys.argv[1], build)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(rf.prepare_once, path, build)
            time.sleep(0.3)
            assert not waiting.done()
            other.kill()  # and not waited for: only its remains are there
            assert waiting.result(30) == path
    assert check(path) == []


def test_a_wait_that_is_too_long_names_the_builder(path: Path) -> None:
    go = threading.Event()

    def waits(staging: Path) -> None:
        (staging / "half").write_text("12345")
        go.wait(30)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rf.prepare_once, path, waits)
        while not list(control(path).glob("build-*/half")):
            time.sleep(0.01)
        try:
            with pytest.raises(PrepareError, match=rf"within 0.2 s[\s\S]*process {os.getpid()} on [\s\S]*1 files"):
                rf.prepare_once(path, build, timeout=0.2)
        finally:
            go.set()
        first.result(30)


def test_who_waits_long_says_for_whom(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankfeed.building.patience._PATIENCE", 0.1)

    def slow(staging: Path) -> None:
        time.sleep(0.8)
        build(staging)

    with caplog.at_level(logging.WARNING, "rankfeed"), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: rf.prepare_once(path, slow), range(2)))
    assert f"process {os.getpid()} on" in caplog.text
    assert str(path) in caplog.text


def test_as_a_context_manager(path: Path) -> None:
    with rf.prepare_once(path) as staging:
        assert staging is not None
        build(staging)
    with rf.prepare_once(path) as staging:
        assert staging is None
    with pytest.raises(PrepareError, match="ZeroDivisionError"), rf.prepare_once(path, key="2") as staging:
        1 / 0  # noqa: B018
    assert check(path) == []  # what was there before is there still


def test_as_a_decorator(path: Path) -> None:
    @rf.prepare_once(path, key="7")
    def corpus(staging: Path) -> None:
        """A corpus."""
        build(staging)

    assert (corpus(), corpus.__name__, corpus.__doc__) == (path, "corpus", "A corpus.")


def test_an_interrupted_build_leaves_nothing(path: Path) -> None:
    def interrupted(staging: Path) -> None:
        build(staging)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rf.prepare_once(path, interrupted)
    assert not path.exists()
    assert not control(path).exists()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda staging: None, "wrote nothing"),
        (lambda staging: os.mkfifo(staging / "pipe"), "no file"),
        (lambda staging: open(os.fsencode(staging) + b"/\xff", "w").close(), "no UTF-8"),
    ],
)
def test_builds_that_cannot_be_kept(path: Path, make: Any, said: str) -> None:
    with pytest.raises(PrepareError, match=said):
        rf.prepare_once(path, make)
    assert not path.exists()


def test_links_stay_links(path: Path) -> None:
    def linked(staging: Path) -> None:
        build(staging)
        (staging / "link").symlink_to("a.txt")
        (staging / "folder").symlink_to("sub")

    rf.prepare_once(path, linked)
    assert (path / "folder" / "b.txt").read_text() == "bb"
    assert check(path) == []


@pytest.mark.parametrize(
    "options",
    [
        {"path": ""},
        {"path": "/"},
        {"path": "s3://bucket/data"},
        {"path": 5},
        {"scope": "world"},
        {"retries": -1},
        {"retries": 1.5},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"key": 5},
        {"inputs": "raw"},
    ],
)
def test_arguments_that_cannot_be_meant(options: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"path": tmp_path / "data", **options}
    with pytest.raises((ArgumentError, rf.errors.PlanError)):
        rf.prepare_once(build=build, **arguments)


def test_a_missing_input_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="absent"):
        rf.prepare_once(path, build, inputs=[tmp_path / "absent"])


# Leases


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
        "turn.forget_failures = lambda folder: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare_once(sys.argv[1], lambda staging: (staging / 'a').write_text('a'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert list(control(path).iterdir())
    rf.prepare_once(path, build)
    assert not control(path).exists()
    assert (path / "a").read_text() == "a"
