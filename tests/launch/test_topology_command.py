"""``rankfeed topology --check`` under real launchers: all ranks meet and agree, or all of them end."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.launch.slurm import slurm
from tests.launch.test_topology_launchers import run
from tests.support.launchers import LAUNCHERS, TORCHRUN, need

import rankfeed as rf

TOPOLOGY = [sys.executable, "-c", "from rankfeed.cli import main; main()", "topology", "--check"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "data"
    rf.write(({"x": i} for i in range(64)), path, progress=False)
    return path


@pytest.fixture(scope="module")
def cluster():
    need("srun")
    with slurm(nodes=2, cpus=4) as environ:
        yield environ


def checked(
    command: list[str], ranks: int, data: Path, folder: Path, environ: dict[str, str] | None = None
) -> dict:
    """What rank 0 prints: each rank once, and each reads another part of the first global batch."""
    asked = ["--ranks", str(ranks), "--data", str(data), "--batch-size", "4", "--json", "--folder", str(folder)]
    told = json.loads(run([*command, *asked], environ, 200))
    assert Counter(row["rank"] for row in told["ranks"]) == Counter(range(ranks))
    first = Counter(sample for row in told["ranks"] for sample in row["reads_first"])
    topology = rf.Topology()
    whole = rf.Schedule(rf.Plan(64), batch_size=4 * ranks, topology=topology).batch(0)
    assert first == Counter(whole.tolist())
    assert not list(folder.glob(".rankfeed*"))
    return told


@pytest.mark.slow
def test_the_ranks_of_torchrun_meet(data, tmp_path):
    told = checked([*TORCHRUN, "--standalone", "--nproc-per-node=3", "--no-python", *TOPOLOGY], 3, data, tmp_path)
    assert told["launcher"] == "torchrun"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_the_ranks_of_mpi_meet(launcher, data, tmp_path):
    need(launcher)
    told = checked([*LAUNCHERS[launcher], "-n", "3", *TOPOLOGY], 3, data, tmp_path)
    assert told["launcher"] == launcher


@pytest.mark.slow
def test_the_tasks_of_a_slurm_step_meet(cluster, data, tmp_path):
    told = checked(["srun", "-n4", "-N2", "--ntasks-per-node=2", *TOPOLOGY], 4, data, tmp_path, cluster)
    assert told["launcher"] == "slurm"
    assert [(row["node"], row["local_rank"]) for row in told["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.slow
def test_a_torchrun_in_a_batch_script_is_told_from_the_script(cluster, data, tmp_path):
    script = tmp_path / "job.sh"
    words = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--no-python", *TOPOLOGY, "--json", "--folder"]
    quoted = " ".join(f"'{word}'" for word in [*words, str(tmp_path)])
    alone = " ".join(f"'{word}'" for word in [*TOPOLOGY[:-1], "--json"])
    script.write_text(f"#!/bin/bash\n{alone}\n{quoted}\n")
    out = tmp_path / "out"
    run(["sbatch", "--wait", "-n4", "-N1", "-o", str(out), str(script)], cluster, 200)
    batch, agreed = (json.loads(line) for line in out.read_text().splitlines() if line.startswith("{"))
    assert (batch["launcher"], batch["world_size"]) == ("single", 1)
    assert batch["found_in"].startswith("no variable: SLURM_JOB_ID without a step")
    assert (agreed["launcher"], len(agreed["ranks"])) == ("torchrun", 2)


@pytest.mark.slow
def test_two_processes_that_take_themselves_for_one_rank_end_all_tasks(cluster, tmp_path):
    # What a wrapper does that sets Slurm's variables by itself, wrongly on one task.
    wrapper = tmp_path / "wrapper.sh"
    quoted = " ".join(f"'{word}'" for word in [*TOPOLOGY, "--timeout", "60", "--folder", str(tmp_path)])
    wrapper.write_text(
        f"#!/bin/bash\n[ $SLURM_PROCID = 2 ] && export SLURM_PROCID=1\n{quoted} 2>&1\necho status $?\n"
    )
    out = run(["srun", "-n3", "-N1", "bash", str(wrapper)], cluster, 200)
    assert out.count("status 1") == 3, out
    assert out.count("rank 1 was reported by 2 processes") == 3, out
    assert out.count("rank 2 did not report") == 3, out
