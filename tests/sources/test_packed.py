"""Packed data are read in place, and damage is an error that names the shard, never another row."""

import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.support.seeds import fresh_seed

import rankfeed as rf
from rankfeed.columns.columns import Dense, Ragged
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.packed import PackedSource

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


def test_rows_come_in_the_order_asked_for_across_shards(pristine: Path) -> None:
    source = rf.open(pristine)
    ids = np.random.default_rng(1).integers(0, 200, 500)
    batch = source.fetch(ids)
    assert isinstance(batch["y"], Dense)
    np.testing.assert_array_equal(batch["y"].gather(), ids)
    for place, sample in zip(ids, batch.samples(), strict=True):
        np.testing.assert_array_equal(sample["x"], ROWS[place]["x"])
        assert (sample["text"], sample["raw"]) == (ROWS[place]["text"], ROWS[place]["raw"])
    assert len(source.fetch([])) == 4
    assert source.fetch([]).num_rows == 0


def test_a_batch_points_into_the_file_and_copies_nothing(pristine: Path) -> None:
    source = rf.open(pristine)
    column = source.fetch([3, 5])["x"]
    again = source.fetch([4])["x"]
    assert isinstance(column, Ragged)
    assert isinstance(again, Ragged)
    assert column.pointers.memory[0].array is again.pointers.memory[0].array
    assert not column.pointers.memory[0].array.flags.writeable


def test_it_is_a_map_style_dataset(pristine: Path) -> None:
    source = rf.open(pristine)
    assert source[-1]["y"] == 199
    assert [sample["y"] for sample in source.__getitems__([0, -2])] == [0, 198]
    for bad in (200, -201):
        with pytest.raises(IndexError):
            source[bad]
    with pytest.raises(SourceError, match="no such sample"):
        source.fetch([0, 200])


def test_columns_restrict_what_is_offered(pristine: Path) -> None:
    source = rf.open(pristine, columns=["y"])
    assert list(source[0]) == ["y"]
    assert list(pickle.loads(pickle.dumps(source)).fields) == ["y"]
    with pytest.raises(ArgumentError, match="no such column"):
        rf.open(pristine, columns=["z"])


def test_blocks_are_what_is_read_in_one_go(tmp_path: Path) -> None:
    rows = ({"x": np.zeros(1 << 20, np.uint8)} for _ in range(10))
    source = rf.write(rows, tmp_path / "p", progress=False)
    assert source.blocks.tolist() == [4, 4, 2]
    assert source.blocks.dtype == np.int64


def test_the_fingerprint_is_of_the_data_and_not_of_their_place(
    pristine: Path, folder: Path, tmp_path: Path
) -> None:
    assert rf.open(pristine).fingerprint == rf.open(folder).fingerprint
    other = rf.write([*ROWS, ROWS[0]], tmp_path / "more", shard_bytes=2000, progress=False)
    assert other.fingerprint != rf.open(pristine).fingerprint


def test_it_travels_as_a_path(pristine: Path) -> None:
    source = rf.open(pristine)
    source.fetch(range(200)).samples()  # shards are open
    assert len(pickle.dumps(source)) < 3000  # the manifest, and what was seen of each file


def test_threads_read_at_once_with_few_shards_open(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankfeed.storage.data_files.OPEN_FILES", 2)
    source = PackedSource(pristine)
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            ids = rng.integers(0, 200, 16)
            for place, sample in zip(ids, source.fetch(ids).samples(), strict=True):
                if sample["y"] != place or not np.array_equal(sample["x"], ROWS[place]["x"]):
                    wrong.append(int(place))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(source.files._open) <= 2


def test_data_that_were_replaced_are_not_read_on_with(folder: Path) -> None:
    pickled = pickle.dumps(rf.open(folder))
    shutil.rmtree(folder)
    rf.write(ROWS[:-1], folder, progress=False)
    with pytest.raises(CorruptError, match="replaced"):
        pickle.loads(pickled).fetch([0])


def test_a_missing_shard_is_named_when_the_data_are_opened(folder: Path) -> None:
    (folder / "shard-00002.arrow").unlink()
    with pytest.raises(CorruptError, match=r"missing[\s\S]*shard-00002"):
        rf.open(folder)


@pytest.mark.parametrize("change", [-1, 1, -1000])
def test_a_shard_of_another_size_is_named(change: int, folder: Path) -> None:
    path = folder / "shard-00001.arrow"
    source = rf.open(folder)
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\0")
    with pytest.raises(CorruptError, match=r"size[\s\S]*shard-00001"):
        rf.open(folder)
    with pytest.raises(CorruptError, match=r"size[\s\S]*shard-00001"):  # found by a source that is open, too
        source.fetch(range(200))


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


FUZZ = """
import random, sys, rankfeed as rf
from pathlib import Path
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
path, chance = folder / "shard-00000.arrow", random.Random(seed)
good = path.read_bytes()
for _ in range(400):
    bad = bytearray(good)
    for _ in range(chance.choice([1, 1, 3])):
        near_the_end = len(bad) - 1 - chance.randrange(1500)
        where = chance.choice([chance.randrange(len(bad)), chance.randrange(1500), near_the_end])
        bad[where] ^= 1 << chance.randrange(8)
    path.write_bytes(bad)
    try:
        source = rf.open(folder)
        for sample in source.fetch(range(20)).samples():
            assert sample["x"].shape[1:] == (2,) and len(sample["x"]) < 200
    except rf.errors.RankfeedError:
        pass
print("done")
"""


def test_flipped_bits_end_in_an_error_or_a_value_and_never_in_a_crash(folder: Path) -> None:
    seed = str(fresh_seed())
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(folder), seed], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), f"seed {seed}: {done.stderr[-2000:]}"
