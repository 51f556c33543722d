"""``rankfeed topology --check`` under real launchers: all ranks meet and agree, or all of them end."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.launch.test_topology_launchers import run
from tests.support.launchers import MPICH, OPENMPI, TORCHRUN, need

import rankfeed as rf

TOPOLOGY = [sys.executable, "-c", "from rankfeed.cli import main; main()", "topology", "--check"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "data"
    rf.write(({"x": i} for i in range(64)), path, progress=False)
    return path


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


# launcher: its command, the number of ranks, the node and local rank of each
LAUNCHES = {
    "torchrun": ([*TORCHRUN, "--standalone", "--nproc-per-node=3", "--no-python"], 3, [(0, 0), (0, 1), (0, 2)]),
    "openmpi": ([*OPENMPI, "-n", "3"], 3, [(0, 0), (0, 1), (0, 2)]),
    "mpich": ([*MPICH, "-n", "3"], 3, [(0, 0), (0, 1), (0, 2)]),
    "slurm": (["srun", "-n4", "-N2", "--ntasks-per-node=2"], 4, [(0, 0), (0, 1), (1, 0), (1, 1)]),
}


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_all_ranks_of_a_launch_meet(launcher: str, data: Path, tmp_path: Path, request) -> None:
    command, ranks, places = LAUNCHES[launcher]
    need("srun" if launcher == "slurm" else launcher)
    environ = request.getfixturevalue("cluster") if launcher == "slurm" else None
    told = checked([*command, *TOPOLOGY], ranks, data, tmp_path, environ)
    assert told["launcher"] == launcher
    assert [(row["node"], row["local_rank"]) for row in told["ranks"]] == places


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
