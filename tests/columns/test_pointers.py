"""Rows copied by the native library and without it: the same bytes, and an error for a truncated file."""

import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankfeed as rf
from rankfeed._util.native import native_library
from rankfeed.columns import pointers
from rankfeed.columns.pointers import RowPointers
from rankfeed.errors import CorruptError
from rankfeed.storage.mapped import map_file

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_native_library_is_built_where_there_is_a_compiler() -> None:
    assert native_library() is not None


@st.composite
def rows_in_memory(draw: st.DrawFn) -> tuple[Any, RowPointers]:
    """An array, and rows of it that may be empty, overlap, repeat, and begin at any byte."""
    dtype = np.dtype(draw(st.sampled_from(["u1", "i2", "f4", "i8", "c16"])))
    inner = draw(st.sampled_from([(), (1,), (2, 3), (0,)]))
    size = draw(st.integers(0, 40))
    shift = draw(st.integers(0, 9))
    content = np.arange(size * int(np.prod(inner)) * dtype.itemsize + shift, dtype=np.uint8)
    values = content[shift:].view(dtype).reshape(size, *inner)
    starts = np.array(draw(st.lists(st.integers(0, size), max_size=30)), np.int64)
    lengths = np.array([draw(st.integers(0, size - start)) for start in starts.tolist()], np.int64)
    return values, RowPointers.into(values, starts, lengths)


