"""What is written can be read back, and what cannot be stored is refused by name."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tests.support.jobs import run_python
from tests.support.values import contents

import rankfeed as rf
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, WriteError

DTYPES = [
    *("bool", "int8", "uint16", "int64", "uint64", ">i8"),
    *("float16", "float32", ">f4", "complex64", "complex128"),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (bytes, str)):
        return bool(one == other)
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype.newbyteorder("=") != other.dtype or one.shape != other.shape:
        return False
    return one.astype(other.dtype).tobytes() == other.tobytes()  # NaN is NaN


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of a few columns of any kind that can be packed."""
    columns: dict[str, st.SearchStrategy[Any]] = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3, unique=True)):
        kind = draw(st.sampled_from(["str", "bytes", "dense", "ragged"]))
        inner = draw(npst.array_shapes(min_dims=0, max_dims=2, max_side=3))
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        if kind == "str":
            columns[name] = st.text(max_size=5)
        elif kind == "bytes":
            columns[name] = st.binary(max_size=5)
        elif kind == "dense":
            columns[name] = npst.arrays(dtype, inner)
        else:
            columns[name] = st.integers(0, 3).flatmap(lambda n, d=dtype, s=inner: npst.arrays(d, (n, *s)))
    return draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=12))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(rows=tables(), shard_bytes=st.sampled_from([1, 64, 1 << 20]))
def test_written_rows_are_read_back_with_equal_values_and_dtypes(
    rows: list[dict[str, Any]], shard_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("write") / "packed"
    packed = rf.write(iter(rows), folder, shard_bytes=shard_bytes, progress=False)
    assert len(packed) == len(rows) == packed.blocks.sum()
    order = np.random.default_rng(0).permutation(len(rows))
    for place, sample in zip(order, packed.fetch(order).samples(), strict=True):
        assert sample.keys() == rows[place].keys()
        assert all(same(rows[place][name], sample[name]) for name in sample)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_bytes_of_a_write_do_not_depend_on_the_number_of_workers(workers: int, tmp_path: Path) -> None:
    rows = [{"x": np.arange(i % 7, dtype=np.int16), "y": i / 3, "t": "ä" * (i % 4)} for i in range(300)]
    source = rf.write(rows, tmp_path / "first", shard_bytes=4000, progress=False)
    rf.write(source, tmp_path / "alone", shard_bytes=1000, workers=0, progress=False)
    packed = rf.write(source, tmp_path / "again", shard_bytes=1000, workers=workers, progress=False)
    assert len(packed.manifest.shards) > 5
    assert contents(tmp_path / "again") == contents(tmp_path / "alone")
    assert [sample["y"] for sample in packed] == [row["y"] for row in rows]


def test_a_script_without_a_main_guard_writes_with_workers(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(40):
        np.save(folder / f"{i}.npy", np.full((i % 3 + 1, 2), i))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, rankfeed as rf\n"
        "packed = rf.write(rf.open(sys.argv[1]), sys.argv[2], shard_bytes=200, workers=2, progress=False)\n"
        "print(len(packed))\n"
    )
    for command, dest in ([sys.executable, str(script)], "a"), ([sys.executable, "-"], "b"):
        command += [str(folder), str(tmp_path / dest)]
        done = subprocess.run(command, input=script.read_text(), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "40\n"), done.stderr


def test_a_dataset_class_defined_in_the_running_script_can_be_written(tmp_path: Path) -> None:
    code = (
        "import sys, rankfeed as rf\n"
        "class Squares:\n"
        "    def __len__(self): return 100\n"
        "    def __getitem__(self, i): return {'square': i * i}\n"
        "print(rf.write(rf.from_dataset(Squares()), sys.argv[1], shard_bytes=80, workers=2, progress=False)[9])\n"
    )
    assert "81" in run_python(code, tmp_path / "p")


def test_a_column_whose_shape_changes_after_several_shards_is_ragged(tmp_path: Path) -> None:
    rows = [{"x": np.full(4, i, np.int32)} for i in range(200)] + [{"x": np.arange(6, dtype=np.int64)}]
    packed = rf.write(iter(rows), tmp_path / "p", shard_bytes=256, progress=False)
    assert len(packed.manifest.shards) > 3
    assert packed.fields == {"x": Field("ragged", "int64", ())}
    assert [sample["x"].tolist() for sample in packed] == [row["x"].tolist() for row in rows]
    assert rf.write(rows[:200], tmp_path / "q", progress=False).fields["x"].shape == (4,)


def test_a_dataset_whose_probed_samples_have_one_length_is_written_with_all_lengths(tmp_path: Path) -> None:
    dataset = [{"x": np.zeros(2 if i in (0, 25, 50, 75) else 1 + i % 5)} for i in range(100)]
    packed = rf.write(rf.from_dataset(dataset), tmp_path / "p", shard_bytes=500, progress=False)
    assert [len(sample["x"]) for sample in packed] == [len(row["x"]) for row in dataset]


def test_tensors_scalars_lists_views_and_bytes_are_stored(tmp_path: Path) -> None:
    base = np.arange(24).reshape(4, 6)
    row: dict[str, Any] = {"int": 3, "float": 2.5, "bool": True, "list": [1, 2], "données": "é"}
    row |= {"tensor": torch.ones(2, 3), "view": base[::2, ::-3], "fortran": np.asfortranarray(base)}
    row |= {"empty": np.zeros((0, 2))}
    sample = rf.write([{**row, "bytearray": bytearray(b"ab")}], tmp_path / "p", progress=False)[0]
    assert sample.pop("bytearray") == b"ab"
    assert sample.keys() == row.keys()
    for name, value in row.items():
        assert same(value, sample[name]), name
    assert sample["bool"].dtype == bool


def test_a_none_value_raises_and_suggests_a_validity_column(tmp_path: Path) -> None:
    samples = [{"x": 1, "name": "a"}, {"x": 2, "name": None}]
    for source in (samples, rf.from_dataset(samples)):
        with pytest.raises(WriteError, match=r"NoneType[\s\S]*row 1, field 'name'[\s\S]*name_valid: False"):
            rf.write(source, tmp_path / "data", progress=False)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"x": None}, "NoneType"),
        ({"x": np.array([{}], object)}, "object"),
        ({"x": {"nested": 1}}, "dict"),
        ({"x": "text"}, "str"),
        ({"x": np.zeros((2, 2))}, "2, 2"),
        ({"y": 1}, "'y'"),
        ({"x": np.zeros(2, "datetime64[s]")}, "datetime"),
    ],
)
def test_an_unstorable_value_raises_with_its_row_and_field(bad: dict[str, Any], said: str, tmp_path: Path) -> None:
    rows = [{"x": 1.0}] * 5 + [bad]
    with pytest.raises(WriteError) as caught:
        rf.write(rows, tmp_path / "p", progress=False)
    assert "x" in str(caught.value)
    assert "row 5" in str(caught.value)
    assert said in str(caught.value)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "rows",
    [
        *([], [{}], [{"": 1}], [(1, 2)], [{"x": np.float128(1)}], [{"x": np.zeros((2, 0))}]),
        [{"x": np.int64(-1)}, {"x": np.uint64(1 << 63)}],
    ],
)
def test_rows_that_form_no_valid_column_raise_and_create_no_directory(rows: list[Any], tmp_path: Path) -> None:
    with pytest.raises(WriteError):
        rf.write(rows, tmp_path / "p", progress=False)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("value", [2**53 + 1, np.iinfo(np.int64).max, np.uint64(2**64 - 1)])
