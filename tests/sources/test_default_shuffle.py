"""`shuffle=True` is decided by the decoded size of all columns, and by nothing else."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.support.tables import write_table

import rankfeed as rf

MIB = 1 << 20


def write(folder: Path, size: int, form: str) -> Path:
    """Files of about this decoded size: one of compressible rows of 1 KiB and 8 bytes, under many names."""
    rows = 16 * 1024
    values = pa.FixedSizeListArray.from_arrays(np.zeros(rows * 256, np.float32), 256)
    table = pa.table({"vector": values, "label": np.zeros(rows, np.int64)})
    suffix = "parquet" if form == "parquet" else "arrow"
    first = write_table(table, folder / f"0.{suffix}", compression=None if form == "plain" else "zstd")
    for index in range(1, size // table.nbytes):
        os.link(first, folder / f"{index}.{suffix}")
    return folder


def kind_of(source: Any, **options: Any) -> str:
    return rf.Loader(source, 8, shuffle=True, topology=rf.Topology(), **options).plan.shuffle


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_shuffle_true_is_global_up_to_512_mib_of_decoded_data_and_else_window(tmp_path: Path, form: str) -> None:
    small, large = (write(tmp_path / name, size, form) for name, size in (("s", 450 * MIB), ("l", 560 * MIB)))
    assert kind_of(rf.open(small)) == "global"
    assert kind_of(rf.open(large)) == "window"
    # Neither columns nor caches nor batches change it.
    assert kind_of(rf.open(large, columns=["label"])) == "window"
    assert kind_of(rf.open(large), columns=["label"]) == "window"
    assert kind_of(rf.open(small, columns=["label"], cache_bytes=1 * MIB)) == "global"
    assert kind_of(rf.open(large, cache_bytes=8 << 30)) == "window"
    # Of several, the sum; of a part, the whole.
    assert kind_of(rf.concat([rf.open(small), rf.open(small)])) == "window"
    assert kind_of(rf.open(large).select(range(100))) == "window"


def test_shuffle_true_is_global_for_530_mib_that_are_read_in_place(tmp_path: Path) -> None:
    source = rf.open(write(tmp_path / "p", 530 * MIB, "plain"))
    assert source.decoded_bytes == 0
    assert source.cached_blocks is None
    assert kind_of(source) == "global"


def test_cached_blocks_is_the_number_of_decoded_blocks_that_fit_cache_bytes(tmp_path: Path) -> None:
    source = rf.open(write(tmp_path / "p", 560 * MIB, "parquet"), cache_bytes=56 * MIB)
    assert source.cached_blocks == pytest.approx(len(source.blocks) / 10, abs=1)
