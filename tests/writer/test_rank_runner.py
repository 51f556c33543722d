"""Writing on the ranks of a job: the bytes of a local write, whichever rank dies; no rank is waited for."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.jobs import ENVIRON, run, torchrun, until
from tests.support.marks import slow, soak
from tests.support.values import contents

import rankfeed as rf
from rankfeed.storage.lease import LeaseOwner
from rankfeed.writer import coordinator

SCRIPT = Path(__file__).parent / "rank_job.py"
#: Of the local write, whose bytes those of the ranks are compared with.
OPTIONS: dict[str, Any] = {"seed": 4, "shard_bytes": 1000, "key": "1"}


def mapped(sample: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    return [{"id": sample["id"], "noise": rng.random()}] * int(rng.integers(3))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    rows = ({"id": i, "x": np.zeros(i % 4)} for i in range(1200))
    source = rf.write(rows, folder / "source", shard_bytes=3000, progress=False)
    rf.write(source, folder / "local", map=mapped, workers=0, progress=False, **OPTIONS)
    return folder


@contextmanager
def ranks(size: int, *arguments: object, **environ: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that know their place as mpirun's do, and are not ended with each other."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    environ = {**ENVIRON, "OMPI_MCA_ess_base_jobid": secrets.token_hex(4), **environ}
    with ExitStack() as stack:
        started = []
        for rank in range(size):
            place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
            variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}
            process = subprocess.Popen(command, env={**environ, **variables})
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        yield started


def write_alone(source: rf.Source, dest: Path, **options: Any) -> rf.Source:
    """Write in this process, the only rank."""
    return rf.write(source, dest, runner="ranks", progress=False, **options)


def leave_task(write: Path, task: int, label: str) -> None:
    """A task that two processes of another host claimed one after the other."""
    folder = write / ".rankfeed-write" / "tasks" / f"{task:05}"
    folder.mkdir()
    for token, name in (("x", "lease"), ("y", "x.next")):
        owner = LeaseOwner(token, name, "elsewhere", pid=1, label=label)
        (folder / name).write_bytes(msgspec.json.encode(owner))


def told(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")}


def written(size: int, data: Path, dest: Path, fault: str = "", stall_timeout: float = 20) -> Any:
    """What came of it on each rank, and how the processes ended."""
    with tempfile.TemporaryDirectory() as said:
        with ranks(size, data / "source", dest, said, fault, stall_timeout) as started:
            codes = [process.wait(90) for process in started]
        return told(Path(said)), codes


def test_ranks_of_a_torchrun_job_write_the_bytes_of_a_local_write(data: Path, tmp_path: Path) -> None:
    command = torchrun(3, SCRIPT, data / "source", tmp_path / "p", tmp_path, "", 20)
    run(command, tmp_path / "log", timeout=90)
    outcomes = told(tmp_path)
    assert len(outcomes) == 3
    assert_written(outcomes, data, tmp_path / "p")
    assert sum(outcome["calls"] for outcome in outcomes.values()) >= 1200


def assert_written(outcomes: dict[int, dict[str, Any]], data: Path, dest: Path) -> None:
    """All these ranks opened the dataset, whose bytes are those of the local write."""
    assert {outcome.get("fingerprint") for outcome in outcomes.values()} == {rf.open(data / "local").fingerprint}
    assert contents(dest) == contents(data / "local")


def ended(process: subprocess.Popen[bytes], seconds: float = 80) -> int | None:
    """How it ended; None if it did not."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


@pytest.mark.parametrize(
    ("fault", "size", "code"),
    [
        ("kill:0", 3, -signal.SIGKILL),
        slow("kill:1", 3, -signal.SIGKILL),
        slow("late:1", 2, 0),
        slow("hang:1", 3, None),
        slow("stop:1", 3, None),
        soak("hang:0", 3, None),
    ],
)
def test_the_other_ranks_finish_the_write_of_a_killed_late_hanging_or_stopped_rank(
    fault: str, size: int, code: int | None, data: Path, tmp_path: Path
) -> None:
    faulty = int(fault[-1])
    others = [rank for rank in range(size) if rank != faulty]
    with ranks(size, data / "source", tmp_path / "p", tmp_path, fault, 3) as started:
        assert [ended(started[rank]) for rank in others] == [0] * len(others)
        assert ended(started[faulty], 0 if code is None else 80) == code
    outcomes = told(tmp_path)
    assert sorted(outcomes) == (list(range(size)) if code == 0 else others)
    assert_written(outcomes, data, tmp_path / "p")
    if code is None:
        warned = [warning for outcome in outcomes.values() for warning in outcome["warnings"]]
        expected = f"rank {faulty} of {size} is alive but made no progress for 3 s (task "
        assert any(expected in warning for warning in warned)