@pytest.mark.parametrize(
    ("count", "shard_bytes"), [(2, 1 << 20), (300, 1 << 20), (300, 500)], ids=["batch", "shard", "shards"]
)
def test_integers_that_a_float_column_cannot_hold_exactly_raise(
    value: Any, count: int, shard_bytes: int, tmp_path: Path
) -> None:
    def write(integer: Any, name: str) -> rf.Source:
        rows = [*[{"id": integer}] * count, {"id": 0.5}]
        return rf.write(rows, tmp_path / name, shard_bytes=shard_bytes, progress=False)

    with pytest.raises(
        WriteError, match=r"(?s)float64 (has not all their digits|cannot hold exactly).*field 'id'"
    ):
        write(value, "p")
    assert [sample["id"] for sample in write(7, "q")] == [7.0] * count + [0.5]


def test_a_write_of_a_dict_string_or_number_raises(tmp_path: Path) -> None:
    for bad in ({"x": 1}, "path", 3):
        with pytest.raises(ArgumentError, match="a source, or an iterable of samples"):
            rf.write(bad, tmp_path / "p")  # type: ignore[arg-type]
    assert not (tmp_path / "p").exists()


def test_a_dataset_of_tuples_raises(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="must be dicts"):
        rf.write(rf.from_dataset([(1, 2)] * 3), tmp_path / "p", progress=False)


