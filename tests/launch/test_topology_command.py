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
    whole = rf.Schedule(rf.Plan(64), batch_size=4 * ranks, topology=rf.Topology()).batch(0)
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
def test_topology_check_prints_all_ranks_and_their_nodes_under_each_launcher(
    launcher: str, data: Path, tmp_path: Path, request
) -> None:
    command, ranks, places = LAUNCHES[launcher]
    need("srun" if launcher == "slurm" else launcher)
    environ = request.getfixturevalue("cluster") if launcher == "slurm" else None
    told = checked([*command, *TOPOLOGY], ranks, data, tmp_path, environ)
    assert told["launcher"] == launcher
    assert [(row["node"], row["local_rank"]) for row in told["ranks"]] == places
