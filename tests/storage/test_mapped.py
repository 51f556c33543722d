"""What is mapped reads as the file, and what of it is resident stays bounded."""

import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from rankfeed.errors import SourceError
from rankfeed.storage import map_file, mapped, touched

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    np.arange(160 * MIB // 8).tofile(path)
    return path


def test_the_array_is_the_file_and_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    array = map_file(tmp_path / "file")
    assert array.tobytes() == b"abc"
    assert not array.flags.writeable
    (tmp_path / "empty").write_bytes(b"")
    assert len(map_file(tmp_path / "empty")) == 0


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere"):
        map_file(tmp_path / "nowhere")
    with pytest.raises(SourceError):
        map_file(tmp_path)


def test_resident_pages_stay_bounded_and_values_right_under_threads(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "RESIDENT_BYTES", 16 * MIB)
    monkeypatch.setattr(mapped, "CHECK_BYTES", MIB)
    values = map_file(file).view(np.int64)
    process = psutil.Process()
    before = process.memory_info().shared
    wrong: list[int] = []
    most = [0]

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(2000):
            start = int(rng.integers(len(values) - 8192))
            touched(lambda: 65536)
            if int(values[start : start + 8192].sum()) != 8192 * start + 8191 * 4096:
                wrong.append(start)
            most[0] = max(most[0], process.memory_info().shared - before)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert most[0] < 48 * MIB, "160 MiB were read, 16 MiB may stay"


def _sum_in_child(values: np.ndarray, results: "multiprocessing.Queue[int]") -> None:
    touched(lambda: values.nbytes)
    results.put(int(values[:: 1 << 12].sum()))


def test_a_forked_child_reads_on_even_while_the_parent_held_the_lock(file: Path) -> None:
    values = map_file(file).view(np.int64)
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    with mapped._residency._lock:
        child = context.Process(target=_sum_in_child, args=(values, results))
        child.start()
    assert results.get(timeout=60) == int(values[:: 1 << 12].sum())
    child.join()


def test_a_machine_that_says_nothing_of_memory_is_left_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(mapped, "CHECK_BYTES", 0)
    monkeypatch.setattr(mapped, "_shared_resident_bytes", lambda: None)
    values = map_file(file)
    touched(lambda: values.nbytes)
    assert os.path.getsize(file) == len(values)