@pytest.mark.slow
def test_the_next_job_resumes_a_write_whose_ranks_were_all_killed(data: Path, tmp_path: Path) -> None:
    outcomes, codes = written(1, data, tmp_path / "p", "kill:0")
    assert codes == [-signal.SIGKILL]
    assert not outcomes
    with pytest.raises(rf.errors.SourceError, match="not finished"):
        rf.open(tmp_path / "p")
    outcomes, codes = written(2, data, tmp_path / "p")
    assert codes == [0, 0]
    assert contents(tmp_path / "p") == contents(data / "local")
    assert sum(outcome["calls"] for outcome in outcomes.values()) < 1200 + 2 * 32  # each looks at 32 before it
    outcomes, _ = written(2, data, tmp_path / "p")  # and once more, now that it is finished
    assert [outcome["calls"] for outcome in outcomes.values()] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all(rank: int, data: Path, tmp_path: Path) -> None:
    outcomes, codes = written(3, data, tmp_path / "p", f"raise:{rank}")
    assert codes == [0, 0, 0]
    for other in range(3):
        assert "map raised an error" in outcomes[other]["error"]
        assert "the user's own" in outcomes[other]["error"]
        assert (f"rank {rank} failed" in outcomes[other]["error"]) == (other != rank)


@pytest.mark.slow
def test_ranks_with_different_arguments_raise(data: Path, tmp_path: Path) -> None:
    outcomes, _ = written(2, data, tmp_path / "p", "other:1")
    errors = [outcome["error"] for outcome in outcomes.values() if "error" in outcome]
    assert errors
    for error in errors:
        assert re.search("other arguments|another process", error)


@pytest.mark.soak
def test_a_late_rank_with_different_arguments_raises(data: Path, tmp_path: Path) -> None:
    dest, go = tmp_path / "p", tmp_path / "go"
    with ranks(2, data / "source", dest, tmp_path, "late-other:1", 20, HELD_UNTIL=str(go)) as started:
        until((dest / "rankfeed.json").exists, started[0])
        go.touch()
        assert [ended(process) for process in started] == [0, 0]
    assert "written with other arguments" in told(tmp_path)[1]["error"]
    assert contents(dest) == contents(data / "local")


@pytest.mark.slow
def test_a_stopped_rank_that_continues_opens_the_dataset_of_the_others(data: Path, tmp_path: Path) -> None:
    with ranks(2, data / "source", tmp_path / "p", tmp_path, "stop:1", 3) as started:
        assert ended(started[0]) == 0
        started[1].send_signal(signal.SIGCONT)
        assert ended(started[1]) == 0
    outcomes = told(tmp_path)
    assert sorted(outcomes) == [0, 1]
    assert_written(outcomes, data, tmp_path / "p")


@pytest.mark.parametrize("size", [soak(2), slow(3)])
def test_a_sample_on_which_every_rank_hangs_is_an_error_naming_it(size: int, data: Path, tmp_path: Path) -> None:
    with ranks(size, data / "source", tmp_path / "p", tmp_path, "same:", 3) as started:
        # One has the user's function to wait for.
        until(lambda: Counter(process.poll() for process in started)[0] == size - 1)
        hanging = next(rank for rank, process in enumerate(started) if process.poll() is None)
    assert len(told(tmp_path)) == size - 1
    expected = rf"(?s)no progress for 15 s, on two ranks.*rank {hanging} of.*positions"
    for outcome in told(tmp_path).values():
        assert re.search(expected, outcome["error"])
    warned = [warning for outcome in told(tmp_path).values() for warning in outcome["warnings"]]
    assert any(f"rank {hanging} of {size} is alive but made no progress for 3 s" in warning for warning in warned)
    assert not (tmp_path / "p" / "rankfeed.json").exists()


