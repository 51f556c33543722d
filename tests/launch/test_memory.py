"""A rank's private memory does not grow with the data set."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support import jobs

import rankfeed as rf

SCRIPT = Path(__file__).parent / "jobs" / "memory.py"


def pack(path: Path, nbytes: int) -> int:
    """Ragged rows of 4 to 60 KB; returns the bytes of the files."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((4096, 64), dtype=np.float32)
    lengths = rng.integers(16, 241, nbytes // (128 * 64 * 4)).tolist()
    rf.pack(({"x": noise[i % 3000 :][:length]} for i, length in enumerate(lengths)), path, progress=False)
    return sum(file.stat().st_size for file in path.glob("*.arrow"))


def private(data: Path, folder: Path, resident: int) -> int:
    """Median private memory (USS) of the ranks in the second half of an epoch, in bytes."""
    folder.mkdir()
    jobs.run(jobs.torchrun(2, SCRIPT, data, folder, resident), folder / "log", 300)
    figures = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return max(int(each["median"]) for each in figures)


def compare(tmp_path: Path, nbytes: int, resident: int) -> None:
    sizes, used = [], []
    for name, times in (("small", 1), ("large", 8)):
        sizes.append(pack(tmp_path / name, nbytes * times))
        used.append(private(tmp_path / name, tmp_path / f"run-{name}", resident))
    megabytes = [
        f"{data >> 20} MiB of data: {uss >> 20} MiB private" for data, uss in zip(sizes, used, strict=True)
    ]
    print("\n" + "; ".join(megabytes))
    assert sizes[1] > 7 * sizes[0]
    assert abs(used[1] - used[0]) <= 0.1 * used[0], megabytes


@pytest.mark.timeout(600)
def test_private_memory_is_the_same_for_eight_times_the_data_in_small(tmp_path: Path) -> None:
    # The bound on resident mappings is lowered with the data, so that both data sets exceed it.
    compare(tmp_path, nbytes=64 << 20, resident=16 << 20)


@pytest.mark.soak
def test_private_memory_is_the_same_for_eight_times_the_data(tmp_path: Path) -> None:
    compare(tmp_path, nbytes=800 << 20, resident=0)
