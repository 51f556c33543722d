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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.marks import slow
from tests.support.values import contents

import rankfeed as rf
from rankfeed.errors import SourceError, WriteError
from rankfeed.storage.lease import Lease, LeaseOwner
from rankfeed.writer import coordinator, staging

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
    command = [sys.executable, "-c", SCRIPT, given, str(dest), str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(after)
        process.kill()
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("kind", "workers"), [slow("rows", 0), slow("source", 0), ("source", 2)])
def test_a_killed_write_resumes_to_the_same_bytes(
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


def breaking(samples: list[Any]) -> Iterator[Any]:
    yield from samples
    raise KeyError("the user's own")


def killed_at(is_end: Callable[[int, Path], bool], work: Callable[[], Any]) -> int:
    """Run a process that dies at a rename, chosen by its number and target; how many it made before."""
    count, replace = 0, os.replace

    def stopping(source: Path, target: Path) -> None:
        nonlocal count
        if is_end(count, Path(target)):
            raise Killed
        count += 1
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr("os.replace", stopping)
        work()
    return count


def test_a_write_killed_at_any_rename_does_not_open_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    selection = rows()[1800:2300]  # changes from dense to ragged on the way

    def write(dest: Path) -> rf.Source:
        return rf.write(selection, dest, shard_bytes=3000, progress=False)

    reference = tmp_path / "reference"
    most = killed_at(lambda *_: False, lambda: write(reference))
    moved = Counter[int]()
    for stop_at in range(most):
        dest = tmp_path / str(stop_at)
        killed_at(lambda count, _, stop_at=stop_at: count == stop_at, partial(write, dest))  # type: ignore[misc]
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
def test_an_append_killed_at_any_rename_changes_nothing_and_resumes(kind: str, tmp_path: Path) -> None:
    source = rf.write(rows()[60:120], tmp_path / "source", progress=False)
    rf.write(rows()[:60], tmp_path / "base", shard_bytes=500, progress=False)
    options: dict[str, Any] = {"shard_bytes": 500, "append": True, "workers": 0, "progress": False}

    def append(dest: Path) -> rf.Source:
        if kind == "rows":
            return rf.write(iter(rows()[60:120]), dest, key="new", **options)
        return rf.write(source, dest, **options)

    reference = Path(shutil.copytree(tmp_path / "base", tmp_path / "reference"))
    before = rf.open(reference).fingerprint
    most = killed_at(lambda *_: False, lambda: append(reference))
    for stop_at in range(most):
        dest = Path(shutil.copytree(tmp_path / "base", tmp_path / str(stop_at)))
        killed_at(lambda count, _, stop_at=stop_at: count == stop_at, partial(append, dest))  # type: ignore[misc]
        assert rf.open(dest).fingerprint == before
        assert len(append(dest)) == 120
        assert contents(dest) == contents(reference)
    assert most > 5


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_resumed_write_writes_only_damaged_staged_shards_again(
    is_damaged: bool, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(*_: object) -> None:
        raise InterruptedError

    source = rf.open(whole / "rows")
    with monkeypatch.context() as patch:
        patch.setattr(coordinator, "commit", stopping)
        with pytest.raises(WriteError):
            rf.write(source, tmp_path / "p", shard_bytes=1500, progress=False)
    if is_damaged:
        zeroed, removed, with_bad_record, *_ = sorted((tmp_path / "p").rglob("*.arrow"))
        zeroed.write_bytes(b"\0" * zeroed.stat().st_size)
        removed.unlink()
        with_bad_record.with_suffix(".json").write_text("{")
    else:
        monkeypatch.setattr(staging, "write_shard", stopping)  # nothing is left to be written
    rf.write(source, tmp_path / "p", shard_bytes=1500, progress=False)
    assert contents(tmp_path / "p") == contents(whole / "source")


def test_an_unfinished_write_of_another_input_raises_unless_resume_is_false(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="the user's own"):
        rf.write(breaking(rows()[:2500]), tmp_path / "p", shard_bytes=1500, progress=False)
    with pytest.raises(WriteError, match="another input"):
        rf.write(rf.open(whole / "rows"), tmp_path / "p", shard_bytes=1500, progress=False)
    rf.write(rf.open(whole / "rows"), tmp_path / "p", shard_bytes=1500, progress=False, resume=False)
    assert contents(tmp_path / "p") == contents(whole / "source")


def test_a_write_resumed_with_other_rows_has_the_bytes_of_a_new_write(tmp_path: Path) -> None:
    ragged = [{"x": np.arange(i % 3)} for i in range(500)]
    with pytest.raises(KeyError):
        rf.write(breaking(ragged), tmp_path / "p", shard_bytes=500, progress=False)
    now = [{"x": np.arange(2) + i} for i in range(100)]
    rf.write(now, tmp_path / "p", shard_bytes=500, progress=False)
    rf.write(now, tmp_path / "fresh", shard_bytes=500, progress=False)
    assert contents(tmp_path / "p") == contents(tmp_path / "fresh")


def test_of_two_concurrent_writes_one_succeeds_and_the_other_may_be_refused(
    thorough: bool, tmp_path: Path
) -> None:
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


def test_a_write_recreates_a_removed_staging_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer removes it before this one acquires the lease in it."""
    real, errors = Lease.acquire, iter([FileNotFoundError(2, "No such file or directory")])

    def acquire(lease: Lease, *arguments: Any) -> Any:
        if (error := next(errors, None)) is not None:
            raise error
        return real(lease, *arguments)

    monkeypatch.setattr(Lease, "acquire", acquire)
    assert len(rf.write([{"x": 1}], tmp_path / "p", progress=False)) == 1


@pytest.mark.slow
def test_a_write_killed_on_another_host_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, socket, sys, rankfeed as rf\n"
        "socket.gethostname = lambda: 'node-a'\n"
        "def rows():\n"
        "    for i in range(200):\n"
        "        yield {'x': i}\n"
        "    os._exit(9)\n"
        "rf.write(rows(), sys.argv[1], shard_bytes=100, progress=False)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "p")], check=False).returncode == 9
    monkeypatch.setattr("rankfeed.storage.lease.DURATION", 1.0)
    assert len(rf.write([{"x": i} for i in range(300)], tmp_path / "p", shard_bytes=100, progress=False)) == 300


@pytest.mark.parametrize("is_local", [True, False])
def test_a_second_write_to_a_directory_raises_and_names_the_first_process(
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


def test_a_write_that_lost_its_lease_raises_and_keeps_the_files_of_its_successor(tmp_path: Path) -> None:
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


def test_an_iterable_that_raises_oserror_is_reported_as_an_unreadable_input(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, int]]:
        yield {"x": 1}
        raise FileNotFoundError(2, "No such file", "/data/img7.jpg")

    with pytest.raises(WriteError, match=r"(?s)cannot read the input.*img7.*row 1"):
        rf.write(broken(), tmp_path / "p", progress=False)