@pytest.fixture(params=["native", "numpy"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(pointers, "native_library", lambda: None)


def test_pickled_row_pointers_read_a_copy_of_the_memory() -> None:
    values = np.arange(4000)
    rows = RowPointers.into(values, np.arange(0, 4000, 40), np.full(100, 40)).slice(0, 50)
    rows.copy_padded(np.empty((50, 40), np.int64))
    copy = pickle.loads(pickle.dumps(rows))
    values[:] = -1
    out = np.empty((50, 40), np.int64)
    copy.copy_padded(out)
    assert (out.ravel() == np.arange(2000)).all()


@pytest.mark.parametrize("native", [True, False])
@given(case=rows_in_memory(), extra=st.integers(0, 3))
def test_rows_are_copied_padded_and_joined(case: tuple[Any, RowPointers], extra: int, native: bool) -> None:
    values, rows = case
    expected = [
        values[first : first + length]
        for first, length in zip(rows.first.tolist(), rows.lengths.tolist(), strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(pointers, "native_library", lambda: None)
        longest = int(rows.lengths.max(initial=0)) + extra
        padded = np.ones((len(rows), longest, *values.shape[1:]), values.dtype)
        rows.copy_padded(padded)
        offsets = np.concatenate([[0], np.cumsum(rows.lengths + extra)]).astype(np.int64)
        joined = np.ones((int(offsets[-1]), *values.shape[1:]), values.dtype)
        rows.copy_elements(joined, offsets)
    for row, item in enumerate(expected):
        assert padded[row, : len(item)].tobytes() == item.tobytes()
        assert padded[row, len(item) :].tobytes() == bytes(padded[row, len(item) :].nbytes)
    behind = bytes(extra * values[:0].itemsize * int(np.prod(values.shape[1:])))
    assert joined.tobytes() == b"".join(item.tobytes() + behind for item in expected)


@pytest.mark.usefixtures("library")
def test_rows_of_several_arrays_are_copied_in_any_order_and_rows_outside_raise_index_error() -> None:
    one, two = np.arange(6).reshape(3, 2), np.arange(6, 12).reshape(3, 2)
    parts = [RowPointers.into(item, np.array([2, 0]), np.ones(2, np.int64)) for item in (one, two)]
    rows = RowPointers.join(parts, [np.array([0, 3]), np.array([2, 1])])
    out = np.zeros((4, 2), np.int64)
    rows.copy_rows(out)
    assert out.tolist() == [[4, 5], [6, 7], [10, 11], [0, 1]]
    rows.slice(1, 3).copy_rows(out)
    assert out.tolist() == [[6, 7], [10, 11], [10, 11], [0, 1]]
    with pytest.raises(IndexError):
        rows.copy_rows(out[:3])
    large = np.iinfo(np.int64).max
    for first, length in [(2, 2), (4, 0), (-1, 1), (0, -1), (large, 1), (1, large), (large, large)]:
        outside = RowPointers.into(one, np.array([0, first]), np.array([1, length]))
        with pytest.raises(IndexError, match="not within"):
            outside.copy_rows(out)
        with pytest.raises(IndexError, match="not within"):
            outside.content()
    with pytest.raises(IndexError):
        RowPointers.into(one, np.array([0, 0]), np.array([1, 3])).copy_rows(np.zeros((2, 2), np.int64))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("lengths", [(900, -890), (1, 900, -890), (900, *[1 << 62] * 3, (1 << 62) - 890)])
def test_damaged_lengths_raise_index_error_and_write_nothing_outside_the_batch(lengths: tuple[int, ...]) -> None:
    rows = RowPointers.into(np.ones(1000, np.uint8), np.zeros(len(lengths), np.int64), np.array(lengths))
    offsets = np.append(0, np.cumsum(rows.lengths))
    batch = np.zeros(1000, np.uint8)
    with pytest.raises(IndexError):
        rows.copy_elements(batch[: offsets[-1]], offsets)
    assert not batch[offsets[-1] :].any()


def _rows_of(path: Path, count: int) -> RowPointers:
    data = map_file(path)
    size = len(data) // count
    lengths = np.full(count, size)
    return RowPointers.into(data, np.arange(count) * size, lengths, lambda row: f"{path.name}, row {row}")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("left", [PAGE, PAGE + 7, 4 * PAGE - 1, 0])
def test_copying_rows_of_a_truncated_file_raises_corrupt_error(left: int, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(b"x" * 4 * PAGE)
    rows = RowPointers.join([_rows_of(path, 8) for path in paths], [np.arange(8), np.arange(8) + 8])
    out = np.zeros((16, 4 * PAGE), np.uint8)
    rows.copy_padded(out)
    os.truncate(paths[1], left)
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"truncated[\s\S]*b, row"):
            rows.copy_padded(out)
        with pytest.raises(CorruptError, match=r"truncated[\s\S]*b, row"):
            rows.content()
    rows.slice(0, 8).copy_padded(out)  # of the other file only
    os.truncate(paths[1], 4 * PAGE)
    rows.copy_padded(out)


@pytest.mark.skipif(native_library() is None, reason="needs the native library")
def test_a_truncated_file_raises_corrupt_error_only_in_threads_that_copy_from_it(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_bytes(b"x" * 64 * PAGE)
    rows = {name: _rows_of(tmp_path / name, 64) for name in "abcd"}
    os.truncate(tmp_path / "a", PAGE)
    os.truncate(tmp_path / "b", 2 * PAGE)

    def copy(name: str) -> int:
        errors = 0
        for _ in range(200):
            out = np.zeros((64, PAGE), np.uint8)
            try:
                rows[name].copy_padded(out)
                assert (out == ord("x")).all()
            except CorruptError:
                errors += 1
        return errors

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(copy, "abcd")) == [200, 200, 0, 0]


OTHER_FAULT = """
import ctypes, faulthandler, mmap, os, sys
import numpy as np
from rankfeed.columns.pointers import RowPointers
order = sys.argv[1]
if order == "before":
    faulthandler.enable()
rows = RowPointers.into(np.arange(10), np.arange(10), np.ones(10, np.int64))
rows.copy_rows(np.zeros(10, np.int64))
if order in ("after", "between", "disabled"):
    faulthandler.enable()
if order in ("between", "disabled"):
    rows.copy_rows(np.zeros(10, np.int64))
if order == "disabled":
    faulthandler.disable()
with open(sys.argv[2], "wb") as file:
    file.write(b"x" * 100000)
with open(sys.argv[2], "rb") as file:
    data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
os.truncate(sys.argv[2], 0)
data[50000]
"""


@pytest.mark.parametrize("order", ["before", "after", "between", "disabled", "never"])
def test_a_bus_error_outside_a_copy_of_rows_ends_the_process_with_sigbus(order: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OTHER_FAULT, order, str(tmp_path / "file")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == -7
    assert ("Bus error" in result.stderr) == (order not in ("never", "disabled"))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_kind": "process"}])
def test_truncating_a_shard_during_an_epoch_raises_corrupt_error(workers: dict[str, Any], tmp_path: Path) -> None:
    samples = ({"x": np.full(1000, 1 + row, np.int32)} for row in range(4000))
    source = rf.write(samples, tmp_path / "data", progress=False, key="a")
    iterator = iter(rf.Loader(source, 8, shuffle=True, **workers))
    for _ in range(3):
        next(iterator)
    (shard,) = (tmp_path / "data").glob("*.arrow")
    os.truncate(shard, shard.stat().st_size // 2)
    delivered: list[Any] = []
    with pytest.raises(CorruptError, match=r"(truncated|changed)[\s\S]*shard-00000"):
        delivered.extend(iterator)
    assert all(batch["x"].all() for batch in delivered)  # no row is delivered as zeros


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_address_sanitizer_finds_no_error_in_the_native_library_while_it_copies_rows(tmp_path: Path) -> None:
    package = tmp_path / "rankfeed"
    shutil.copytree(Path(rf.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = package / "_util" / "_native.c"
    flags = ["-g", "-O1", "-fsanitize=address", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", source.with_suffix(".so"), source], check=True, timeout=600)
    runtime = subprocess.run(
        ["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=600
    )
    # Python does not free all of its memory at its end; the kernel handles SIGBUS itself.
    environ = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0",
    }
    engines = Path(__file__).parents[1] / "loading/engines"
    caches = f"{engines / 'test_process.py'}::test_rows_of_any_size_are_equal_with_and_without_worker_processes"
    names = "copied or several or truncated_file or threads or without_workers or forked or left or caches"
    tests = ["-k", names, str(Path(__file__)), str(engines / "test_copy_ahead.py"), caches]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "900", *tests],
        env=environ,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.soak
def test_a_byte_string_longer_than_4_gib_is_copied_completely() -> None:
    size = (1 << 32) + 5  # pages of zeros that are only read take no memory; the copy takes 4 GiB
    values = np.zeros(size, np.uint8)
    assert [len(item) for item in RowPointers.into(values, np.array([0]), np.array([size])).content()] == [size]
