"""`.npy` and `.npz` files as samples or as rows."""

import ast
import gc
import multiprocessing
import pickle
import threading
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.memory import peak
from tests.support.tar import write_tar
from tests.support.values import samples_of

import rankfeed as rf
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, CorruptError, SourceError, UnsafeError


def save_array(path: Path, array: Any) -> Path:
    """Save an array as a file, or as a member called "array" of an archive."""
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        np.savez(path, array=array)
    return path


def refusal(read: Callable[[], Any]) -> tuple[int, str]:
    """The most memory that a refused read takes, and what the error says."""

    def message() -> str:
        with pytest.raises(SourceError) as caught:
            read()
        return f"{type(caught.value).__name__}: {caught.value}"

    return peak(message)


@pytest.fixture
def ragged(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    for index in range(12):
        array = np.full((index % 4 + 1, 3), index, np.float32)
        np.save(folder / f"clip{index}.npy", np.asfortranarray(array) if index % 2 else array)
    (folder / "README").write_text("not data")
    return folder


def test_each_npy_file_of_a_folder_is_a_sample_in_natural_order(ragged: Path) -> None:
    source = rf.open(ragged)
    assert source.fields == {"array": Field("ragged", "float32", (3,))}
    assert len(source) == source.blocks.sum() == 12
    for index, sample in enumerate(source):
        np.testing.assert_array_equal(sample["array"], np.full((index % 4 + 1, 3), index))


def test_npy_files_of_one_shape_are_a_dense_column(tmp_path: Path) -> None:
    source = rf.open(_saved(tmp_path, **{f"{index}": np.full((2, 2), index, ">i4") for index in range(3)}))
    assert source.fields == {"array": Field("dense", "int32", (2, 2))}
    assert source[2]["array"].tolist() == [[2, 2], [2, 2]]


def test_npz_files_are_samples_with_a_column_for_each_member(tmp_path: Path) -> None:
    for index in range(5):
        save = np.savez_compressed if index % 2 else np.savez
        save(tmp_path / f"{index}.npz", frames=np.ones((index, 2)), label=np.int64(index))  # type: ignore[operator]
    source = rf.open(tmp_path)
    assert source.fields == {"frames": Field("ragged", "float64", (2,)), "label": Field("dense", "int64", ())}
    assert [(len(sample["frames"]), int(sample["label"])) for sample in source] == [(n, n) for n in range(5)]
    assert list(rf.open(tmp_path, columns=["label"])[0]) == ["label"]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_single_npy_file_is_rows_in_place_unless_in_fortran_order(order: str, tmp_path: Path) -> None:
    rows = np.asarray(np.arange(30).reshape(10, 3), order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "rows.npy", rows)
    source = rf.open(tmp_path / "rows.npy")
    np.testing.assert_array_equal(source.fetch([9, 0])["array"].gather(), rows[[9, 0]])  # type: ignore[attr-defined]
    in_place = not source.fetch([9, 0])["array"].pointers.memory[0].array.flags.writeable  # type: ignore[attr-defined]
    assert in_place == (order == "C")


@pytest.mark.parametrize("name", ["rows.npy", "rows.npz"])
def test_a_few_npy_rows_take_little_memory_in_fortran_order_or_unaligned(name: str, tmp_path: Path) -> None:
    rows = np.arange(200_000.0).reshape(50_000, 4)
    if name == "rows.npy":
        np.save(tmp_path / name, np.asfortranarray(rows))
    else:  # a member starts behind its name, at any byte
        np.savez(tmp_path / name, **{"x" * length: rows for length in range(1, 9)})
    source = rf.open(tmp_path / name)
    source.fetch([0])  # the checksums are compared
    most, result = peak(
        lambda: {name: column.gather() for name, column in source.fetch([7, 49_999, 7]).items()}  # type: ignore[attr-defined]
    )
    assert len(result) == len(source.fields)
    for value in result.values():
        np.testing.assert_array_equal(value, rows[[7, 49_999, 7]])
    assert most < rows.nbytes // 4


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_single_npz_file_is_rows_with_a_column_for_each_member(save: object, tmp_path: Path) -> None:
    save(tmp_path / "d.npz", x=np.arange(8).reshape(4, 2), y=np.arange(4.0))  # type: ignore[operator]
    source = pickle.loads(pickle.dumps(rf.open(tmp_path / "d.npz")))
    assert {name: value.tolist() for name, value in source[-1].items()} == {"x": [6, 7], "y": 3.0}
    np.savez(tmp_path / "bad.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(SourceError, match="no rows in common"):
        rf.open(tmp_path / "bad.npz")


@pytest.mark.parametrize("name", ["0.npy", "0.npz"])
def test_object_arrays_are_refused_unless_allow_pickle_is_set(name: str, tmp_path: Path) -> None:
    for index in range(2):
        save_array(tmp_path / name.replace("0", str(index)), np.array([{"a": index}], object))
    with pytest.raises(UnsafeError, match="allow_pickle"):
        rf.open(tmp_path)
    with pytest.raises(UnsafeError):
        rf.open(tmp_path / name)
    source = pickle.loads(pickle.dumps(rf.open(tmp_path / name, allow_pickle=True)))
    assert source.fields == {"array": Field("object")}
    assert source[0]["array"] == {"a": 0}
    assert next(iter(rf.Loader(source)))["array"] == [{"a": 0}]
    assert rf.open(tmp_path, allow_pickle=True)[1]["array"][0] == {"a": 1}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_flipped_bit_in_an_npz_member_is_an_error_for_that_column_alone(save: Any, tmp_path: Path) -> None:
    save(tmp_path / "d.npz", good=np.arange(1000), bad=np.random.default_rng(0).integers(0, 99, 1000))
    path = tmp_path / "d.npz"
    with zipfile.ZipFile(path) as archive:
        first, second = (archive.getinfo(name) for name in ("good.npy", "bad.npy"))
    content = bytearray(path.read_bytes())
    content[second.header_offset + second.compress_size // 2] ^= 1
    assert second.header_offset > first.header_offset
    path.write_bytes(content)
    source = rf.open(path)
    assert source.fetch([1, 2], ["good"])["good"].rows() == [1, 2]
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"d\.npz"):
            source.fetch([0], ["bad"])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("shape", ["(1,)", "(10000000000000,)"])
def test_an_npz_header_of_wrong_length_is_an_error(
    save: Any, shape: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """numpy reads as many elements as the header says, and so may not get to the end, where the checksum is."""
    for index in range(3):
        save(tmp_path / f"{index}.npz", x=np.arange(8009 + index))
    source = rf.open(tmp_path)
    monkeypatch.setattr(source.files, "check_open", lambda **_: None)  # damage, not a change while it is in use
    padded = f"{shape}, }}".ljust(20).encode()
    path = tmp_path / "0.npz"
    if save is np.savez:  # the checksum of its member is that of what it was
        path.write_bytes(path.read_bytes().replace(b"(8009,), }          ", padded))
        with pytest.raises(CorruptError, match=r"contradicts its header[\s\S]*0\.npz"):
            source[0]
    _rewrite(tmp_path / "1.npz", lambda content: content.replace(b"(8010,), }          ", padded))
    with pytest.raises(CorruptError, match=r"1\.npz"):
        source[1]
    assert source[2]["x"].tolist() == list(range(8011))


def _rewrite(path: Path, change: Any) -> None:
    """Change the members of an archive, whose checksums are then those of what they became."""
    with zipfile.ZipFile(path) as archive:
        members = {info: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for info, content in members.items():
            archive.writestr(info, change(content))


def test_threads_compute_the_checksum_of_an_npz_member_once(tmp_path: Path, monkeypatch: Any) -> None:
    rows = np.arange(40_000).reshape(10_000, 4)
    np.savez(tmp_path / "d.npz", x=rows)
    summed: list[int] = []
    checksum = zlib.crc32

    def counted(content: Any) -> int:
        summed.append(len(content))
        time.sleep(0.05)  # for the others to come
        return checksum(content)

    monkeypatch.setattr(zlib, "crc32", counted)
    source = rf.open(tmp_path / "d.npz")
    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(lambda row: source.fetch([row])["x"].rows()[0].tolist(), range(8)))
    assert result == rows[:8].tolist()
    assert len(summed) == 1
    assert source.fetch([9_999])["x"].rows()[0].tolist() == rows[-1].tolist()
    assert len(summed) == 1


def test_a_child_forked_while_a_checksum_is_computed_reads_the_member(tmp_path: Path, monkeypatch: Any) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(10))
    source = rf.open(tmp_path / "d.npz")
    summing, forked = threading.Event(), threading.Event()
    checksum = zlib.crc32

    def slow(content: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            summing.set()
            assert forked.wait(100)
        return checksum(content)

    monkeypatch.setattr(zlib, "crc32", slow)
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    child = context.Process(target=lambda: results.put(int(source[3]["x"])))
    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(lambda: int(source[4]["x"]))
        try:
            assert summing.wait(100)
            child.start()
            assert results.get(timeout=600) == 3
            child.join(600)
        finally:
            forked.set()
            child.kill()
        assert here.result(100) == 4


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("opened", ["d.npz", "."])
def test_an_encrypted_npz_member_is_refused(save: Any, opened: str, tmp_path: Path) -> None:
    save(tmp_path / "d.npz", x=np.arange(10))
    content = bytearray((tmp_path / "d.npz").read_bytes())
    content[content.find(b"PK\1\2") + 8] |= 1
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(CorruptError, match=r"encrypted[\s\S]*d\.npz"):
        rf.open(tmp_path / opened)


@pytest.mark.parametrize("name", ["rows.npy", "rows.npz"])
def test_big_endian_rows_are_loaded_with_their_values(name: str, tmp_path: Path) -> None:
    rows = np.arange(12, dtype=">f4").reshape(6, 2)
    source = rf.open(save_array(tmp_path / name, rows))
    assert source.fields == {"array": Field("dense", "float32", (2,))}
    assert [batch["array"].tolist() for batch in rf.Loader(source, 3)] == [rows[:3].tolist(), rows[3:].tolist()]
    assert source.fetch([])["array"].gather().shape == (0, 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (np.array(["a", "bc"]), "Parquet, CSV or JSON lines"),
        (np.array([b"a"]), "Parquet, CSV or JSON lines"),
        (np.array(["2020-01-01"], "datetime64[s]"), 'astype("int64")'),
        (np.zeros(2, "timedelta64[ms]"), 'astype("int64")'),
        (np.zeros(2, [("a", "i4"), ("b", "f4")]), "np.savez(path, name=array[name]"),
        (np.zeros(2, np.longdouble), 'astype("float64")'),
        (np.zeros(2, np.clongdouble), 'astype("complex128")'),
    ],
)
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_dtypes_that_torch_lacks_are_refused(rows: Any, remedy: str, suffix: str, tmp_path: Path) -> None:
    path = save_array(tmp_path / f"rows{suffix}", rows)
    with pytest.raises(SourceError, match="no tensor") as caught:
        rf.open(path)
    assert remedy in str(caught.value.remedy)
    if "astype" in remedy:
        kind = remedy.split('"')[1]
        np.save(tmp_path / "converted.npy", rows.astype(kind))
        assert rf.open(tmp_path / "converted.npy").fields["array"].dtype == kind


def test_a_header_may_claim_10_to_the_14_empty_rows_and_not_10_to_the_18(tmp_path: Path) -> None:
    source = rf.open(_with_header(tmp_path / "rows.npy", (10**14, 0)))
    assert len(source) == int(source.blocks.sum()) == 10**14
    assert len(source.blocks) == 1
    assert source.fetch([10**14 - 1])["array"].gather().shape == (1, 0)  # type: ignore[attr-defined]
    for rows in (10**18, 10**30):
        path = _with_header(tmp_path / "rows.npy", (rows, 0))
        with pytest.raises(CorruptError, match=r"shape[\s\S]*rows\.npy"):
            rf.open(path)


def test_code_in_an_npy_header_is_not_executed(tmp_path: Path) -> None:
    header = b"__import__('os').system('touch " + str(tmp_path / "ran").encode() + b"')"
    header += b" " * (118 - len(header) % 64 % 118) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(CorruptError):
        rf.open(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("array", [np.zeros((2, 4), np.float32), np.zeros((2, 3)), np.zeros(6, np.float32)])
def test_an_npy_file_of_another_shape_or_type_is_an_error_that_names_it(array: np.ndarray, ragged: Path) -> None:
    np.save(ragged / "clip3.npy", array)
    with pytest.raises(SourceError, match=r"unlike[\s\S]*clip3\.npy"):
        rf.open(ragged).fetch(range(12))


def test_an_npz_member_header_longer_than_the_file_is_an_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(100))
    content = bytearray((tmp_path / "d.npz").read_bytes())
    content[28:30] = (60_000).to_bytes(2, "little")  # the size of extra fields in the header of the first member
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(CorruptError):
        rf.open(tmp_path / "d.npz")[0]


class Parses:
    """Garbage of which the finalizer parses Python."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("a + 1")


def test_an_npy_header_is_parsed_while_garbage_collection_parses_python(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    thresholds = gc.get_threshold()
    gc.freeze()  # so that the next collections take no time
    try:
        for allocations in range(1, 200):
            gc.collect()
            gc.disable()
            for _ in range(3):
                Parses()
            gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
            gc.enable()
            rf.open(tmp_path / "x.npy")
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


def test_an_unpickled_source_does_not_include_files_added_since(ragged: Path) -> None:
    pickled = pickle.dumps(rf.open(ragged))
    np.save(ragged / "clip99.npy", np.zeros((1, 3), np.float32))
    assert len(pickle.loads(pickled)) == len(rf.open(ragged)) - 1


def test_a_truncated_pickle_in_an_npy_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], object), allow_pickle=True)
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:-4])
    with pytest.raises(CorruptError, match=r"a\.npy"):
        rf.open(tmp_path / "a.npy", allow_pickle=True)[0]


def _with_header(path: Path, shape: Any) -> Path:
    text = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    text += b" " * (-(11 + len(text)) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64))
    return path


@pytest.mark.parametrize(
    "shape",
    [(True,), (1,) * 65, (2**40, 2**40), (2**47, 2**47, 0), (0, 2**62), (-1,), (2**63,), (1.0,), ((1,),)],
    ids=str,
)
@pytest.mark.parametrize("suffix", ["npy", "npz", "tar"])
def test_an_npy_header_with_an_impossible_shape_is_corrupt(shape: Any, suffix: str, tmp_path: Path) -> None:
    path = _with_header(tmp_path / "rows.npy", shape)
    if suffix == "npz":
        with zipfile.ZipFile(tmp_path / "rows.npz", "w") as archive:
            archive.write(path, "x.npy")
    if suffix == "tar":
        write_tar(tmp_path / "rows.tar", {"0.npy": path.read_bytes()})
    with pytest.raises(CorruptError, match=rf"rows\.{suffix}"):
        rf.open(tmp_path / f"rows.{suffix}")[0]


def test_arrays_of_64_dimensions_are_read_as_rows_and_refused_as_samples(tmp_path: Path) -> None:
    for index in range(2):
        _with_header(tmp_path / f"{index}.npy", (1,) * 64)
    assert rf.open(tmp_path / "0.npy")[0]["array"].shape == (1,) * 63
    with pytest.raises(SourceError, match="dimensions"):
        rf.open(tmp_path)


@pytest.mark.parametrize("opened", ["bomb.npz", "."])
@pytest.mark.parametrize("honest", [True, False])
def test_an_npz_bomb_is_refused_before_it_is_decompressed(opened: str, honest: bool, tmp_path: Path) -> None:
    """A member of 1 GiB whose header says four rows, in 1 MB; its size in the directory is right or a lie."""
    head = _with_header(tmp_path / "head", (4,)).read_bytes()[:-64]
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as file:
            file.write(head)
            for _ in range(64):
                file.write(bytes(1 << 20))
        size = archive.getinfo("x.npy").file_size
    content = (tmp_path / "bomb.npz").read_bytes()
    if not honest:
        directory = content.index(b"PK\1\2")
        lie = (len(head) + 16).to_bytes(4, "little")
        assert content.count(size.to_bytes(4, "little"), directory) == 1
        content = content[:directory] + content[directory:].replace(size.to_bytes(4, "little"), lie)
        (tmp_path / "bomb.npz").write_bytes(content)
    options: dict[str, Any] = {} if opened == "bomb.npz" else {"layout": "samples"}
    most, said = refusal(lambda: rf.open(tmp_path / opened, **options)[0])
    assert said.startswith("CorruptError")
    assert "bomb.npz" in said
    assert most < 4 << 20


def test_an_npz_array_unlike_the_others_is_refused_before_it_is_decompressed(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "0.npz", x=np.ones(3, np.float32))
    np.savez_compressed(tmp_path / "1.npz", x=np.zeros((1, 64 << 20), np.uint8))
    source = rf.open(tmp_path)
    most, said = refusal(lambda: source.fetch([1]))
    assert "1.npz" in said
    assert "uint8[1, 67108864]" in said
    assert most < 4 << 20


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_of_300_members_is_opened_at_most_twice(save: Any, tmp_path: Path, monkeypatch: Any) -> None:
    save(tmp_path / "d.npz", **{f"x{index}": np.arange(3) + index for index in range(300)})
    opened: list[str] = []
    init = zipfile.ZipFile.__init__

    def counted(self: Any, file: Any, *args: Any, **options: Any) -> None:
        opened.append(file)
        init(self, file, *args, **options)

    monkeypatch.setattr(zipfile.ZipFile, "__init__", counted)
    sample = rf.open(tmp_path / "d.npz")[1]
    assert sample == {f"x{index}": 1 + index for index in range(300)}
    assert len(opened) <= 2


# --- layouts


def _saved(folder: Path, **arrays: Any) -> Path:
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, array)
    return folder


def test_npy_files_of_equal_length_are_columns_named_after_the_files(tmp_path: Path) -> None:
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10) * 3
    folder = _saved(tmp_path / "data", x=x, y=y, mask=x > 5)
    rows = [{"mask": (x[i] > 5).tolist(), "x": x[i].tolist(), "y": int(y[i])} for i in range(10)]
    for where in (folder, f"{folder}/*.npy", sorted(folder.iterdir())):
        source = pickle.loads(pickle.dumps(rf.open(where)))
        assert samples_of(source) == rows
        assert source.fields["x"] == Field("dense", "float64", (2,))
        assert int(source.blocks.sum()) == 10
    assert samples_of(rf.open(folder, columns=["y"])) == [{"y": row["y"]} for row in rows]
    seen = [value for batch in rf.Loader(rf.open(folder), 3, shuffle=True) for value in batch["y"].tolist()]
    assert Counter(seen) == Counter(y.tolist())
    before = rf.open(folder).fingerprint
    np.save(folder / "y.npy", np.arange(11) * 3)
    with pytest.raises(SourceError, match=r"11 rows in y\.npy, 10 in mask\.npy"):
        rf.open(folder)
    assert rf.open([folder / "x.npy", folder / "mask.npy"]).fingerprint != before


@pytest.mark.parametrize("where", ["folder", "pattern", "list"])
def test_npy_files_that_could_be_samples_or_columns_are_refused_without_layout(where: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path / "data", left=np.zeros((5, 2)), right=np.ones((5, 2)))
    opened: Any = {"folder": folder, "pattern": f"{folder}/*.npy", "list": sorted(folder.iterdir())}[where]
    with pytest.raises(ArgumentError, match=r"2 samples[\s\S]*5 samples with the columns left, right") as caught:
        rf.open(opened)
    assert 'layout="samples" or layout="columns"' in str(caught.value)
    assert len(rf.open(opened, layout="samples")) == 2
    assert samples_of(rf.open(opened, layout="columns"))[4] == {"left": [0.0, 0.0], "right": [1.0, 1.0]}
    rows = pickle.loads(pickle.dumps(rf.open(opened, layout="rows")))
    assert [row["array"][0] for row in samples_of(rows)] == [0.0] * 5 + [1.0] * 5


@pytest.mark.parametrize("name", ["rows.npy", "rows.npz"])
def test_a_single_file_in_a_folder_is_refused_until_layout_is_given(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = save_array(tmp_path / "data" / name, np.zeros((51, 2)))
    assert len(rf.open(path)) == 51
    for where in (tmp_path / "data", [path], f"{tmp_path}/data/*"):
        with pytest.raises(ArgumentError, match=r"51 samples[\s\S]*single sample"):
            rf.open(where)
        assert len(rf.open(where, layout="rows")) == 51
        assert rf.open(where, layout="samples")[0]["array"].shape == (51, 2)
    assert len(rf.open(path, layout="samples")) == 1
    np.savez(tmp_path / "data" / name, frames=np.zeros((51, 2)), label=np.int64(3))
    if name.endswith("z"):  # these have no rows in common
        assert rf.open(tmp_path / "data")[0]["label"] == 3


def test_numbered_npy_files_of_one_shape_are_samples(tmp_path: Path) -> None:
    folder = _saved(tmp_path, **{f"clip_{index:05d}": np.full((4, 2), index) for index in range(12)})
    assert [sample["array"][0, 0] for sample in rf.open(folder)] == list(range(12))
    assert len(rf.open(folder, layout="columns")) == 4


def test_119_npy_files_of_one_shape_are_samples_by_default(tmp_path: Path) -> None:
    folder = _saved(tmp_path, **{f"{index * 7919:x}-clip": np.full(3, index) for index in range(1, 120)})
    assert len(rf.open(folder)) == 119


def test_npy_files_that_form_neither_samples_nor_columns_are_an_error_with_the_reasons(tmp_path: Path) -> None:
    folder = _saved(tmp_path, x_train=np.zeros((9, 2)), y_train=np.zeros(9), x_test=np.zeros((4, 2)))
    reasons = r"unlike the others[\s\S]*9 rows in x_train\.npy, 4 in x_test\.npy"
    with pytest.raises(SourceError, match=reasons) as caught:
        rf.open(folder)
    assert "rankfeed.open([path, path])" in str(caught.value)
    with pytest.raises(SourceError, match="neither samples nor columns") as caught:
        rf.open(sorted(folder.iterdir()))
    assert "rankfeed.open([" not in str(caught.value)
    assert "rankfeed.from_dataset(" in str(caught.value)
    assert list(rf.open([folder / "x_train.npy", folder / "y_train.npy"])[0]) == ["x_train", "y_train"]


def test_columns_of_one_name_or_of_different_lengths_are_an_error(tmp_path: Path) -> None:
    _saved(tmp_path, **{"a/x": np.zeros(3), "b/x": np.zeros(3), "b/y": np.zeros(4)})
    with pytest.raises(SourceError, match=r"one name[\s\S]*a/x\.npy[\s\S]*b/x\.npy"):
        rf.open([tmp_path / "a/x.npy", tmp_path / "b/x.npy"], layout="columns")
    with pytest.raises(SourceError, match=r"3 rows[\s\S]*4 rows[\s\S]*b/y\.npy"):
        rf.open([tmp_path / "a/x.npy", tmp_path / "b/y.npy"], layout="columns")


def test_layout_rows_concatenates_npz_files(tmp_path: Path) -> None:
    for index in range(3):
        np.savez(tmp_path / f"part{index}.npz", x=np.arange(2) + 2 * index, y=np.zeros((2, 3)))
    source = rf.open(tmp_path, layout="rows", columns=["x"])
    assert [int(sample["x"]) for sample in source] == list(range(6))
    with pytest.raises(SourceError, match="layout="):
        rf.open(tmp_path, layout="columns")


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    arrays = {
        f"{kind}/{kind}_{index}": np.full((index + 1, 2), index) for kind in ("dog", "cat") for index in (0, 1)
    }
    return _saved(tmp_path / "train", **arrays)


def test_labels_folder_and_name_column_add_columns_of_class_numbers_and_file_names(animals: Path) -> None:
    source = pickle.loads(pickle.dumps(rf.open(animals, labels="folder", name_column="file")))
    assert source.classes == ["cat", "dog"]
    assert source.fields["label"] == Field("dense", "int64")
    assert [(int(s["label"]), s["file"], len(s["array"])) for s in source] == [
        (0, "cat/cat_0.npy", 1), (0, "cat/cat_1.npy", 2), (1, "dog/dog_0.npy", 1), (1, "dog/dog_1.npy", 2)
    ]  # fmt: skip
    batch = next(iter(rf.Loader(source, 4)))
    assert batch["label"].tolist() == [0, 0, 1, 1]
    assert batch["file"][3] == "dog/dog_1.npy"
    ordered = rf.open(animals, labels=["eel", "dog", "cat"])
    assert [int(sample["label"]) for sample in ordered] == [2, 2, 1, 1]
    assert ordered.fingerprint != rf.open(animals, labels="folder").fingerprint
    assert list(rf.open(animals, labels="folder", columns=["label"])[3]) == ["label"]
    with pytest.raises(SourceError, match="no subdirectory that has a label"):
        rf.open(animals, labels=["dog"])
    np.save(animals / "stray.npy", np.zeros((1, 2)))
    with pytest.raises(SourceError, match="no subdirectory that has a label"):
        rf.open(animals, labels="folder")


def test_the_remedy_for_labels_in_a_table_is_a_transform(tmp_path: Path) -> None:
    folder = _saved(tmp_path, a=np.zeros((1, 2)), b=np.zeros((2, 2)))
    (tmp_path / "labels.csv").write_text("file,label\na.npy,1\nb.npy,0\n")
    with pytest.raises(SourceError, match=r"a subdirectory for each class[\s\S]*name_column=[\s\S]*transform="):
        rf.open(folder, labels="folder")
    with pytest.raises(ArgumentError, match=r"labels\.csv[\s\S]*name_column=[\s\S]*transform="):
        rf.open(folder, labels="labels.csv")


def test_files_in_subfolders_are_an_error_that_says_how_to_read_them(animals: Path) -> None:
    for stray in (False, True):
        if stray:
            np.save(animals / "stray.npy", np.zeros((1, 2)))
        with pytest.raises(SourceError, match=r'subdirectories[\s\S]*labels="folder"[\s\S]*\*\*/\*\.npy'):
            rf.open(animals)
    assert len(rf.open(f"{animals}/**/*.npy", name_column="file")) == 5
    assert len(rf.open(f"{animals}/*/*.npy")) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "tables"},
        {"labels": "class"},
        {"labels": ["cat", "cat"]},
        {"labels": 1},
        {"labels": "folder", "layout": "columns"},
        {"name_column": 3},
        {"name_column": "array", "labels": "folder"},
    ],
    ids=str,
)
def test_invalid_or_contradictory_layout_labels_and_name_column_are_refused(options: Any, animals: Path) -> None:
    with pytest.raises(ArgumentError):
        rf.open(animals, **options)
    with pytest.raises(ArgumentError, match="directory"):
        rf.open(f"{animals}/*/*.npy", labels="folder")


def test_fetching_all_rows_of_an_unaligned_member_copies_only_those_that_are_sliced(tmp_path: Path) -> None:
    # The elements begin after a header that contains the name, here at an odd offset.
    rows = np.arange(256 * 16384, dtype=np.float32).reshape(256, 16384)
    np.savez(tmp_path / "data.npz", x=rows)
    source = rf.open(tmp_path / "data.npz")
    source.fetch([0])  # the checksum is compared
    most, row = peak(lambda: source.fetch(np.arange(256)).slice(7, 8)["x"].rows()[0])
    np.testing.assert_array_equal(row, rows[7])
    assert most < 1 << 20
