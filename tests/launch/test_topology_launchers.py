"""Every process of a real launch knows which it is, and all of them together are all there are."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

import psutil
import pytest
from tests.support.environ import of_no_launcher
from tests.support.jobs import end, free_port
from tests.support.launchers import MPICH, OPENMPI, TORCHRUN, need

PRINT = [sys.executable, str(Path(__file__).parent / "jobs" / "print_topology.py")]


def run(command: list[str], environ: dict[str, str] | None = None, timeout: float = 60, **more: str) -> str:
    """What a launch prints; past its time, or when the launcher has ended, all that is left of it is ended.

    A rank that is killed leaves torch's workers behind under forkserver, for ever: they neither keep us waiting
    for what they may still print, nor stay. MPICH's launcher waits for them, so they are looked for all the time.
    """
    mark, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            env={**of_no_launcher(environ), "OMP_NUM_THREADS": "1", **more, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                end([each for each in marked(mark) if orphaned(each)])
                if time.monotonic() > deadline and process.poll() is None:
                    raise subprocess.TimeoutExpired(command, timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end(marked(mark))
        out.seek(0), err.seek(0)
        said = out.read()
        assert process.returncode == 0, f"{command}\n{said}\n{err.read()}"
    return said


#: In the environment of each process of a launch, and of all that they start.
MARK = "RANKFEED_TEST_LAUNCH"


def marked(mark: str) -> list[psutil.Process]:
    """The processes of a launch, wherever they hang in the tree."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def orphaned(process: psutil.Process) -> bool:
    """Whether it served another process of Python, which is gone."""
    with contextlib.suppress(psutil.Error, OSError):
        return process.ppid() == 1 and any("multiprocessing." in each for each in process.cmdline())
    return False


def seen(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def count(topologies: list[dict], *names: str) -> Counter:
    return Counter(tuple(topology[name] for name in names) for topology in topologies)


WHERE = ("launcher", "rank", "world_size", "local_rank", "local_world_size", "node", "num_nodes")


def one_node(launcher: str, size: int) -> Counter:
    return Counter((launcher, rank, size, rank, size, 0, 1) for rank in range(size))


def two_nodes(launcher: str) -> Counter:
    return Counter((launcher, rank, 4, rank % 2, 2, rank // 2, 2) for rank in range(4))


#: In a Slurm allocation of two nodes, two tasks each.
TASKS = ["-n4", "-N2", "--ntasks-per-node=2"]
STANDALONE = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
UNEVEN = Counter([("slurm", 0, 3, 0, 2, 0, 2), ("slurm", 1, 3, 1, 2, 0, 2), ("slurm", 2, 3, 0, 1, 1, 2)])
VIRTUAL = Counter(("torchrun", rank, 2, 0, 2, 0, 1) for rank in range(2))
#: Of the child of a process that has initialised MPI by itself: it is alone.
SINGLETON = f"import subprocess; from mpi4py import MPI; subprocess.run({PRINT}, check=True)"

# launch: the launcher, its command, what all processes together take themselves for
LAUNCHES = {
    "torchrun": ("torchrun", [*STANDALONE, *PRINT[1:]], one_node("torchrun", 2)),
    "torchrun, group": ("torchrun", [*STANDALONE, *PRINT[1:], "--group"], one_node("torch.distributed", 2)),
    "torchrun, virtual local ranks": ("torchrun", [*STANDALONE, "--virtual-local-rank", *PRINT[1:]], VIRTUAL),
    "Open MPI": ("openmpi", [*OPENMPI, "-np", "4", *PRINT], one_node("openmpi", 4)),
    "Open MPI, a process beside it": ("openmpi", [sys.executable, "-c", SINGLETON], one_node("single", 1)),
    "MPICH": ("mpich", [*MPICH, "-n", "4", *PRINT], one_node("mpich", 4)),
    "srun": ("srun", ["srun", *TASKS, *PRINT], two_nodes("slurm")),
    "srun, PMI 2": ("srun", ["srun", "--mpi=pmi2", *TASKS, *PRINT], two_nodes("slurm")),
    "srun, PMIx": ("srun", ["srun", "--mpi=pmix", *TASKS, *PRINT], two_nodes("slurm")),
    "srun, uneven nodes": ("srun", ["srun", "-n3", "-N2", "-m", "plane=2", *PRINT], UNEVEN),
    # Neither is taken for the step of its daemons.
    "salloc, Open MPI": (
        "srun",
        ["salloc", *TASKS, *OPENMPI, "-np", "4", "--map-by", "ppr:2:node", *PRINT],
        two_nodes("openmpi"),
    ),
    "salloc, MPICH": ("srun", ["salloc", *TASKS, *MPICH, "-n", "4", "-ppn", "2", *PRINT], two_nodes("mpich")),
}
SLOW = {
    *("torchrun, group", "torchrun, virtual local ranks", "Open MPI, a process beside it"),
    *("srun, PMI 2", "salloc, MPICH"),
}


@pytest.mark.parametrize(
    "launch", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAUNCHES]
)
def test_the_processes_of_each_launcher_detect_their_rank_world_size_and_node(
    launch: str, request: pytest.FixtureRequest
) -> None:
    launcher, command, expected = LAUNCHES[launch]
    need(launcher)
    environ = request.getfixturevalue("cluster") if launcher == "srun" else None
    assert count(seen(run(command, environ)), *WHERE) == expected


def test_a_slurm_batch_script_is_a_single_process_and_srun_in_it_starts_four_ranks(cluster, tmp_path):
    script = tmp_path / "job.sh"
    words = " ".join(PRINT)
    script.write_text(f"#!/bin/bash\n{words}\nexport WORLD_SIZE=$SLURM_NTASKS\nsrun {words}\n")
    run(["sbatch", "--wait", *TASKS, "-o", str(tmp_path / "out"), str(script)], cluster)
    alone, *step = seen((tmp_path / "out").read_text())
    assert count([alone], *WHERE) == one_node("single", 1)
    assert count(step, *WHERE) == two_nodes("slurm")


@pytest.mark.slow
def test_a_torchrun_agent_on_each_node_of_a_slurm_step_makes_one_world_of_four_ranks(cluster, tmp_path):
    # Both agents on one machine, told their node by Slurm: the step has 2 tasks, the world 4 ranks.
    agent = tmp_path / "agent.sh"
    agent.write_text(
        "#!/bin/bash\n"
        f"exec {' '.join(TORCHRUN)} --nnodes=2 --node-rank=$SLURM_NODEID --nproc-per-node=2"
        f" --master-addr=127.0.0.1 --master-port={free_port()} {PRINT[1]}\n"
    )
    out = run(["srun", "-n2", "-N2", "bash", str(agent)], cluster)
    assert count(seen(out), *WHERE) == two_nodes("torchrun")


def test_rank_variables_left_over_from_a_shell_are_an_error_in_the_tasks_of_srun(cluster):
    with pytest.raises(AssertionError) as caught:
        run(["srun", "-n2", "-N1", *PRINT], cluster, RANK="0", WORLD_SIZE="1")
    assert str(caught.value).count("contradict each other") >= 1
    assert seen(str(caught.value)) == []
