"""The agreed stop among real processes, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support import jobs
from tests.support.environ import of_no_launcher
from tests.support.marks import soak

SCRIPT = Path(__file__).parents[1] / "jobs" / "streams.py"
RANKS = 3


def seen(found: list[Any], name: str) -> Counter[int]:
    told = [rank[name] for rank in found]
    assert all(isinstance(report, list) for report in told), told
    assert len({len(report) for report in told}) == 1, "ranks took different numbers of steps"
    return Counter(number for steps in told for rows in steps for number in rows)


def everything(lengths: list[int]) -> Counter[int]:
    return Counter(rank + len(lengths) * number for rank, size in enumerate(lengths) for number in range(size))


@pytest.mark.timeout(300)
def test_gloo_ranks_reading_streams_take_equal_steps_and_raise_each_others_errors(tmp_path: Path) -> None:
    jobs.run(jobs.torchrun(RANKS, SCRIPT, tmp_path, "cases"), tmp_path / "log", 240)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for name in ("one", "one, workers", "one, resumed"):
        assert seen(found, name) == Counter(range(40))
    assert found[0]["one"] == found[0]["one, workers"]
    assert seen(found, "drop, resumed") == everything([18, 18, 18])
    assert seen(found, "pad, resumed") == everything([23, 8, 0])
    assert "ValueError: a broken shard" in found[1]["failing"]
    for rank in (0, 2):
        assert "the stream of rank 1 failed, so all ranks stop" in found[rank]["failing"]
        assert "ValueError: a broken shard" in found[rank]["failing"]
    lists = {"x": "torch.float64, 2", "x_lengths": "torch.int64, 1", "valid": "torch.bool, 1"}
    for rank in range(RANKS):
        assert found[rank]["fields, workers"] == [lists] * 3, "agreed on before the first batch"
        assert "int64" in found[rank]["fields"]
        assert "float64" in found[rank]["fields"]
        assert "values of field 'x' differ in type" in found[rank]["no fields"]
        assert "field 'x'" in found[rank]["no fields on one"]
        assert "float64" in found[rank]["late"]
        assert "rank 1, epoch 0, step 3" in found[rank]["late"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["killed", soak("left")])
def test_a_rank_that_ends_while_reading_a_stream_raises_an_error_on_the_other_rank(
    how: str, tmp_path: Path
) -> None:
    """Started without torchrun, which would end the survivors before they can say anything."""
    environ = of_no_launcher() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(jobs.free_port())}
    environ |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = []
    try:
        for rank in range(2):
            with (tmp_path / f"log-{rank}").open("wb") as log:
                command = [sys.executable, str(SCRIPT), str(tmp_path), how]
                given = environ | {"RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=given, stdout=log, stderr=log, start_new_session=True))
        for rank in ranks:
            rank.wait(120)
    finally:
        jobs.end([psutil.Process(rank.pid) for rank in ranks if rank.poll() is None])
    assert not (tmp_path / "1.json").exists()
    said = json.loads((tmp_path / "0.json").read_text())
    assert "another rank ended" in said
    assert "see the logs of the other ranks" in said