def test_a_second_write_returns_the_finished_dataset_or_raises_for_other_rows(tmp_path: Path) -> None:
    rows = [{"x": i} for i in range(100)]
    packed = rf.write(rows, tmp_path / "p", shard_bytes=100, progress=False)
    before = contents(tmp_path / "p")
    assert rf.write(iter(rows), tmp_path / "p", shard_bytes=100, progress=False).fingerprint == packed.fingerprint
    for other in (rows[:-1], [*rows, {"x": 0}], [{"x": -1}, *rows[1:]]):
        with pytest.raises(WriteError, match="other rows"):
            rf.write(other, tmp_path / "p", shard_bytes=100, progress=False)
    with pytest.raises(WriteError, match="finished dataset"):
        rf.write(rows, tmp_path / "p", shard_bytes=100, progress=False, resume=False)
    source = rf.write(packed, tmp_path / "q", progress=False)
    assert rf.write(packed, tmp_path / "q", progress=False).fingerprint == source.fingerprint
    with pytest.raises(WriteError, match="another input"):
        rf.write(packed, tmp_path / "q", shard_bytes=50, progress=False)
    assert contents(tmp_path / "p") == before


def test_a_second_write_of_another_dataset_of_the_same_length_raises(tmp_path: Path) -> None:
    rf.write(rf.from_dataset([{"x": 1}, {"x": 2}]), tmp_path / "p", progress=False)
    assert len(rf.write(rf.from_dataset([{"x": 1}, {"x": 2}]), tmp_path / "p", progress=False)) == 2
    with pytest.raises(WriteError, match="other rows"):
        rf.write(rf.from_dataset([{"x": 1}, {"x": 3}]), tmp_path / "p", progress=False)


def test_a_destination_with_other_files_raises_and_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(WriteError, match="other files"):
        rf.write([{"x": 1}], tmp_path, progress=False)
    with pytest.raises(WriteError, match="not a directory"):
        rf.write([{"x": 1}], tmp_path / "letter.txt", progress=False)
    assert contents(tmp_path) == {"letter.txt": b"dear"}


def test_a_full_disk_is_an_error_that_leaves_no_partial_files(tmp_path: Path) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    rows = [{"x": i} for i in range(100)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WriteError, match="No space left"):
            rf.write(rows, tmp_path / "p", progress=False)
    assert not [path for path in (tmp_path / "p").rglob("*") if ".tmp-" in path.name or path.suffix == ".arrow"]
    assert len(rf.write(rows, tmp_path / "p", progress=False)) == 100


def test_a_write_without_a_terminal_prints_no_progress(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rf.write([{"x": 1}], tmp_path / "p")
    assert capfd.readouterr() == ("", "")


def test_a_truncated_file_read_by_a_worker_raises_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(20):
        np.save(folder / f"{i}.npy", np.arange(4))
    os.truncate(folder / "13.npy", (folder / "13.npy").stat().st_size - 8)
    source = rf.open(folder)
    with pytest.raises(rf.errors.CorruptError, match=r"13\.npy"):
        rf.write(source, tmp_path / "p", shard_bytes=64, workers=2, progress=False)
    pickle.loads(pickle.dumps(source))


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["array", "tensor"])
def test_an_array_that_an_iterable_reuses_is_written_as_it_was_at_each_yield(make: Any, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        values = make(3)
        for i in range(20):
            values[:] = i
            yield {"x": values}

    packed = rf.write(rows(), tmp_path / "packed", progress=False)
    assert [row["x"].tolist() for row in packed] == [[i] * 3 for i in range(20)]


def test_a_uint64_column_holds_small_integers_but_negative_ones_raise(tmp_path: Path) -> None:
    large = [{"x": np.uint64(2**63 + 5)}] * 300
    written = rf.write([*large, {"x": 1}], tmp_path / "p", progress=False)
    assert written.fields["x"].dtype == "uint64"
    assert [int(written[i]["x"]) for i in (0, 300)] == [2**63 + 5, 1]
    with pytest.raises(WriteError, match="row 300"):
        rf.write([*large, {"x": -1}], tmp_path / "q", progress=False)
    with pytest.raises(WriteError, match="digits or signs"):
        rf.write([*large[:256], *[{"x": -1}] * 300], tmp_path / "q", progress=False)


@pytest.mark.parametrize("dest", ["s3://bucket/data", "", "a\0b", None, 3])
def test_an_invalid_destination_raises(dest: object) -> None:
    with pytest.raises(ArgumentError, match=r"(?s)invalid dest.*a path|a directory"):
        rf.write([{"x": 1}], dest, progress=False)  # type: ignore[arg-type]
