"""The four reports that this project began with: what the framework alone does today, and what it does with us."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import webdataset as wds
from tests.integrations.jobs.report_graphs import NUMBERS
from tests.launch.test_topology_launchers import run
from tests.support import jobs
from tests.support.launchers import OPENMPI, need

SCRIPT = Path(__file__).parents[1] / "integrations" / "jobs" / "reports.py"
RANKS = 2
ROWS = [3 + 7 * number % 11 for number in range(22)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def told(out: Path, cell: str, ranks: int = RANKS) -> list[Any]:
    """What each rank of a launch by torchrun got."""
    jobs.run(jobs.torchrun(ranks, SCRIPT, out, cell), out / f"{cell}.log", 250)
    return read(out, cell, ranks)


def read(out: Path, cell: str, ranks: int) -> list[Any]:
    return [json.loads((out / f"{cell}-{rank}.json").read_text()) for rank in range(ranks)]


def counted(ranks: list[list[list[int]]]) -> Counter[int]:
    return Counter(each for batches in ranks for batch in batches for each in batch)


def test_lance_reads_each_row_once_over_ranks_and_workers(tmp_path: Path) -> None:
    lance.write_dataset(pa.table({"id": range(1000)}), str(tmp_path / "rows.lance"), max_rows_per_file=100)
    alone = counted(told(tmp_path, "lance_alone"))
    assert alone == Counter(dict.fromkeys(range(1000), 2)), "Lance has learnt about workers: tell so"
    fed = told(tmp_path, "lance_fed")
    assert counted(fed) == Counter(range(1000))
    assert len({len(batches) for batches in fed}) == 1


def test_webdataset_deals_three_shards_to_two_ranks_evenly_with_nothing_to_configure(tmp_path: Path) -> None:
    for shard in range(3):
        with wds.TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for number in range(5):
                writer.write({"__key__": f"{5 * shard + number:03}", "cls": number})
    alone = told(tmp_path, "shards_alone")
    assert all("you need to add an explicit nodesplitter" in rank["plain"] for rank in alone)
    assert [sum(map(len, rank["split"])) for rank in alone] == [10, 5], "WebDataset splits evenly: tell so"
    fed = told(tmp_path, "shards_fed")
    assert counted(fed) == Counter(range(15))
    assert len({len(batches) for batches in fed}) == 1


def test_geometric_processes_once_under_mpirun(tmp_path: Path) -> None:
    need("openmpi")
    built = {}
    for cell in ("graphs_alone", "graphs_fed"):
        run([*OPENMPI, "-n", "4", sys.executable, str(SCRIPT), str(tmp_path), cell], timeout=250)
        built[cell] = len(list(tmp_path.glob(f"{cell}-by-*")))
    # All four, unless the machine holds one of them up for seconds.
    assert 2 <= built["graphs_alone"] <= 4
    assert built["graphs_fed"] == 1
    assert read(tmp_path, "graphs_fed", 4) == [{"numbers": list(NUMBERS)}] * 4


def test_lightning_takes_equal_steps_over_arrays_of_different_lengths(tmp_path: Path) -> None:
    alone = told(tmp_path, "trainer_alone")
    assert [rank["train"] for rank in alone] == [6, 5], "one rank trains while the other validates"
    assert any("error" in rank for rank in alone), "they wait for each other until the group gives up"
    fed = told(tmp_path, "trainer_fed")
    assert fed == [{"train": 6, "val": 6, "mean": sum(ROWS) / len(ROWS)}] * RANKS
