"""The four reports that this project began with: what each of them asked for."""

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
ROWS = [3 + 7 * number % 11 for number in range(22)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def read(out: Path, cell: str, ranks: int = 2) -> list[Any]:
    return [json.loads((out / f"{cell}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(("cell", "size"), [("rows", 1000), ("shards", 15)])
def test_lance_rows_and_webdataset_samples_are_read_once_in_equal_steps_on_two_ranks(
    cell: str, size: int, out: Path
) -> None:
    """Over ranks and workers of Lance, and from three shards on two ranks of WebDataset."""
    ranks = read(out, cell)
    assert Counter(sample_id for batches in ranks for batch in batches for sample_id in batch) == Counter(
        range(size)
    )
    assert len({len(batches) for batches in ranks}) == 1


def test_lightning_takes_equal_steps_over_arrays_of_different_lengths(out: Path) -> None:
    assert read(out, "trainer") == [{"train": 6, "val": 6, "mean": sum(ROWS) / len(ROWS)}] * 2


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of torchrun got in all cells."""
    folder = tmp_path_factory.mktemp("reports")
    lance.write_dataset(pa.table({"id": range(1000)}), str(folder / "rows.lance"), max_rows_per_file=100)
    for shard in range(3):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(5):
                writer.write({"__key__": f"{5 * shard + number:03}", "cls": number})
    jobs.run(jobs.torchrun(2, SCRIPT, folder, "rows", "shards", "trainer"), folder / "log", 250)
    return folder


def test_a_pyg_dataset_is_processed_by_one_of_four_ranks_under_mpirun(tmp_path: Path) -> None:
    need("openmpi")
    run([*OPENMPI, "-n", "4", sys.executable, str(SCRIPT), str(tmp_path), "graphs"], timeout=250)
    assert len(list(tmp_path.glob("by-*"))) == 1
    assert read(tmp_path, "graphs", 4) == [list(NUMBERS)] * 4
