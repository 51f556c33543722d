"""Packed data are read in place, and damage is an error that names the shard, never another row."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import rankfeed as rf
from rankfeed.columns.columns import Ragged
from rankfeed.errors import CorruptError

ROWS = [
    {"x": np.full((i % 4, 2), i, np.float32), "y": i, "text": "é" * (i % 3), "raw": bytes([i]) * (i % 5)}
    for i in range(200)
]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "p"
    rf.write(ROWS, folder, shard_bytes=2000, progress=False)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "p"))


def test_blocks_are_what_is_read_in_one_go(tmp_path: Path) -> None:
    rows = ({"x": np.zeros(1 << 20, np.uint8)} for _ in range(10))
    source = rf.write(rows, tmp_path / "p", progress=False)
    assert source.blocks.tolist() == [4, 4, 2]
    assert source.blocks.dtype == np.int64


def test_a_shard_with_other_columns_is_refused(folder: Path, tmp_path: Path) -> None:
    rf.write([{"z": 1.0}], tmp_path / "q", progress=False)
    path = folder / "shard-00000.arrow"
    other = (tmp_path / "q" / "shard-00000.arrow").read_bytes()
    manifest = (folder / "rankfeed.json").read_text()
    (folder / "rankfeed.json").write_text(
        manifest.replace(f'"bytes": {path.stat().st_size}', f'"bytes": {len(other)}', 1)
    )
    path.write_bytes(other)
    with pytest.raises(CorruptError, match="other columns"):
        rf.open(folder)[0]


@pytest.mark.parametrize("value", [-1, 10**6, 2**62, -(2**63)])
def test_an_offset_that_leads_astray_is_an_error(value: int, folder: Path) -> None:
    source = rf.open(folder)
    column = source.fetch([0])["x"]
    assert isinstance(column, Ragged)
    offsets = np.array([0, 0, 1, 3, 6, 6], np.int64).tobytes()
    path = folder / "shard-00000.arrow"
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(
        content.replace(offsets, offsets[:16] + value.to_bytes(8, "little", signed=True) + offsets[24:])
    )
    with pytest.raises(CorruptError, match=r"shard-00000[\s\S]*'x'"):
        rf.open(folder).fetch([1, 2, 3])
