"""`.npy` and `.npz` files as samples or as rows."""

import multiprocessing
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import rankfeed as rf
from rankfeed.columns import Field
from rankfeed.errors import CorruptError, SourceError, UnsafeError


@pytest.fixture
def ragged(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    for number in range(12):
        array = np.full((number % 4 + 1, 3), number, np.float32)
        np.save(folder / f"clip{number}.npy", np.asfortranarray(array) if number % 2 else array)
    (folder / "README").write_text("not data")
    return folder


def test_each_file_is_a_sample_in_natural_order(ragged: Path) -> None:
    source = rf.open(ragged)
    assert source.fields == {"array": Field("ragged", "float32", (3,))}
    assert len(source) == source.blocks.sum() == 12
    for number, sample in enumerate(source):
        np.testing.assert_array_equal(sample["array"], np.full((number % 4 + 1, 3), number))


def test_a_pattern_and_a_list_read_as_the_folder_does(ragged: Path) -> None:
    whole = [sample["array"].tolist() for sample in rf.open(ragged)]
    assert [sample["array"].tolist() for sample in rf.open(f"{ragged}/*.npy")] == whole
    paths = [ragged / f"clip{number}.npy" for number in (5, 2)]
    assert [sample["array"].tolist() for sample in rf.open(paths)] == [whole[5], whole[2]]
    assert rf.open(f"{ragged}/*.npy").fingerprint == rf.open(ragged).fingerprint


def test_files_of_one_shape_are_dense(tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.full((2, 2), number, ">i4"))
    source = rf.open(tmp_path)
    assert source.fields == {"array": Field("dense", "int32", (2, 2))}
    assert source[2]["array"].tolist() == [[2, 2], [2, 2]]


def test_archives_are_samples_with_several_columns(tmp_path: Path) -> None:
    for number in range(5):
        save = np.savez_compressed if number % 2 else np.savez
        save(tmp_path / f"{number}.npz", frames=np.ones((number, 2)), label=np.int64(number))  # type: ignore[operator]
    source = rf.open(tmp_path)
    assert source.fields == {"frames": Field("ragged", "float64", (2,)), "label": Field("dense", "int64", ())}
    assert [(len(sample["frames"]), int(sample["label"])) for sample in source] == [(n, n) for n in range(5)]
    assert list(rf.open(tmp_path, columns=["label"])[0]) == ["label"]


@pytest.mark.parametrize("order", ["C", "F"])
def test_one_file_is_rows(order: str, tmp_path: Path) -> None:
    rows = np.asarray(np.arange(30).reshape(10, 3), order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "rows.npy", rows)
    source = rf.open(tmp_path / "rows.npy")
    np.testing.assert_array_equal(source.fetch([9, 0])["array"].gather(), rows[[9, 0]])  # type: ignore[attr-defined]
    assert source.fetch([9, 0])["array"].parts[0].values.flags.writeable is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_one_archive_is_rows_of_several_columns(save: object, tmp_path: Path) -> None:
    save(tmp_path / "d.npz", x=np.arange(8).reshape(4, 2), y=np.arange(4.0))  # type: ignore[operator]
    source = pickle.loads(pickle.dumps(rf.open(tmp_path / "d.npz")))
    assert {name: value.tolist() for name, value in source[-1].items()} == {"x": [6, 7], "y": 3.0}
    np.savez(tmp_path / "bad.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(SourceError, match="no rows in common"):
        rf.open(tmp_path / "bad.npz")


@pytest.mark.parametrize("name", ["0.npy", "0.npz"])
def test_objects_are_refused_unless_allowed(name: str, tmp_path: Path) -> None:
    for number in range(2):
        path = tmp_path / name.replace("0", str(number))
        array = np.array([{"a": number}], object)
        if name.endswith("y"):
            np.save(path, array, allow_pickle=True)
        else:
            np.savez(path, array=array)
    with pytest.raises(UnsafeError, match="allow_pickle"):
        rf.open(tmp_path)
    with pytest.raises(UnsafeError):
        rf.open(tmp_path / name)
    assert rf.open(tmp_path, allow_pickle=True)[1]["array"][0] == {"a": 1}


@pytest.mark.parametrize("cut", [0, 5, 40, -4])
def test_a_truncated_file_is_named(cut: int, ragged: Path) -> None:
    path = ragged / "clip7.npy"
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    source = rf.open(ragged)
    with pytest.raises(CorruptError, match=r"clip7\.npy"):
        source[7]
    assert source[6]["array"].shape == (3, 3)
    with pytest.raises(CorruptError, match=r"clip7\.npy"):
        rf.open(path)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    for number in range(3):
        np.savez_compressed(tmp_path / f"{number}.npz", x=np.arange(1000.0))
    path = tmp_path / "1.npz"
    good = path.read_bytes()
    source = rf.open(tmp_path)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(CorruptError, match=r"1\.npz"):
        source[1]
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 255
    path.write_bytes(flipped)
    with pytest.raises(CorruptError, match=r"1\.npz"):
        source[1]


def test_a_header_is_never_run(tmp_path: Path) -> None:
    header = b"__import__('os').system('touch " + str(tmp_path / "ran").encode() + b"')"
    header += b" " * (118 - len(header) % 64 % 118) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(CorruptError):
        rf.open(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("array", [np.zeros((2, 4), np.float32), np.zeros((2, 3)), np.zeros(6, np.float32)])
def test_a_file_unlike_the_others_is_named(array: np.ndarray, ragged: Path) -> None:
    np.save(ragged / "clip3.npy", array)
    with pytest.raises(SourceError, match=r"unlike[\s\S]*clip3\.npy"):
        rf.open(ragged).fetch(range(12))


def test_a_member_that_lies_about_its_place_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(100))
    with zipfile.ZipFile(tmp_path / "d.npz") as archive:
        offset = archive.getinfo("x.npy").header_offset
    content = bytearray((tmp_path / "d.npz").read_bytes())
    content[offset + 28 : offset + 30] = (60_000).to_bytes(2, "little")
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(CorruptError):
        rf.open(tmp_path / "d.npz")[0]


def _read(source: rf.Source, results: "multiprocessing.Queue[int]") -> None:
    results.put(sum(int(sample["array"].sum()) for sample in source))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_travels_to_other_processes_as_a_path(method: str, ragged: Path) -> None:
    source = rf.open(ragged)
    assert len(pickle.dumps(source)) < 1000
    context = multiprocessing.get_context(method)
    results: multiprocessing.Queue[int] = context.Queue()
    child = context.Process(target=_read, args=(source, results))
    child.start()
    assert results.get(timeout=100) == sum(int(sample["array"].sum()) for sample in source)
    child.join()


def test_files_that_were_added_in_between_are_noticed(ragged: Path) -> None:
    pickled = pickle.dumps(rf.open(ragged))
    np.save(ragged / "clip99.npy", np.zeros((1, 3), np.float32))
    with pytest.raises(SourceError, match="added"):
        pickle.loads(pickled)


def test_ragged_files_pack_to_the_same_samples(ragged: Path, tmp_path: Path) -> None:
    source = rf.open(ragged)
    packed = rf.pack(source, tmp_path / "p", shard_bytes=100, workers=2, progress=False)
    assert [sample["array"].tolist() for sample in packed] == [sample["array"].tolist() for sample in source]


def test_a_damaged_header_is_told_as_such(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(6))
    whole = (tmp_path / "rows.npy").read_bytes()
    for start in range(8, 120):  # zeros may make numpy's own parser stumble in many ways
        (tmp_path / "rows.npy").write_bytes(whole[:start] + bytes(8) + whole[start + 8 :])
        with suppress(CorruptError, UnsafeError):
            assert len(rf.open(tmp_path / "rows.npy").fetch([0])["array"]) == 1
