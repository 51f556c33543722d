"""A write that is killed leaves nothing that opens, and continues to the same bytes."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.values import contents

import rankfeed as rf
from rankfeed.errors import SourceError, WriteError
from rankfeed.storage.lease import Lease, LeaseOwner
from rankfeed.writer import staging as staging_module

#: The module; its name in the package is the function's.
coordinator_module = import_module("rankfeed.writer.coordinator")
ROWS = 3000
SCRIPT = f"""
import sys, numpy as np, rankfeed as rf
def rows():
    for i in range({ROWS}):
        yield {{"x": np.full(3 if i < 2000 else i % 5, i, np.int32), "name": f"row {{i}}"}}
given = rf.open(sys.argv[1]) if sys.argv[1] != "rows" else rows()
print("go", flush=True)
rf.write(given, sys.argv[2], shard_bytes=1500, workers=int(sys.argv[3]), progress=False)
"""


def rows() -> list[dict[str, object]]:
    return [{"x": np.full(3 if i < 2000 else i % 5, i, np.int32), "name": f"row {i}"} for i in range(ROWS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    source = rf.write(rows(), folder / "rows", shard_bytes=1500, progress=False)
    rf.write(source, folder / "source", shard_bytes=1500, workers=0, progress=False)
    return folder


def killed(given: str, dest: Path, workers: int, after: float) -> bool:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, given, str(dest), str(workers)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param("rows", 0, marks=pytest.mark.slow),
        pytest.param("source", 0, marks=pytest.mark.slow),
        ("source", 2),
    ],
)
def test_a_killed_write_continues_to_the_same_bytes(
    kind: str, workers: int, whole: Path, thorough: bool, tmp_path: Path
) -> None:
    given = "rows" if kind == "rows" else str(whole / "rows")
    chance = random.Random(kind + str(workers))
    for attempt in range(3 if thorough else 1):
        dest = tmp_path / str(attempt)
        interrupted = killed(given, dest, workers, chance.uniform(0, 0.6))
        if interrupted and not (dest / "rankfeed.json").exists():
            with pytest.raises(SourceError, match=r"not finished|no such file"):
                rf.open(dest)
        rf.write(rows() if kind == "rows" else rf.open(given), dest, shard_bytes=1500, workers=0, progress=False)
        assert contents(dest) == contents(whole / kind)


class Killed(BaseException):
    pass


def killed_at(
    is_end: Callable[[int, Path], bool], monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]
) -> int:
    """Run a process that dies at a rename, chosen by its number and target; how many it made before."""
    count, replace = 0, os.replace

    def stopping(source: Path, target: Path) -> None:
        nonlocal count
        if is_end(count, Path(target)):
            raise Killed
        count += 1
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", stopping)
        with suppress(Killed):
            work()
    return count


def test_stopped_at_any_rename_nothing_opens_and_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = rows()[1800:2300]  # changes from dense to ragged on the way

    def write(dest: Path) -> rf.Source:
        return rf.write(selection, dest, shard_bytes=3000, progress=False)

    reference = tmp_path / "reference"
    most = killed_at(lambda *_: False, monkeypatch, lambda: write(reference))
    moved = Counter[int]()
    for stop_at in range(most):
        dest = tmp_path / str(stop_at)
        killed_at(lambda count, _, stop_at=stop_at: count == stop_at, monkeypatch, partial(write, dest))  # type: ignore[misc]
        shards = sorted(dest.glob("shard-*.arrow"))
        moved[len(shards)] += 1
        for where in (dest, f"{dest}/*.arrow", f"{dest}/shard-0000[0-3]*", shards):
            for form in (None, "arrow") if shards or where == dest else ():
                with pytest.raises(SourceError, match="not finished" if dest.exists() else "no such"):
                    rf.open(where, format=form)
        write(dest)
        assert contents(dest) == contents(reference)
    assert set(moved) == set(range(len(list(reference.glob("shard-*.arrow"))) + 1))  # it was stopped at each


@pytest.mark.parametrize("kind", ["rows", "source"])
def test_stopped_at_any_rename_an_append_leaves_what_was_there_and_adds_its_rows_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = rf.write(rows()[60:120], tmp_path / "source", progress=False)
    rf.write(rows()[:60], tmp_path / "base", shard_bytes=500, progress=False)
    options: dict[str, Any] = {"shard_bytes": 500, "append": True, "workers": 0, "progress": False}

    def append(dest: Path) -> rf.Source:
        if kind == "rows":
            return rf.write(iter(rows()[60:120]), dest, key="new", **options)
        return rf.write(source, dest, **options)

    reference = Path(shutil.copytree(tmp_path / "base", tmp_path / "reference"))
    before = rf.open(reference).fingerprint
    most = killed_at(lambda *_: False, monkeypatch, lambda: append(reference))
    for stop_at in range(most):
        dest = Path(shutil.copytree(tmp_path / "base", tmp_path / str(stop_at)))
        killed_at(lambda count, _, stop_at=stop_at: count == stop_at, monkeypatch, partial(append, dest))  # type: ignore[misc]
        assert rf.open(dest).fingerprint == before
        assert len(append(dest)) == 120
        assert contents(dest) == contents(reference)
    assert most > 5


@pytest.mark.parametrize("is_damaged", [False, True])
def test_staged_shards_are_written_again_only_if_they_are_damaged(
    is_damaged: bool, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(*_: object) -> None:
        raise InterruptedError

    source = rf.open(whole / "rows")
    with monkeypatch.context() as patch:
        patch.setattr(coordinator_module, "commit", stopping)
        with pytest.raises(WriteError):
            rf.write(source, tmp_path / "p", shard_bytes=1500, progress=False)
    if is_damaged:
        staged = sorted((tmp_path / "p").rglob("*.arrow"))
        staged[0].write_bytes(b"\0" * staged[0].stat().st_size)
        staged[1].unlink()
        staged[2].with_suffix(".json").write_text("{")
    else:
        monkeypatch.setattr(staging_module, "write_shard", stopping)  # nothing is left to be written
    rf.write(source, tmp_path / "p", shard_bytes=1500, progress=False)
    assert contents(tmp_path / "p") == contents(whole / "source")


def test_the_beginnings_of_another_write_are_refused_or_started_over(whole: Path, tmp_path: Path) -> None:
    def broken() -> object:
        yield from rows()[:2500]
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        rf.write(broken(), tmp_path / "p", shard_bytes=1500, progress=False)  # type: ignore[arg-type]
    with pytest.raises(WriteError, match="another input"):
        rf.write(rf.open(whole / "rows"), tmp_path / "p", shard_bytes=1500, progress=False)
    rf.write(rf.open(whole / "rows"), tmp_path / "p", shard_bytes=1500, progress=False, resume=False)
    assert contents(tmp_path / "p") == contents(whole / "source")


def test_an_iterable_that_changed_in_between_is_written_as_it_is_now(tmp_path: Path) -> None:
    def broken() -> object:
        yield from ({"x": np.arange(i % 3)} for i in range(500))
        raise KeyError

    with pytest.raises(KeyError):
        rf.write(broken(), tmp_path / "p", shard_bytes=500, progress=False)  # type: ignore[arg-type]
    now = [{"x": np.arange(2) + i} for i in range(100)]
    rf.write(now, tmp_path / "p", shard_bytes=500, progress=False)
    rf.write(now, tmp_path / "fresh", shard_bytes=500, progress=False)
    assert contents(tmp_path / "p") == contents(tmp_path / "fresh")


def test_of_two_writes_at_once_one_succeeds_and_the_other_says_why(thorough: bool, tmp_path: Path) -> None:
    code = (
        "import sys, rankfeed as rf\n"
        "try: print(len(rf.write([{'x': i} for i in range(100)], sys.argv[1], progress=False)))\n"
        "except rf.errors.WriteError as error: print(error.summary)"
    )
    for attempt in range(3 if thorough else 1):
        command = [sys.executable, "-c", code, str(tmp_path / f"{attempt}")]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        said = sorted(process.communicate(timeout=60)[0].strip() for process in both)
        assert said[0] == "100"
        assert said[1] in ("100", "another process is writing to this directory")
        assert len(rf.open(tmp_path / f"{attempt}")) == 100


def test_a_writer_begins_though_another_one_has_just_removed_the_staging_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, errors = Lease.acquire, iter([FileNotFoundError(2, "No such file or directory")])

    def acquire(lease: Lease, *arguments: Any) -> Any:
        if (error := next(errors, None)) is not None:
            raise error
        return real(lease, *arguments)

    monkeypatch.setattr(Lease, "acquire", acquire)
    assert len(rf.write([{"x": 1}], tmp_path / "p", progress=False)) == 1


@pytest.mark.slow
def test_a_writer_that_was_killed_on_another_host_is_taken_over_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, socket, sys, rankfeed as rf\n"
        "socket.gethostname = lambda: 'node-a'\n"
        "def rows():\n"
        "    for i in range(200):\n"
        "        yield {'x': i}\n"
        "    os._exit(9)\n"
        "rf.write(rows(), sys.argv[1], shard_bytes=100, progress=False)"
    )
    dest = tmp_path / "p"
    killed = subprocess.run([sys.executable, "-c", code, str(dest)], check=False)
    assert killed.returncode == 9
    monkeypatch.setattr("rankfeed.storage.lease.DURATION", 1.0)
    all_rows = [{"x": i} for i in range(300)]
    assert len(rf.write(all_rows, dest, shard_bytes=100, progress=False)) == 300


@pytest.mark.parametrize("is_local", [True, False])
def test_a_writer_that_is_alive_here_or_on_another_host_is_named(
    is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankfeed.storage.lease.HEARTBEAT", 0.05)
    monkeypatch.setattr(LeaseOwner, "is_local", is_local)

    def samples() -> Iterator[dict[str, int]]:
        yield {"x": 1}
        with pytest.raises(WriteError, match=rf"another process is writing[\s\S]*process {os.getpid()} on"):
            rf.write([{"x": 1}], tmp_path / "p", progress=False)
        yield {"x": 2}

    assert len(rf.write(samples(), tmp_path / "p", progress=False)) == 2


def test_a_writer_that_lost_its_lease_leaves_the_files_of_its_successor(tmp_path: Path) -> None:
    """It was stopped for long, and a process on another host took over."""
    staging = tmp_path / "p" / ".rankfeed-write"
    lease = Lease(staging / "lease")

    def samples() -> Iterator[dict[str, int]]:
        yield {"x": 1}
        held = lease.acquire(lease.owner())
        assert held is not None
        stack.enter_context(held)
        (staging / "job.json").write_text("of the successor")

    with ExitStack() as stack:
        with pytest.raises(WriteError, match="another process took over"):
            rf.write(samples(), tmp_path / "p", progress=False)
        assert (staging / "job.json").read_text() == "of the successor"
        assert os.listdir(tmp_path / "p") == [staging.name]


def test_an_input_that_cannot_be_read_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, int]]:
        yield {"x": 1}
        raise FileNotFoundError(2, "No such file", "/data/img7.jpg")

    with pytest.raises(WriteError, match=r"(?s)cannot read the input.*img7.*row 1"):
        rf.write(broken(), tmp_path / "p", progress=False)
