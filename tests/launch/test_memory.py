"""The anonymous and shared memory of a rank does not grow with the dataset."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import jobs
from tests.support.marks import slow, soak
from tests.support.tar import write_tar

import rankfeed as rf

SCRIPT = Path(__file__).parent / "jobs" / "memory.py"


def rows(kind: str, nbytes: int) -> Iterator[dict[str, Any]]:
    """Ragged rows of 4 to 60 KB, or rows of 2 KB."""
    rng = np.random.default_rng(0)
    if kind == "small rows":
        noise = rng.integers(0, 50_000, (4096, 512), dtype=np.int32)
        return ({"x": noise[i % 4096]} for i in range(nbytes // 2048))
    sound = rng.standard_normal((4096, 64), dtype=np.float32)
    lengths = rng.integers(16, 241, nbytes // (128 * 64 * 4)).tolist()
    return ({"x": sound[i % 3000 :][:length]} for i, length in enumerate(lengths))


def own_memory(data: Path, folder: Path, steps: int) -> int:
    """Median RssAnon + RssShmem of the ranks once they have read for a while, in bytes."""
    folder.mkdir()
    jobs.run(jobs.torchrun(2, SCRIPT, data, folder, steps), folder / "log", 600)
    figures = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return max(int(figure["median"]) for figure in figures)


def write(kind: str, nbytes: int, path: Path) -> None:
    if kind != "tars":
        rf.write(rows(kind, nbytes), path, progress=False)
        return
    content = np.random.default_rng(0).bytes(60_000)
    for shard in range(8):
        write_tar(path / f"{shard}.tar", ((f"{i:06d}.bin", content) for i in range(nbytes // 8 // len(content))))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "nbytes", "steps"),
    [
        slow("large rows", 64 << 20, 1500),
        soak("tars", 64 << 20, 1500),
        soak("large rows", 1 << 30, 6000),
        soak("small rows", 1 << 30, 6000),
    ],
)
def test_the_memory_of_a_rank_is_the_same_for_eight_times_the_data(
    kind: str, nbytes: int, steps: int, tmp_path: Path
) -> None:
    sizes, used = [], []
    for name, times in (("one", 1), ("eight", 8)):
        path = tmp_path / name
        write(kind, nbytes * times, path)
        sizes.append(sum(file.stat().st_size for pattern in ("*.arrow", "*.tar") for file in path.glob(pattern)))
        used.append(own_memory(path, tmp_path / f"run-{name}", steps))
        shutil.rmtree(path)
    pairs = zip(sizes, used, strict=True)
    said = "; ".join(f"{size >> 20} MiB of data: {own >> 20} MiB of memory" for size, own in pairs)
    print(f"\n{kind}: {said}")
    assert sizes[1] > 7 * sizes[0]
    assert abs(used[1] - used[0]) <= 0.1 * used[0], said
