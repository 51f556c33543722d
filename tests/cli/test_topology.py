"""``rankfeed topology``: of one process, and of several that meet in a folder."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.environ import of_no_launcher

import rankfeed as rf

COMMAND = [sys.executable, "-c", "from rankfeed.cli import main; main()", "topology"]
NONE_SET = of_no_launcher()

pytestmark = pytest.mark.timeout(400)


def start(folder: Path, *arguments: object, **environ: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env=NONE_SET | {name: str(value) for name, value in environ.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*jobs: "subprocess.Popen[str]") -> list[tuple[int, str, str]]:
    try:
        said = [job.communicate(timeout=200) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, *each) for job, each in zip(jobs, said, strict=True)]


def alone(*arguments: object, **environ: object) -> dict[str, Any]:
    ((code, out, err),) = ended(start(Path.cwd(), *arguments, "--json", **environ))
    told: dict[str, Any] = json.loads(out)
    assert code == (1 if told.get("ok") is False else 0), err
    return told


def ranks(folder: Path, places: list[tuple[int, int]], *arguments: object) -> list[tuple[int, str, str]]:
    """Processes that each take themselves to be a rank of a world."""
    return ended(
        *(start(folder, "--check", "--job", "j", *arguments, RANK=rank, WORLD_SIZE=size) for rank, size in places)
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("topology") / "data"
    rf.write(({"x": i} for i in range(50)), path, progress=False)
    return path


def test_it_tells_the_launcher_and_the_variables_that_say_so() -> None:
    told = alone(SLURM_STEP_ID=0, SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2, SLURM_JOB_ID=7)
    assert (told["launcher"], told["rank"], told["world_size"]) == ("slurm", 1, 2)
    assert told["found_in"] == "SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2, SLURM_STEP_ID=0"
    assert "also_set" not in told


def test_it_tells_what_other_launchers_say_beside() -> None:
    step = {"SLURM_STEP_ID": 0, "SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1, "SLURM_STEP_NUM_NODES": 1}
    told = alone(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, **step)
    assert told["found_in"] == "RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2"
    assert list(told["also_set"]) == ["slurm"]


def test_a_batch_script_is_one_process_and_is_told_why() -> None:
    told = alone(SLURM_JOB_ID=7, SLURM_NTASKS=4, SLURM_PROCID=0)
    assert (told["launcher"], told["world_size"]) == ("single", 1)
    assert "without a step" in told["found_in"]


def test_several_processes_and_no_way_to_tell_which_is_an_error() -> None:
    told = alone(PMIX_RANK=1)
    assert told["ok"] is False
    assert "PMIX_RANK=1" in told["found"]


def test_another_number_of_ranks_than_there_has_to_be_is_an_error(tmp_path: Path) -> None:
    told = alone("--ranks", 4)
    assert (told["expected"], told["ok"]) == ("4 ranks", False)
    ((code, _, err),) = ended(start(tmp_path, "--check", "--ranks", 4))
    assert (code, "4 ranks" in err) == (1, True)


def test_ranks_that_agree_get_a_table_with_what_each_reads_first(tmp_path: Path, data: Path) -> None:
    done = ranks(tmp_path, [(2, 3), (0, 3), (1, 3)], "--data", data, "--batch-size", 4, "--json")
    assert [code for code, _, _ in done] == [0, 0, 0], done
    assert [out for _, out, _ in done][::2] == ["", ""]
    told = json.loads(done[1][1])
    assert Counter(row["rank"] for row in told["ranks"]) == Counter(range(3))
    for row in told["ranks"]:
        topology = rf.Topology(rank=row["rank"], world_size=3)
        first = rf.Schedule(rf.Plan(50), batch_size=4, topology=topology).batch(0)
        assert row["reads_first"] == first.tolist()
    assert sorted(row["pid"] for row in told["ranks"]) == sorted({row["pid"] for row in told["ranks"]})
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_for_people_too(tmp_path: Path) -> None:
    done = ranks(tmp_path, [(0, 2), (1, 2)])
    assert [code for code, _, _ in done] == [0, 0], done
    assert done[0][1].startswith("2 ranks agree (torchrun, 1 node)\n")
    assert len(done[0][1].splitlines()) == 5


def test_a_contradiction_ends_every_rank(tmp_path: Path) -> None:
    done = ranks(tmp_path, [(0, 3), (1, 3)], "--timeout", 12)
    assert [code for code, _, _ in done] == [1, 1]
    assert all("rank 2 did not report" in err and "Traceback" not in err for _, _, err in done), done


def test_a_rank_that_cannot_tell_itself_ends_the_others(tmp_path: Path) -> None:
    jobs = [
        start(tmp_path, "--check", "--job", "j", "--timeout", 60, **environ)
        for environ in ({"RANK": 0, "WORLD_SIZE": 2}, {"RANK": 1})
    ]
    (one, _, its), (other, _, own) = ended(*jobs)
    assert (one, other) == (1, 1)
    assert "failed: " in its
    assert "RANK=1" in its
    assert "RANK=1" in own


def test_other_data_on_one_rank_end_every_rank(tmp_path: Path, data: Path) -> None:
    other = tmp_path / "other"
    rf.write(({"x": np.int64(i)} for i in range(49)), other, progress=False)
    jobs = [
        start(tmp_path, "--check", "--job", "j", "--data", path, "--timeout", 60, RANK=rank, WORLD_SIZE=2)
        for rank, path in enumerate((data, other))
    ]
    for code, _, err in ended(*jobs):
        assert (code, "datasets differ" in err) == (1, True), err


@pytest.mark.slow
def test_what_a_killed_check_left_behind_does_not_count(tmp_path: Path) -> None:
    killed = [start(tmp_path, "--check", "--job", "j", RANK=rank, WORLD_SIZE=3) for rank in (0, 1)]
    deadline = time.monotonic() + 200
    while len([*tmp_path.glob(".rankfeed-topology-*/*.json")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for job in killed:
        job.send_signal(signal.SIGKILL)
        job.communicate(timeout=200)
    (roster,) = tmp_path.glob(".rankfeed-topology-*")
    (roster / ".tmp-host-1-0a").touch()  # of one that was killed while it wrote
    done = ranks(tmp_path, [(0, 2), (1, 2)], "--json")
    assert [code for code, _, _ in done] == [0, 0], done
    assert len(json.loads(done[0][1])["ranks"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_ranks_without_a_name_of_their_launch_ask_for_one(tmp_path: Path) -> None:
    ((code, _, err),) = ended(start(tmp_path, "--check", RANK=0, WORLD_SIZE=2))
    assert (code, "--job" in err) == (2, True)


def test_a_folder_that_cannot_be_written_is_an_error_on_each_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = ranks(tmp_path, [(0, 2), (1, 2)], "--folder", tmp_path / "file")
    assert [(code, "--folder" in err) for code, _, err in done] == [(1, True)] * 2
