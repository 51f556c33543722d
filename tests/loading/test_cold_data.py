"""Files that are not in the kernel's page cache are read ahead, and leave it behind if the user asks for it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.loading.feeds import take

import rankfeed as rf
from rankfeed import errors
from rankfeed._util.native import native_library
from rankfeed.columns.columns import Columns

ROWS, VALUES, BATCH = 1500, 16384, 8  # 64 KiB each

pytestmark = pytest.mark.skipif(
    native_library() is None, reason="without the native library, data are not read ahead"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cold") / "data"
    rows = ({"x": np.full(VALUES, number, np.int32), "id": number} for number in range(ROWS))
    rf.write(rows, path, shard_bytes=32 << 20, progress=False)
    evict(path)
    if sum(resident(path).values()) > ROWS:
        pytest.skip("this file system keeps its files in memory")
    return path


def evict(path: Path) -> None:
    for shard in path.glob("*.arrow"):
        descriptor = os.open(shard, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def resident(path: Path) -> dict[str, int]:
    """Pages of each shard in the page cache."""
    found = {}
    mincore: Any = ctypes.CDLL(None, use_errno=True).mincore
    for shard in path.glob("*.arrow"):
        size = shard.stat().st_size
        states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        with shard.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            array = np.frombuffer(mapped, np.uint8)
            address = ctypes.c_void_p(array.__array_interface__["data"][0])
            assert mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(states.ctypes.data)) == 0
            del array
        found[shard.name] = int((states & 1).sum())
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_drop_behind_removes_read_pages_from_the_page_cache(folder: Path, shuffle: bool, workers: int) -> None:
    pages = ROWS * VALUES * 4 // mmap.PAGESIZE
    left = {}
    for drop in (False, True):
        evict(folder)
        loader = rf.Loader(
            rf.open(folder), BATCH, shuffle=shuffle, num_workers=workers, drop_behind=drop, topology=rf.Topology()
        )
        ids = []
        for batch in loader:
            assert (batch["x"] == batch["id"][:, None]).all()
            ids += batch["id"].tolist()
        assert sorted(ids) == [*range(ROWS)]
        del loader, batch
        left[drop] = sum(resident(folder).values())
    assert left[False] > 0.9 * pages
    # A page in 17 has the end of a row and the start of the next one; the disk reads around what is needed.
    assert left[True] < 0.5 * pages


def test_drop_behind_with_a_source_without_mapped_files_raises_argument_error() -> None:
    with pytest.raises(errors.ArgumentError, match="drop_behind"):
        rf.Loader(rf.from_dataset([{"x": 1}]), drop_behind=True)


def test_rows_of_later_steps_are_read_into_the_page_cache_ahead(folder: Path) -> None:
    evict(folder)
    loader = rf.Loader(rf.open(folder), BATCH, shuffle=True, topology=rf.Topology())
    batches = iter(loader)
    take(batches, 4)  # the first ones wait for the disk
    needed = 60 * BATCH * VALUES * 4 // mmap.PAGESIZE  # of 64 MiB
    while sum(resident(folder).values()) < needed:
        time.sleep(0.05)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is announced; the step number 3 of the first epoch waits for the disk."""
    found: list[int] = []
    advise = Columns.advise

    def count(self: Columns, *, drop: bool = False) -> int:
        found.append(len(self))
        return advise(self, drop=drop)

    faults = iter([0, 0, 0, 1])
    monkeypatch.setattr(Columns, "advise", count)
    monkeypatch.setattr("rankfeed.loading.row_lookup._major_faults", lambda: next(faults, 1))
    return found


def test_page_cache_read_ahead_stops_after_enough_steps_on_cached_data(
    folder: Path, advised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankfeed.loading.row_lookup._COLD_STEPS", 20)
    loader = rf.Loader(rf.open(folder), BATCH, shuffle=True, topology=rf.Topology())
    for _ in range(3):
        assert sum(1 for _ in loader) == -(-ROWS // BATCH)
    assert 20 <= len(advised) <= 20 + (64 << 20) // (BATCH * VALUES * 4)


def test_two_concurrent_iterators_announce_each_step_for_read_ahead_once(folder: Path, advised: list[int]) -> None:
    loader = rf.Loader(rf.open(folder), BATCH, shuffle=True, topology=rf.Topology())
    list(zip(loader, loader, strict=True))
    assert 0 < len(advised) <= 2 * -(-ROWS // BATCH)


def test_rows_smaller_than_a_page_are_not_announced_for_read_ahead(tmp_path: Path, advised: list[int]) -> None:
    rf.write(({"x": np.full(64, number)} for number in range(ROWS)), tmp_path / "data", progress=False)
    loader = rf.Loader(rf.open(tmp_path / "data"), BATCH, shuffle=True, topology=rf.Topology())
    assert sum(1 for _ in loader) == -(-ROWS // BATCH)
    assert len(advised) <= 1
