"""The training script of the examples under each launcher: it resumes, and each sample is read once."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.launch.slurm import slurm
from tests.launch.test_topology_launchers import run
from tests.support import jobs
from tests.support.launchers import LAUNCHERS, TORCHRUN, need
from tests.support.marks import soak
from tests.support.network import Host, Network, need_network, network

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "torchrun_ddp.py"
SAMPLES = 6000
Place = tuple[int, int]

pytestmark = pytest.mark.timeout(900)

BY_MPI = pytest.mark.parametrize("launcher", [soak("openmpi"), "mpich"])


def attempts(run_folder: Path) -> dict[Place, list[list[list[int]]]]:
    """What the ranks of each start of the job read, by where they began: epoch, position, sample ids a line."""
    found: dict[Place, list[list[list[int]]]] = {}
    for path in sorted(run_folder.glob("read-*.txt")):
        text = path.read_text()
        if "\n" not in text:
            continue  # it was killed, or is, before it wrote where it began
        begun, *lines = (
            [int(word) for word in line.split()] for line in text[: text.rfind("\n") + 1].splitlines()
        )
        found.setdefault((begun[0], begun[1]), []).append(lines)
    return dict(sorted(found.items()))


def starts(run_folder: Path) -> list[tuple[Place, int]]:
    """Where each start of the job began, and on how many ranks."""
    return [(begun, len(ranks)) for begun, ranks in attempts(run_folder).items()]


def check_read_once(run_folder: Path, epochs: int) -> None:
    """Of each start counts what it read up to the checkpoint at which the next began."""
    found = attempts(run_folder)
    ends = [*list(found)[1:], (epochs, 0)]
    counts: Counter[Place] = Counter()
    for ranks, end in zip(found.values(), ends, strict=True):
        kept = [[line for line in lines if (line[0], line[1]) <= end] for lines in ranks]
        assert len({len(lines) for lines in kept}) == 1  # in equal steps
        counts.update((line[0], sample) for lines in kept for line in lines for sample in line[2:])
    assert counts == Counter({(epoch, sample): 1 for epoch in range(epochs) for sample in range(SAMPLES)})


def reached(run_folder: Path, start: int, epoch: int, position: int) -> bool:
    """Whether the start of that number has come so far."""
    begun = list(attempts(run_folder).values())
    return len(begun) > start and any(lines[-1][:2] >= [epoch, position] for lines in begun[start] if lines)


def kill_one(run_folder: Path, job: int) -> None:
    """SIGKILL rank 1 of what runs now."""
    started = {int(path.stem.split("-")[-1]) for path in run_folder.glob("read-1-of-*.txt")}
    (pid,) = started & {process.pid for process in jobs.family(job)}
    os.kill(pid, signal.SIGKILL)


@pytest.mark.soak
def test_the_example_resumes_after_kills_first_restarted_by_torchrun_and_then_on_three_ranks(
    tmp_path: Path,
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    # Else the restarted ranks read the addresses of the dead ones out of the agent's store.
    torchrun = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *TORCHRUN, "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "--max-restarts=1", str(SCRIPT), str(folder), "--epochs", "3"]
    with jobs.started(command, log) as job:
        jobs.until(lambda: reached(folder, 0, 0, 2000), job, log, 250)
        kill_one(folder, job.pid)
        jobs.until(lambda: reached(folder, 1, 1, 1500), job, log, 250)
        kill_one(folder, job.pid)
        assert job.wait(120) != 0, log.read_text()  # it was restarted once, as it may be
    assert [ranks for _, ranks in starts(folder)] == [2, 2]
    jobs.run(jobs.torchrun(3, SCRIPT, folder, "--epochs", 3, "--workers", 0), tmp_path / "log-3", 250)
    (first, _), (second, _), (third, ranks) = starts(folder)
    assert first == (0, 0)
    assert (0, 0) < second < third
    assert 0 < second[1] < SAMPLES  # in mid-epoch, both times
    assert 0 < third[1] < SAMPLES
    assert ranks == 3
    check_read_once(folder, 3)


@pytest.mark.soak
def test_the_example_started_again_after_its_last_step_reads_no_sample_again(tmp_path: Path) -> None:
    for name in ("log-1", "log-2"):
        jobs.run(jobs.torchrun(1, SCRIPT, tmp_path / "run", "--epochs", 1, "--every", 250), tmp_path / name, 250)
    check_read_once(tmp_path / "run", 1)


def agent(net: Network, host: Host, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """torchrun on one of the hosts, whose job takes two ranks of each host that there is."""
    meet = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
    place = [*meet, f"--rdzv-endpoint={net.hosts[0].address}:29400", "--rdzv-conf=last_call_timeout=5"]
    command = [*TORCHRUN, *place, str(SCRIPT), str(folder), *arguments]
    log = folder.with_name(f"log-{host.name}")
    return host.start(command, log, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@pytest.mark.soak
@pytest.mark.parametrize(("change", "epochs", "ranks"), [("lost", 3, [4, 2]), ("joined", 20, [2, 4])])
def test_an_elastic_torchrun_job_continues_when_a_host_is_lost_or_joins(
    change: str, epochs: int, ranks: list[int], tmp_path: Path
) -> None:
    need_network()
    folder, log, arguments = tmp_path / "run", tmp_path / "log-h1", ["--epochs", str(epochs)]
    with network(2, tmp_path / "net") as net:
        agents = [agent(net, host, folder, *arguments) for host in net.hosts[: ranks[0] // 2]]
        jobs.until(lambda: reached(folder, 0, 0, 2000), agents[0], log, 250)
        if change == "lost":
            net.hosts[1].lose()
            agents.pop()
        else:
            agents.append(agent(net, net.hosts[1], folder, *arguments))
        assert [each.wait(400) for each in agents] == [0] * len(agents), log.read_text()
    assert [count for _, count in starts(folder)] == ranks
    check_read_once(folder, epochs)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[2], soak([4, 2])], ids=str)
def test_the_example_slurm_batch_script_trains_on_two_nodes_and_resumes(ranks: list[int], tmp_path: Path) -> None:
    need("srun")
    folder, out = tmp_path / "run", tmp_path / "out"
    place = {"MASTER_ADDR": "127.0.0.1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with slurm(nodes=2, cpus=4) as environ:
        for epochs, tasks in enumerate(ranks, start=1):
            options = [f"--ntasks-per-node={tasks // 2}"]
            script = [str(EXAMPLES / "slurm_train.sbatch"), sys.executable, str(SCRIPT), str(folder)]
            command = ["sbatch", "--wait", f"--chdir={tmp_path}", f"--output={out}", *options, *script]
            try:
                run([*command, "--epochs", str(epochs)], environ, 250, MASTER_PORT=str(jobs.free_port()), **place)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{out.read_text() if out.exists() else ''}") from None
    assert f"{ranks[0]} ranks agree (slurm, 2 nodes)" in out.read_text()
    assert [count for _, count in starts(folder)] == ranks
    check_read_once(folder, len(ranks))


@pytest.mark.soak
@BY_MPI
def test_the_example_trains_under_mpi_and_resumes_with_more_ranks(launcher: str, tmp_path: Path) -> None:
    need(launcher)
    folder = tmp_path / "run"
    for ranks, epochs in ((2, 1), (3, 2)):
        script = [sys.executable, str(SCRIPT), str(folder), "--epochs", str(epochs)]
        words = [*LAUNCHERS[launcher], "-n", str(ranks), *script]
        run(words, timeout=250, MASTER_PORT=str(jobs.free_port()))
    assert [ranks for _, ranks in starts(folder)] == [2, 3]
    check_read_once(folder, 2)


def check_ledgers(run_folder: Path, ranks: int, samples: int, epochs: int) -> None:
    """Each sample once an epoch over the ranks, in equal steps, in another order each epoch."""
    ledgers = [(run_folder / f"read-{rank}-of-{ranks}.txt").read_text().splitlines() for rank in range(ranks)]
    steps = [[[int(word) for word in line.split()] for line in ledger] for ledger in ledgers]
    assert len({len(of_rank) for of_rank in steps}) == 1
    counts = Counter((epoch, sample) for of_rank in steps for epoch, *ids in of_rank for sample in ids)
    assert counts == Counter({(epoch, sample): 1 for epoch in range(epochs) for sample in range(samples)})
    first, second = ([ids for epoch, *ids in steps[0] if epoch == index] for index in range(2))
    assert first != second


@pytest.mark.soak
def test_the_lance_example_reads_each_sample_once_under_torchrun(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    jobs.run(jobs.torchrun(2, EXAMPLES / "lance_torchrun.py", folder), log, 250)
    check_ledgers(folder, 2, samples=3001, epochs=2)
    assert "0 missing, 0 repeated" in log.read_text()


@pytest.mark.slow
@BY_MPI
def test_the_pyg_example_reads_each_sample_once_under_mpi(launcher: str, tmp_path: Path) -> None:
    need(launcher)
    words = [*LAUNCHERS[launcher], "-n", "2", sys.executable, str(EXAMPLES / "pyg_mpi.py"), str(tmp_path / "run")]
    said = run(words, timeout=250, MASTER_PORT=str(jobs.free_port()))
    check_ledgers(tmp_path / "run", 2, samples=1003, epochs=2)
    assert "0 missing, 0 repeated" in said
