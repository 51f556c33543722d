"""``rankfeed topology``: of one process, and of several that meet in a folder."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_commands import rankfeed
from tests.support.environ import of_no_launcher
from tests.support.jobs import until

import rankfeed as rf

COMMAND = [sys.executable, "-c", "from rankfeed.cli import main; main()", "topology", "--check", "--job", "j"]

pytestmark = pytest.mark.timeout(400)

# One process.

STEP = {"SLURM_STEP_ID": 0, "SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1, "SLURM_STEP_NUM_NODES": 1}


def alone(monkeypatch: pytest.MonkeyPatch, environ: dict[str, int], arguments: str = "") -> Any:
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))
    return rankfeed("topology", *arguments.split(), "--json")


@pytest.mark.parametrize(
    ("environ", "place", "variables"),
    [
        (
            {"SLURM_STEP_ID": 0, "SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 2, "SLURM_JOB_ID": 7},
            *("slurm 1/2", "SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2, SLURM_STEP_ID=0"),
        ),
        (
            STEP | {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2},
            *("torchrun 1/2, also slurm", "RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2"),
        ),
        ({"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4, "SLURM_PROCID": 0}, "single 0/1", "without a step"),
    ],
)
def test_topology_of_one_process_reports_its_launcher_and_the_variables_it_was_found_in(
    environ: dict[str, int], place: str, variables: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.loads(alone(monkeypatch, environ).stdout)
    others = ", also ".join(["", *told.get("also_set", {})])
    assert f"{told['launcher']} {told['rank']}/{told['world_size']}{others}" == place
    assert variables in told["found_in"]


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        ({"PMIX_RANK": 1}, "", "PMIX_RANK=1"),
        ({}, "--ranks 4", "4 ranks"),
        ({}, "--check --ranks 4", "4 ranks"),
        ({"RANK": 0, "WORLD_SIZE": 2}, "--check", "--job"),  # the launcher gives the launch no name
    ],
)
def test_topology_of_one_process_exits_with_an_error_if_ranks_or_launch_are_unclear(
    environ: dict[str, int], arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = alone(monkeypatch, environ, arguments)
    assert done.returncode == (2 if words == "--job" else 1)
    assert words in done.stderr
    assert json.loads(done.stdout)["ok"] is False


# Several processes.


def start(folder: Path, *arguments: object, **environ: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env=of_no_launcher() | {name: str(value) for name, value in environ.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*jobs: "subprocess.Popen[str]") -> list[tuple[int, str, str]]:
    """The status, standard output and standard error of each process."""
    try:
        output = [job.communicate(timeout=200) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, *texts) for job, texts in zip(jobs, output, strict=True)]


def ranks(folder: Path, places: list[tuple[int, int]], *arguments: object) -> list[tuple[int, str, str]]:
    """Processes that each take themselves to be a rank of a world."""
    return ended(*(start(folder, *arguments, RANK=rank, WORLD_SIZE=size) for rank, size in places))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("topology") / "data"
    rf.write(({"x": i} for i in range(50)), path, progress=False)
    return path


def test_topology_check_prints_all_ranks_and_the_samples_that_each_reads_first(tmp_path: Path, data: Path) -> None:
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


def test_topology_check_without_json_prints_a_table_of_the_ranks(tmp_path: Path) -> None:
    done = ranks(tmp_path, [(0, 2), (1, 2)])
    assert [code for code, _, _ in done] == [0, 0], done
    assert done[0][1].startswith("2 ranks agree (torchrun, 1 node)\n")
    assert len(done[0][1].splitlines()) == 5


TWO = [{"RANK": rank, "WORLD_SIZE": 2} for rank in (0, 1)]


@pytest.mark.parametrize(
    ("places", "arguments", "words"),
    [
        pytest.param(
            [{"RANK": 0, "WORLD_SIZE": 3}, {"RANK": 1, "WORLD_SIZE": 3}],
            "--timeout 12",
            "rank 2 did not report",
            marks=pytest.mark.slow,
        ),
        pytest.param([{"RANK": 0, "WORLD_SIZE": 2}, {"RANK": 1}], "", "RANK=1", marks=pytest.mark.slow),
        pytest.param(TWO, "--folder data-0/rankfeed.json", "--folder", marks=pytest.mark.slow),
        (TWO, "--data data-RANK", "datasets differ"),
    ],
    ids=["a rank that is missing", "a rank that fails", "no folder", "other data on one rank"],
)
def test_topology_check_exits_with_1_on_every_rank_if_ranks_are_missing_or_contradict(
    places: list[dict[str, int]], arguments: str, words: str, tmp_path: Path
) -> None:
    for rank in (0, 1):
        rf.write(({"x": i} for i in range(50 - rank)), tmp_path / f"data-{rank}", progress=False)
    done = ended(
        *(
            start(tmp_path, *arguments.replace("RANK", str(rank)).split(), **environ)
            for rank, environ in enumerate(places)
        )
    )
    for code, _, err in done:
        assert (code, words in err, "Traceback" in err) == (1, True, False), err


@pytest.mark.slow
def test_topology_check_ignores_and_removes_files_left_by_a_killed_check(tmp_path: Path) -> None:
    killed = [start(tmp_path, RANK=rank, WORLD_SIZE=3) for rank in (0, 1)]
    until(lambda: len([*tmp_path.glob(".rankfeed-topology-*/*.json")]) == 2, timeout=200)
    for job in killed:
        job.send_signal(signal.SIGKILL)
        job.communicate(timeout=200)
    (roster,) = tmp_path.glob(".rankfeed-topology-*")
    (roster / ".tmp-host-1-0a").touch()  # of one that was killed while it wrote
    done = ranks(tmp_path, [(0, 2), (1, 2)], "--json")
    assert [code for code, _, _ in done] == [0, 0], done
    assert len(json.loads(done[0][1])["ranks"]) == 2
    assert list(tmp_path.iterdir()) == []