@pytest.mark.slow
def test_all_ranks_raise_at_once_if_another_process_writes(data: Path, tmp_path: Path) -> None:
    outcomes = {}

    def rows() -> Iterator[dict[str, Any]]:
        yield {"x": 1}
        outcomes.update(written(3, data, tmp_path / "p", stall_timeout=1000)[0])
        yield {"x": 2}

    assert len(rf.write(rows(), tmp_path / "p", progress=False)) == 2
    for rank in range(3):
        assert "another process is writing to this directory" in outcomes[rank]["error"]
    assert sorted(contents(tmp_path / "p")) == ["rankfeed.json", "shard-00000.arrow"]


@pytest.mark.soak
def test_a_second_job_in_the_directory_of_a_running_one_raises(data: Path, tmp_path: Path) -> None:
    dest, other = tmp_path / "p", tmp_path / "other"
    other.mkdir()
    with ranks(2, data / "source", dest, tmp_path, "hang:1", 3) as first:
        until(lambda: list(dest.glob(".rankfeed-write/*.arrow")), first[0])
        with ranks(2, data / "source", dest, other, "", 30, WRITE_KEY="other") as second:
            assert [ended(process) for process in second] == [0, 0]
        assert ended(first[0]) == 0
    assert "fingerprint" in told(tmp_path)[0]
    for outcome in told(other).values():
        assert re.search("another process is writing to this directory|another input", outcome["error"])
    assert contents(dest) == contents(data / "local")


@pytest.mark.soak
@pytest.mark.timeout(150)
def test_ranks_that_write_and_append_in_one_directory_end_with_one_dataset(data: Path, tmp_path: Path) -> None:
    """Rank 0 finishes its append before rank 2 begins with the first write."""
    dest, go = tmp_path / "p", tmp_path / "go"
    with ranks(3, data / "source", dest, tmp_path, "late:2", 3, WRITE_AGAIN="1", HELD_UNTIL=str(go)) as started:
        until((tmp_path / "second-0").exists, started[0])  # rank 0 is done with both
        go.touch()
        assert [ended(process, 60) for process in started] == [0, 0, 0]
    outcomes = told(tmp_path)
    first, second = rf.open(data / "local").fingerprint, rf.open(dest).fingerprint
    for outcome in outcomes.values():
        assert outcome["fingerprint"] == second
        if outcome["first"]["fingerprint"] != first:
            assert any("has been extended" in warning for warning in outcome["warnings"])
    assert outcomes[2]["first"]["fingerprint"] == second
    assert len(rf.open(dest)) == len(rf.open(data / "local")) + 100


def test_ranks_that_cannot_create_the_destination_raise_at_once(tmp_path: Path, data: Path) -> None:
    (tmp_path / "file").touch()
    outcomes, codes = written(2, data, tmp_path / "file" / "p", stall_timeout=1000)
    assert codes == [0, 0]
    for rank in range(2):
        assert "cannot write" in outcomes[rank]["error"]


def test_the_ranks_runner_refuses_workers_resume_false_and_a_map_without_key(data: Path, tmp_path: Path) -> None:
    source = rf.open(data / "source")
    with pytest.raises(rf.errors.ArgumentError, match="ranks as its workers"):
        write_alone(source, tmp_path / "p", workers=2)
    with pytest.raises(rf.errors.ArgumentError, match="cannot start over"):
        write_alone(source, tmp_path / "p", resume=False)
    with pytest.raises(rf.errors.ArgumentError, match=r"runner='ranks' needs a key"):
        write_alone(source, tmp_path / "p", map=mapped)


