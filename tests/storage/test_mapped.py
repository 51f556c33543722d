"""Mapped files read as the file, also after fork, and a truncated one is an error instead of a crash."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankfeed.columns.pointers import file_of
from rankfeed.errors import CorruptError, SourceError
from rankfeed.storage.mapped import map_file
from rankfeed.storage.truncation import check_not_truncated


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


def _sum_in_child(values: Any, results: Any) -> None:
    results.put(int(values.sum()))


def test_a_forked_child_reads_what_its_parent_mapped(tmp_path: Path) -> None:
    np.arange(1 << 20).tofile(tmp_path / "numbers")
    values = map_file(tmp_path / "numbers").view(np.int64)
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    child = context.Process(target=_sum_in_child, args=(values, results))
    child.start()
    assert results.get(timeout=60) == int(values.sum())
    child.join()


def test_a_truncated_file_is_named_and_other_changes_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    np.arange(4096).tofile(path)
    values = map_file(path).view(np.int64)[10:].reshape(-1, 2)
    check_not_truncated(file_of(values), path)
    check_not_truncated(file_of(values.copy()), path)
    path.unlink()
    check_not_truncated(file_of(values), path)  # the mapping keeps the file
    np.arange(4096).tofile(path)
    values = map_file(path).view(np.int64)[10:]
    os.truncate(path, 8000)
    with pytest.raises(CorruptError, match=r"32768 bytes[\s\S]*8000 bytes[\s\S]*numbers"):
        check_not_truncated(file_of(values), path)
