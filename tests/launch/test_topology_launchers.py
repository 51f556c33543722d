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
from tests.launch.slurm import slurm
from tests.support.environ import of_no_launcher
from tests.support.jobs import end, free_port
from tests.support.launchers import MPICH, OPENMPI, TORCHRUN, need
from tests.support.packages import need_package

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


@pytest.fixture(scope="module")
def cluster():
    need("srun")
    with slurm(nodes=2, cpus=4) as environ:
        yield environ


def test_a_child_of_a_process_that_initialised_mpi_by_itself_is_alone():
    need("openmpi")
    need_package("mpi4py")
    code = f"import subprocess; from mpi4py import MPI; subprocess.run({PRINT}, check=True)"
    out = run([sys.executable, "-c", code])
    assert count(seen(out), *WHERE) == one_node("single", 1)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_of_torchrun_knows_itself(size):
    out = run([*TORCHRUN, "--standalone", f"--nproc-per-node={size}", *PRINT[1:]])
    assert count(seen(out), *WHERE) == one_node("torchrun", size)


@pytest.mark.slow
def test_every_rank_knows_itself_by_its_process_group():
    out = run([*TORCHRUN, "--standalone", "--nproc-per-node=2", *PRINT[1:], "--group"])
    assert count(seen(out), *WHERE) == one_node("torch.distributed", 2)


@pytest.mark.slow
def test_every_rank_of_virtual_local_ranks_knows_itself():
    out = run([*TORCHRUN, "--standalone", "--virtual-local-rank", "--nproc-per-node=2", *PRINT[1:]])
    assert count(seen(out), *WHERE) == Counter(("torchrun", rank, 2, 0, 2, 0, 1) for rank in range(2))


def test_every_rank_of_open_mpi_knows_itself():
    need("openmpi")
    out = run([*OPENMPI, "-np", "4", *PRINT])
    assert count(seen(out), *WHERE) == one_node("openmpi", 4)


def test_every_rank_of_mpich_knows_itself():
    need("mpich")
    out = run([*MPICH, "-n", "4", *PRINT])
    assert count(seen(out), *WHERE) == one_node("mpich", 4)


@pytest.mark.parametrize("mpi", [[], ["--mpi=pmi2"], ["--mpi=pmix"]])
def test_every_task_of_a_slurm_step_knows_itself(cluster, mpi):
    out = run(["srun", *mpi, "-n4", "-N2", "--ntasks-per-node=2", *PRINT], cluster)
    assert count(seen(out), *WHERE) == two_nodes("slurm")


def test_tasks_on_uneven_nodes_know_themselves(cluster):
    out = run(["srun", "-n3", "-N2", "-m", "plane=2", *PRINT], cluster)
    assert count(seen(out), *WHERE) == Counter(
        [("slurm", 0, 3, 0, 2, 0, 2), ("slurm", 1, 3, 1, 2, 0, 2), ("slurm", 2, 3, 0, 1, 1, 2)]
    )


def test_a_batch_script_without_srun_is_one_process_and_its_steps_are_many(cluster, tmp_path):
    script = tmp_path / "job.sh"
    words = " ".join(PRINT)
    script.write_text(f"#!/bin/bash\n{words}\nexport WORLD_SIZE=$SLURM_NTASKS\nsrun {words}\n")
    run(
        ["sbatch", "--wait", "-n4", "-N2", "--ntasks-per-node=2", "-o", str(tmp_path / "out"), str(script)],
        cluster,
    )
    alone, *step = seen((tmp_path / "out").read_text())
    assert count([alone], *WHERE) == one_node("single", 1)
    assert count(step, *WHERE) == two_nodes("slurm")


@pytest.mark.slow
def test_a_torchrun_on_each_node_of_a_step_is_one_world(cluster, tmp_path):
    # Both agents on one machine, told their node by Slurm: the step has 2 tasks, the world 4 ranks.
    agent = tmp_path / "agent.sh"
    agent.write_text(
        "#!/bin/bash\n"
        f"exec {' '.join(TORCHRUN)} --nnodes=2 --node-rank=$SLURM_NODEID --nproc-per-node=2"
        f" --master-addr=127.0.0.1 --master-port={free_port()} {PRINT[1]}\n"
    )
    out = run(["srun", "-n2", "-N2", "bash", str(agent)], cluster)
    assert count(seen(out), *WHERE) == two_nodes("torchrun")


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ([*OPENMPI, "-np", "4", "--map-by", "ppr:2:node"], "openmpi"),
        ([*MPICH, "-n", "4", "-ppn", "2"], "mpich"),
    ],
    ids=["openmpi", "mpich"],
)
def test_an_mpi_world_in_an_allocation_is_not_taken_for_the_step_of_its_daemons(cluster, command, launcher):
    need(launcher)
    out = run(["salloc", "-n4", "-N2", "--ntasks-per-node=2", *command, *PRINT], cluster)
    assert count(seen(out), *WHERE) == two_nodes(launcher)


def test_a_rank_left_over_from_a_shell_ends_every_task(cluster):
    command = ["srun", "-n2", "-N1", *PRINT]
    with pytest.raises(AssertionError) as caught:
        run(command, cluster, RANK="0", WORLD_SIZE="1")
    assert str(caught.value).count("contradict each other") >= 1
    assert seen(str(caught.value)) == []
