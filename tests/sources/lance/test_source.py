"""Lance tables: rows as Lance reads them, one version for good, and processes of any kind."""

import os
import pickle
import shutil
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.blob import blob_array, blob_field
from tests.support.jobs import run_python
from tests.support.values import samples_of

import rankfeed as rf
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.lance import lance_source as source_module
from rankfeed.sources.lance import lance_table
from rankfeed.sources.lance.lance_source import LanceSource
from rankfeed.sources.lance.lance_table import TableHandle

SIZES = [40, 1, 130, 64, 7, 90]


def rows(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    vectors = pa.array([[sample_id, sample_id + 0.5] for sample_id in ids], pa.list_(pa.float32(), 2))
    return pa.table(
        {
            "id": ids,
            "vector": vectors,
            "tokens": pa.array([list(range(sample_id % 5)) for sample_id in ids], pa.list_(pa.int32())),
            "nested": [[[sample_id], [1, 2]] for sample_id in ids],
            "text": ["ä" * (sample_id % 3) for sample_id in ids],
            "raw": [bytes([sample_id % 256]) * (sample_id % 4) for sample_id in ids],
        }
    )


def write(path: Path, sizes: Iterable[int] = SIZES, deleted: str = "id % 7 = 3 AND id > 41") -> Path:
    first = 0
    for size in sizes:
        lance.write_dataset(rows(first, size), path, mode="append" if first else "create")
        first += size
    lance.dataset(path).delete(deleted)
    return path


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six unequal fragments, rows deleted in four of them."""
    return write(tmp_path_factory.mktemp("lance") / "t.lance")


@pytest.fixture(scope="module")
def source(pristine: Path) -> LanceSource:
    opened = rf.open(pristine)
    assert isinstance(opened, LanceSource)
    return opened


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "t.lance"))


def test_blocks_are_fragments_counted_in_rows_that_are_not_deleted(pristine: Path, source: LanceSource) -> None:
    fragments = lance.dataset(pristine).get_fragments()
    assert source.blocks.tolist() == [fragment.count_rows() for fragment in fragments]
    assert source.blocks.tolist()[:2] == SIZES[:2]
    assert sum(SIZES) > len(source)
    assert source.decoded_bytes > 0


def test_rows_read_in_ranges_and_one_by_one_are_the_same(
    pristine: Path, source: LanceSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "_CHUNK_BYTES", 1000)
    in_ranges = LanceSource(pristine, cache_bytes=10_000)
    expected = samples_of(source, range(len(source)))
    assert samples_of(in_ranges, range(len(source))) == expected
    assert np.array_equal(in_ranges.blocks, source.blocks)
    assert in_ranges.fingerprint == source.fingerprint
    ids = np.arange(0, len(source), 5)
    taken = source._take(ids, ("id", "tokens"))
    assert taken["id"].values.tolist() == [expected[sample_id]["id"] for sample_id in ids]
    assert np.diff(taken["tokens"].offsets).tolist() == [len(expected[sample_id]["tokens"]) for sample_id in ids]


#: Each table that is opened starts a process.
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "condition",
    ["id % 5 = 0", pytest.param("id % 90 = 1", marks=SLOW), pytest.param("id >= 60 AND id < 175", marks=SLOW)],
)
def test_a_filter_selects_the_rows_that_lance_selects(pristine: Path, condition: str) -> None:
    source = rf.open(pristine, filter=condition, columns=["id", "text"])
    expected = lance.dataset(pristine).to_table(["id", "text"], filter=condition).to_pylist()
    order = np.random.default_rng(2).permutation(len(expected))
    assert samples_of(source, order) == [expected[item] for item in order]
    ends = np.cumsum(SIZES)
    fragment = Counter(int(ends.searchsorted(row["id"], side="right")) for row in expected)
    assert source.blocks.tolist() == [fragment[fragment_id] for fragment_id in range(len(SIZES))]
    again = pickle.loads(pickle.dumps(source))
    assert (samples_of(again, order[:9]), again.fingerprint) == (samples_of(source, order[:9]), source.fingerprint)
    assert source.fingerprint != rf.open(pristine, columns=["id", "text"]).fingerprint


def test_an_open_or_unpickled_source_keeps_the_version_of_opening(folder: Path) -> None:
    source = rf.open(folder)
    before = lance.dataset(folder).version
    travelling = pickle.dumps(source)
    lance.write_dataset(rows(1000, 5), folder, mode="append")
    lance.dataset(folder).delete("id < 10")
    for item in (source, pickle.loads(travelling), rf.open(folder, version=before)):
        assert len(item) == sum(source.blocks)
        assert item.fetch(range(len(item)))["id"].gather()[:3].tolist() == [0, 1, 2]  # type: ignore[attr-defined]
        assert (item.fingerprint, item.version) == (source.fingerprint, before)  # type: ignore[attr-defined]
    latest = rf.open(folder)
    assert len(latest) == len(source) + 5 - 10 + 1 * (source[9]["id"] > 9)
    assert latest.fingerprint != source.fingerprint


def test_only_the_columns_asked_for_are_read_from_lance(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rf.open(pristine, columns=["text", "id"])
    asked: list[Any] = []
    real = TableHandle.call
    monkeypatch.setattr(TableHandle, "call", lambda self, *given: asked.append(given[-1]) or real(self, *given))
    assert list(source[0]) == ["text", "id"]
    assert set(map(tuple, asked)) == {("text", "id")}


#: A column of blobs in the first of their two encodings.
IMAGE = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})


def blobs(count: int) -> list[bytes]:
    return [bytes([row]) * (row * 700) for row in range(count)]


@pytest.mark.parametrize("encoding", [pytest.param("1", marks=SLOW), "2"])
def test_blobs_are_read_only_for_the_rows_and_columns_asked_for(
    tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = blobs(30)
    field, column = (IMAGE, pa.array(contents)) if encoding == "1" else (blob_field("image"), blob_array(contents))
    table = pa.table([range(30), column], schema=pa.schema([pa.field("id", pa.int64()), field]))
    lance.write_dataset(table, tmp_path / "b", max_rows_per_file=8, data_storage_version=f"2.{encoding}")
    lance.dataset(tmp_path / "b").delete("id = 3 OR id = 20")
    kept = [row for row in range(30) if row not in (3, 20)]
    source = rf.open(tmp_path / "b")
    asked: list[tuple[Any, ...]] = []
    real = TableHandle.call
    monkeypatch.setattr(TableHandle, "call", lambda self, *given: asked.append(given) or real(self, *given))
    ids = [25, 0, 7, 7, 3]
    assert source.fetch(ids)["image"].rows() == [contents[kept[sample_id]] for sample_id in ids]
    assert [given[1].tolist() for given in asked if given[0] == "blobs"] == [[0, 3, 7, 25]]
    asked.clear()
    source.expect(ids)
    assert source.fetch(ids, ["id"])["id"].gather().tolist() == [kept[sample_id] for sample_id in ids]  # type: ignore[attr-defined]
    assert "blobs" not in [given[0] for given in asked]
    result: Counter[Any] = Counter()
    for batch in rf.Loader(source, 7, shuffle=True):
        result.update(zip(batch["id"].tolist(), batch["image"], strict=True))
    assert result == Counter((row, contents[row]) for row in kept)


def test_a_null_blob_is_an_error_that_names_its_row_or_is_masked(tmp_path: Path) -> None:
    table = pa.table([[b"a", None, b"c"]], schema=pa.schema([IMAGE]))
    lance.write_dataset(table, tmp_path / "n", data_storage_version="2.1")
    with pytest.raises(SourceError, match=r"null[\s\S]*version 1, row 1, column 'image'[\s\S]*nulls="):
        rf.open(tmp_path / "n").fetch([2, 1])
    masked = rf.open(tmp_path / "n", nulls="mask")
    assert [list(sample.values()) for sample in samples_of(masked, [2, 1])] == [[b"c", True], [b"", False]]
    assert samples_of(masked, [0], ["image_valid"]) == [{"image_valid": True}]


@pytest.mark.parametrize("cache_bytes", [0, pytest.param(1 << 30, marks=SLOW)])
def test_a_null_in_a_filtered_row_is_an_error_with_its_row_in_the_table(cache_bytes: int, tmp_path: Path) -> None:
    lance.write_dataset(pa.table({"x": [1, 2, None]}), tmp_path / "n")
    source = rf.open(tmp_path / "n", filter="x is null or x = 2", cache_bytes=cache_bytes)
    with pytest.raises(SourceError, match=r"null[\s\S]*version 1, [a-z 0]*, row 2, column 'x'"):
        source.fetch([1])


def test_lance_is_imported_at_the_first_read_and_not_when_a_table_is_opened(pristine: Path) -> None:
    program = (
        "import sys, rankfeed as rf\n"
        "source = rf.open(sys.argv[1]); source.blocks, source.fingerprint, len(source)\n"
        "print('lance' in sys.modules); source[0]; print('lance' in sys.modules)"
    )
    assert run_python(program, pristine).split() == ["False", "True"]


def test_a_read_after_an_interrupt_returns_its_rows(source: LanceSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lance_table, "forked_from_lance", lambda: True)
    handle = pickle.loads(pickle.dumps(source._handle))

    def ids(first: int) -> list[int]:
        result: list[int] = handle.call("span", 0, first, 2, ["id"])["id"].to_pylist()
        return result

    def interrupted() -> None:
        raise KeyboardInterrupt

    assert ids(3) == [3, 4]
    beside = handle._open
    assert isinstance(beside, lance_table.IsolatedTable)
    beside._pipe.recv = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ids(5)
    assert beside._process.returncode is not None
    assert ids(7) == [7, 8]
    handle._open.close()


HANDLER = """
import signal, sys
import rankfeed as rf
from rankfeed.sources.lance import lance_table

path, way = sys.argv[1:]
column = "image" if way == "blobs" else "id"
source = rf.open(path)
expected = source.fetch(range(len(source)), [column])[column].rows()
if way == "isolated":
    lance_table.forked_from_lance = lambda: True


def handler(*_):
    read.append(source.fetch([3], [column])[column].rows() == [expected[3]])


def trace(frame, event, argument):
    code = frame.f_code
    if code.co_name == name and code.co_filename.endswith(("lance_table.py", "connection.py")):
        sys.settrace(None)
        signal.raise_signal(signal.SIGUSR1)


signal.signal(signal.SIGUSR1, handler)
for name in ("__init__", "call", "send" if way == "isolated" else "info"):
    read = []
    source._handle = lance_table.TableHandle(source._info)
    source._cache = type(source._cache)(0)
    sys.settrace(trace)
    rows = source.fetch(range(len(source)), [column])[column].rows()
    sys.settrace(None)
    assert rows == expected and read == [True], (name, read)
"""


@pytest.mark.parametrize("way", ["direct", *(pytest.param(way, marks=SLOW) for way in ("isolated", "blobs"))])
def test_a_signal_handler_reads_while_its_thread_opens_or_reads_the_table(way: str, tmp_path: Path) -> None:
    path = tmp_path / "t.lance"
    table = pa.table([range(30), pa.array(blobs(30))], schema=pa.schema([pa.field("id", pa.int64()), IMAGE]))
    lance.write_dataset(table, path)
    run_python(HANDLER, path, way)


def test_a_forked_child_abandons_the_open_table_and_the_lock_of_its_parent(source: LanceSource) -> None:
    handle = TableHandle(source._info)
    table: Any = object()
    handle._open = table
    with handle._lock:
        child = os.fork()
        if not child:
            is_kept = any(kept is table for kept in lance_table._ABANDONED)
            os._exit(0 if is_kept and handle._open is None and not handle._lock.locked() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_reading_a_version_that_was_cleaned_up_is_an_error_that_names_it(folder: Path) -> None:
    unread, source = LanceSource(folder), LanceSource(folder)
    source.fetch([0])
    lance.dataset(folder).optimize.compact_files(target_rows_per_fragment=10_000)
    lance.dataset(folder).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    for read in (lambda: source.fetch([200]), lambda: source._take(np.array([60, 200]), ("id",))):
        with pytest.raises(CorruptError, match=rf"missing[\s\S]*version {source.version}, fragment [\s\S]*tag it"):
            read()
    with pytest.raises(SourceError, match=rf"version {source.version}[\s\S]*remedy"):
        unread.fetch([0])
    with pytest.raises(SourceError, match=rf"no version {source.version}[\s\S]*tag it"):
        rf.open(folder, version=source.version)


@pytest.mark.parametrize("change", [1, pytest.param(-1000, marks=SLOW)])
def test_a_data_file_of_another_size_or_missing_is_an_error_with_its_fragment(folder: Path, change: int) -> None:
    fragment = lance.dataset(folder).get_fragments()[2].metadata
    path = folder / "data" / fragment.files[0].path
    content = path.read_bytes()
    source = LanceSource(folder)
    source.fetch([0])
    path.write_bytes(content[:change] if change < 0 else content + b"x")
    for read in (lambda: source.fetch([50]), lambda: rf.open(folder)):
        with pytest.raises(CorruptError, match=rf"another size[\s\S]*{path.name}[\s\S]*fragment 2[\s\S]*remedy"):
            read()
    path.unlink()
    with pytest.raises(CorruptError, match=rf"missing[\s\S]*{path.name}[\s\S]*fragment 2[\s\S]*remedy"):
        rf.open(folder)


def test_a_damaged_deletion_file_that_crashes_lance_is_an_error(folder: Path) -> None:
    path = sorted((folder / "_deletions").iterdir())[0]
    content = bytearray(path.read_bytes())
    # The prefix of a buffer that says how long it is when decompressed: -1 becomes 2**56 - 1.
    start = content.index(b"\xff" * 8)
    content[start + 7] = 0
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"crashed[\s\S]*version 7, fragment 2[\s\S]*remedy"):
        rf.open(folder)


def test_invalid_versions_filters_and_folders_without_table_are_refused(pristine: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no version 99[\s\S]*t\.lance"):
        rf.open(pristine, version=99)
    with pytest.raises(ArgumentError, match=r"filter cannot be used[\s\S]*nothing[\s\S]*version 7"):
        rf.open(pristine, filter="nothing > 3")
    with pytest.raises(SourceError, match=r"there are no samples[\s\S]*id < 0"):
        rf.open(pristine, filter="id < 0")
    for options in ({"version": 1.5}, {"version": True}, {"filter": ""}, {"filter": 3}):
        with pytest.raises(ArgumentError, match=f"invalid {next(iter(options))}"):
            rf.open(pristine, **options)
    (tmp_path / "_versions").mkdir()
    with pytest.raises(SourceError):
        rf.open(tmp_path)
    (tmp_path / "_versions" / "1.manifest").write_bytes(b"LANC")
    with pytest.raises(SourceError, match=str(tmp_path)):
        rf.open(tmp_path)


def test_a_pickled_source_refuses_a_table_that_replaced_its_own(folder: Path) -> None:
    source = rf.open(folder)
    travelling = pickle.dumps(source)
    shutil.rmtree(folder)
    write(folder)
    with pytest.raises(SourceError, match=r"replaced[\s\S]*version 7"):
        pickle.loads(travelling).fetch([0])


def test_a_damaged_encoding_name_that_crashes_lance_is_an_error(folder: Path) -> None:
    file = max((folder / "data").glob("*.lance"), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    start = content.rindex(b"/lance.encodings") + 6
    file.write_bytes(content[:start] + bytes(4) + content[start + 4 :])
    with pytest.raises(CorruptError, match=r"metadata[\s\S]*version"):
        list(rf.open(folder))
