"""Ranks of a mesh whose data differ read every sample once; peers along its other dimensions read the same."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.launch.jobs.meshes import EPOCHS, SAMPLES
from tests.support import jobs

SCRIPT = Path(__file__).parent / "jobs" / "meshes.py"
#: Of four ranks, which share of the data each is to read.
CELLS = {
    "data_tensor": [0, 0, 1, 1],
    "data_context": [0, 0, 1, 1],
    "pipeline_data": [0, 1, 0, 1],
    "replicated_sharded": [0, 1, 2, 3],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks of one launch told of all meshes."""
    folder = tmp_path_factory.mktemp("meshes")
    jobs.run(jobs.torchrun(4, SCRIPT, folder), folder / "log", 300)
    return folder


def told(out: Path, name: str) -> list[Any]:
    return [json.loads((out / f"{rank}.json").read_text())[name] for rank in range(4)]


@pytest.mark.parametrize("cell", CELLS)
def test_mesh_peers_read_the_same_batches_and_the_data_shares_read_each_sample_once(cell: str, out: Path) -> None:
    ranks, share_of = told(out, cell), CELLS[cell]
    first = {share: ranks[share_of.index(share)] for share in share_of}
    assert ranks == [first[share] for share in share_of]
    for epoch in range(EPOCHS):
        steps = [share[epoch] for share in first.values()]
        assert len({len(step) for step in steps}) == 1
        assert Counter(id for step in steps for ids in step for id in ids) == Counter(range(SAMPLES))
    assert first[0][0] != first[0][1], "a new order each epoch"


def test_dimensions_of_a_mesh_are_flattened_in_the_order_in_which_they_are_named(out: Path) -> None:
    by_rank = told(out, "shares")
    assert {dims: [rank[dims] for rank in by_rank] for dims in by_rank[0]} == {
        "dp": [[0, 2], [0, 2], [1, 2], [1, 2]],
        "tp": [[0, 2], [1, 2], [0, 2], [1, 2]],
        "dp,tp": [[0, 4], [1, 4], [2, 4], [3, 4]],
        "tp,dp": [[0, 4], [2, 4], [1, 4], [3, 4]],
        "of a part": [[0, 2], [0, 2], [1, 2], [1, 2]],
    }
