"""Writing on ranks that real launchers start."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.launch.test_topology_launchers import run
from tests.support.launchers import MPICH, OPENMPI, need
from tests.support.marks import slow

import rankfeed as rf

SCRIPT = Path(__file__).parent.parent / "writer" / "rank_job.py"
LAUNCH = {"openmpi": [*OPENMPI, "-np", "3"], "mpich": [*MPICH, "-n", "3"], "srun": ["srun", "-n3", "-N2"]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = ({"id": i, "x": np.zeros(i % 4)} for i in range(600))
    folder = tmp_path_factory.mktemp("ranks")
    rf.write(rows, folder / "source", shard_bytes=3000, progress=False)
    return folder / "source"


@pytest.mark.parametrize("launcher", ["mpich", *map(slow, ("openmpi", "srun"))])
def test_three_ranks_of_a_launcher_write_one_dataset_and_get_its_fingerprint(
    launcher: str, source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need(launcher)
    environ = request.getfixturevalue("cluster") if launcher == "srun" else None
    arguments = [source, tmp_path / "p", tmp_path, "", 20]
    run([*LAUNCH[launcher], sys.executable, str(SCRIPT), *map(str, arguments)], environ)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert Counter(outcome["fingerprint"] for outcome in told) == {rf.open(tmp_path / "p").fingerprint: 3}
    assert not (tmp_path / "p" / ".rankfeed-write").exists()