def test_a_shard_damaged_before_the_commit_raises_and_the_next_call_writes_it(data: Path, tmp_path: Path) -> None:
    check = coordinator._check_parts

    def damaging(staging: Path, *arguments: Any) -> None:
        victim = sorted(staging.glob("*.arrow"))[1]
        victim.write_bytes(bytes(victim.stat().st_size))
        check(staging, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "_check_parts", damaging)
        with pytest.raises(rf.errors.WriteError, match="shards differ from what was written"):
            write_alone(rf.open(data / "source"), tmp_path / "p", map=mapped, **OPTIONS)
    write_alone(rf.open(data / "source"), tmp_path / "p", map=mapped, **OPTIONS)
    assert contents(tmp_path / "p") == contents(data / "local")


def test_a_task_abandoned_by_two_ranks_of_other_hosts_is_an_error(data: Path, tmp_path: Path) -> None:
    """From another host, ranks that died cannot be told from ranks that hang."""

    def claimed(sample: dict[str, Any]) -> dict[str, Any]:
        if not (tmp_path / "p" / ".rankfeed-write" / "tasks" / "00001").exists():
            leave_task(tmp_path / "p", 1, "rank 1")
        return {"id": sample["id"]}

    with pytest.raises(rf.errors.WriteError, match=r"(?s)no progress for \d+ s, on two ranks.*task 1 \("):
        write_alone(rf.open(data / "source"), tmp_path / "p", map=claimed, stall_timeout=0.3, **OPTIONS)


def test_the_next_job_continues_tasks_that_jobs_killed_on_two_other_hosts_left(data: Path, tmp_path: Path) -> None:
    source, dest = rf.open(data / "source"), tmp_path / "p"

    def broken(sample: dict[str, Any]) -> dict[str, Any]:
        if (dest / ".rankfeed-write" / "tasks" / "00001").exists():
            raise ValueError("the first job")
        return {"id": sample["id"]}

    with pytest.raises(rf.errors.WriteError, match="the first job"):
        write_alone(source, dest, map=broken, stall_timeout=0.5, **OPTIONS)
    leave_task(dest, 3, "rank 0 of 1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        packed = write_alone(source, dest, map=lambda sample: {"id": sample["id"]}, stall_timeout=0.5, **OPTIONS)
    assert len(packed) == len(source)


def test_a_write_of_ranks_succeeds_though_a_second_write_is_refused_meanwhile(data: Path, tmp_path: Path) -> None:
    source, dest = rf.open(data / "source"), tmp_path / "p"
    refused = []

    def mapped_once(sample: dict[str, Any]) -> dict[str, Any]:
        if not refused and list(dest.glob(".rankfeed-write/tasks/*")):
            refused.append(sample)
            with pytest.raises(rf.errors.WriteError, match="another process is writing to this directory"):
                rf.write(source, dest, progress=False, workers=0)
        return {"id": sample["id"]}

    assert len(write_alone(source, dest, map=mapped_once, **OPTIONS)) == len(source)
    assert refused


def test_a_failed_write_leaves_no_open_files(data: Path, tmp_path: Path) -> None:
    source = rf.open(data / "source")

    def broken(sample: dict[str, Any]) -> dict[str, Any]:
        if list(tmp_path.glob("p/.rankfeed-write/tasks/*")):
            raise ValueError("the user's own")
        return sample

    def open_files() -> int:
        with pytest.raises(rf.errors.WriteError, match="the user's own"):
            write_alone(source, tmp_path / "p", map=broken, key="1")
        return len(os.listdir("/proc/self/fd"))

    assert open_files() == open_files()


def test_an_append_of_ranks_with_another_schema_raises_and_blocks_another_append(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankfeed.writer.runners.ranks._VISIBLE", 1000.0)  # it does not wait for another rank
    source = rf.open(data / "local")
    write_alone(source, tmp_path / "p")
    before = contents(tmp_path / "p")
    with pytest.raises(rf.errors.WriteError, match="cannot write a sample"):
        write_alone(source, tmp_path / "p", append=True, map=lambda sample: {"id": "text"}, key="other")
    with pytest.raises(rf.errors.WriteError, match="unfinished write"):
        write_alone(source, tmp_path / "p", append=True, map=dict, key="good")
    shutil.rmtree(tmp_path / "p" / ".rankfeed-write")
    assert contents(tmp_path / "p") == before
    assert len(write_alone(source, tmp_path / "p", append=True, map=dict, key="good")) == 2 * len(source)
