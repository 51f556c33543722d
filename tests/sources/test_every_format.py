"""What every format promises alike: its samples are, to the last bit, those that its own library reads."""

import multiprocessing
import os
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sources import writers
from tests.sources.compare import difference, digest, digests
from tests.support.jobs import run_python
from tests.support.values import contents

import rankfeed as rf
from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.paths import natural

#: Of these a sample is no dict of columns.
WHOLE = ("pyg", "pyg_dataset")

Written = writers.Written
Made = Callable[[str], Written]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Datasets of this module by the names of their formats."""
    folder = tmp_path_factory.mktemp("formats")
    return cache(lambda name: writers.make(name, folder / name))


@pytest.fixture(scope="module", params=list(writers.FORMATS))
def written(request: pytest.FixtureRequest, made: Made) -> Written:
    return made(request.param)


@pytest.fixture(scope="module", params=writers.BY_PATH)
def by_path(request: pytest.FixtureRequest, made: Made) -> Written:
    return made(request.param)


@pytest.fixture(scope="module")
def source(written: Written) -> Any:
    return written.open()


@pytest.fixture(scope="module")
def expected(written: Written) -> list[str]:
    return Own(digests(written.expected))


class Own(list[str]):
    """What is expected of each sample; not for printing."""

    def __repr__(self) -> str:
        return f"{len(self)} digests"


def test_samples_equal_those_read_by_the_library_of_the_format(written: Written, source: Any) -> None:
    assert len(source) == len(written.expected) == writers.COUNT
    result = source.fetch(np.arange(len(source))).samples()
    for index, (sample, own) in enumerate(zip(result, written.expected, strict=True)):
        assert difference(sample, own) is None, index
    assert digests([source[0], source[-1]]) == digests([written.expected[0], written.expected[-1]])
    assert digests(list(source)) == digests(written.expected)


@given(ids=st.lists(st.integers(0, writers.COUNT - 1), max_size=40))
def test_samples_come_in_the_requested_order(ids: list[int], source: Any, expected: list[str]) -> None:
    assert digests(source.__getitems__(ids)) == [expected[sample_id] for sample_id in ids]


def test_blocks_sum_to_the_length_and_fields_match_the_columns_of_a_batch(written: Written, source: Any) -> None:
    assert source.blocks.dtype == np.int64
    assert int(source.blocks.sum()) == len(source)
    assert (source.blocks > 0).all()
    batch = source.fetch([5, 3, 5, 102])
    assert list(batch) == list(source.fields)
    for name, column in batch.items():
        assert column.field == source.fields[name], name
    assert source.fetch([]).num_rows == 0
    assert list(source.fetch([])) == list(source.fields)


#: Columns that a format stores as they are delivered.
IN_PLACE = {
    "webdataset": ["raw.bin", "txt", "x.npy", "tokens.npy"],
    "packed": ["raw", "text", "x", "tokens"],
    "arrow_file": ["raw", "text", "x", "tokens"],
    "mds": ["raw", "text"],
    "concat": ["raw", "x"],
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_batch_points_into_the_mapped_file(name: str, made: Made) -> None:
    source = made(name).open()
    for column in IN_PLACE[name]:
        one, other = (source.fetch(ids)[column].pointers.memory[0].array for ids in ([3, 5], [4]))
        assert np.may_share_memory(one, other), column
        assert not one.flags.writeable
        assert not one.flags.owndata


def test_three_threads_read_correct_samples_with_at_most_three_files_open(
    written: Written, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("storage.data_files", "sources.parquet.reader"):
        monkeypatch.setattr(f"rankfeed.{module}.OPEN_FILES", 1)
    folder = Path(shutil.copytree(written.folder, tmp_path / "data"))  # of which no other source has files open
    source = written.open(folder)

    def read(seed: int) -> bool:
        ids = np.random.default_rng(seed).integers(0, writers.COUNT, 40).tolist()
        return digests(source.__getitems__(ids)) == [expected[row] for row in ids]

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(read, range(12)))
    is_open = set(map(os.path.realpath, Path("/proc/self/fd").iterdir()))
    is_open |= {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    if written.name not in (*WHOLE, "lance"):  # whose libraries open the files
        assert len([path for path in is_open if path.startswith(f"{folder}/")]) <= 3


@pytest.mark.parametrize(
    "name", ["webdataset", "parquet_checksums", "arrow_file", "arrow_stream", "csv", "jsonl", "npz"]
)
def test_files_that_rankfeed_writes_beside_data_are_not_read(name: str, made: Made, tmp_path: Path) -> None:
    written = made(name)
    folder = shutil.copytree(written.folder, tmp_path / "data", ignore=shutil.ignore_patterns("*.rankfeed"))
    (folder / "0-alone-01234567.rankfeed-ledger").write_bytes(b"RFLG" * 8)
    for _ in range(2):  # the first one may write indexes
        everything = sorted(folder.iterdir(), key=lambda path: natural(str(path)))
        for where in (f"{folder}/*", f"{folder}/?*", everything, list(map(str, everything)), folder):
            assert digests(rf.open(where)) == digests(written.expected)
        (folder / ".tmp-host-17-0123abcd").write_bytes(b"a shard that is being written")


def test_shards_of_a_written_dataset_are_read_as_arrow_files_by_pattern_and_by_list(tmp_path: Path) -> None:
    rf.write(rf.from_dataset([{"x": row} for row in range(20)]), tmp_path / "packed", progress=False)
    for where in (f"{tmp_path}/packed/*", list((tmp_path / "packed").iterdir())):
        assert [int(row["x"]) for row in rf.open(where)] == list(range(20))


def test_decompressed_copies_cached_in_the_folder_of_the_shards_are_not_read_as_data(tmp_path: Path) -> None:
    writers.make("tar_gz", tmp_path / "data")
    options: dict[str, Any] = {"decompress": True, "cache_dir": tmp_path / "data"}
    lengths = [len(rf.open(f"{tmp_path}/data/{pattern}", **options)) for pattern in ("*", "*", "**/*")]
    assert lengths == [writers.COUNT] * 3


def test_only_the_requested_columns_are_read_in_the_requested_order(by_path: Written) -> None:
    if by_path.name in WHOLE:
        with pytest.raises(ArgumentError, match="have no columns"):
            by_path.open(columns=["x"])
        return
    names = list(by_path.open().fields)
    chosen = names[-1:] + names[:1] if len(names) > 1 else names
    source = by_path.open(columns=chosen)
    assert list(source.fields) == chosen
    assert list(source.fetch([1])) == chosen
    wanted = [{name: sample[name] for name in chosen} for sample in by_path.expected]
    assert digests(source.fetch(range(writers.COUNT)).samples()) == digests(wanted)
    assert list(by_path.open().fetch([2, 1], [names[-1]])) == [names[-1]]
    for order in (chosen, names, names[::-1]):
        assert list(by_path.open(columns=order).fields) == list(by_path.open().fetch([2, 1], order)) == order
        for batch in rf.Loader(by_path.open(), 50, columns=order, ragged="list", topology=rf.Topology()):
            assert list(batch) == order
    assert list(pickle.loads(pickle.dumps(source)).fields) == chosen


def test_symbolic_links_to_blobs_of_a_hub_cache_are_read_and_not_changed(by_path: Written, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    shutil.copytree(by_path.folder, snapshot)
    blobs.mkdir()
    for index, path in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        path.rename(blobs / f"{index:x}")
        path.symlink_to(os.path.relpath(blobs / f"{index:x}", path.parent))
    before = contents(blobs)
    result = by_path.open(snapshot)
    assert result.fingerprint == by_path.open().fingerprint
    assert digests(list(result)) == digests(by_path.expected)
    assert contents(blobs) == before


def test_file_names_that_are_not_utf8_are_read_or_raise_source_error(by_path: Written, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9-")
    folder = tmp_path / name
    shutil.copytree(by_path.folder, folder)
    if writers.FORMATS[by_path.name].where.startswith("*"):
        for path in list(folder.iterdir()):
            path.rename(path.with_name(name + path.name))
    if by_path.name in ("lance", "pyg"):  # their libraries take only text
        with pytest.raises(SourceError, match=r"has to be UTF-8[\s\S]*caf\\xe9") as caught:
            by_path.open(folder)
        str(caught.value).encode()
        return
    source = pickle.loads(pickle.dumps(by_path.open(folder)))
    assert len(source.fingerprint) == 32
    assert digests(source.fetch(range(writers.COUNT)).samples()) == digests(by_path.expected)
    with pytest.raises(SourceError) as caught:
        rf.open(folder / "missing")
    str(caught.value).encode()


def test_the_error_for_an_unknown_column_lists_the_columns_that_exist(written: Written, source: Any) -> None:
    names = list(source.fields)
    with pytest.raises(ArgumentError, match="nosuch") as caught:
        source.fetch([0], ["nosuch"])
    assert all(name in str(caught.value) for name in names)
    if written.name in writers.BY_PATH:
        with pytest.raises(ArgumentError, match="nosuch"):
            written.open(columns=["nosuch"])


def test_fetching_an_id_out_of_range_raises_source_error_and_indexing_index_error(source: Any) -> None:
    for bad in ([writers.COUNT], [0, -1], [2**62]):
        with pytest.raises(SourceError, match="no such sample"):
            source.fetch(bad)
    for index in (writers.COUNT, -writers.COUNT - 1):
        with pytest.raises(IndexError):
            source[index]


def test_the_fingerprint_changes_with_added_samples_not_with_the_path(written: Written, tmp_path: Path) -> None:
    fingerprint = written.open().fingerprint
    moved = Path(shutil.copytree(written.folder, tmp_path / "elsewhere" / "under another name"))
    assert written.open(moved).fingerprint == fingerprint
    assert pickle.loads(pickle.dumps(written.open())).fingerprint == fingerprint
    if written.name != "select":  # which names its samples one by one
        writers.grow(written.name, moved)
        grown = written.open(moved)
        assert len(grown) == writers.COUNT + 7
        assert grown.fingerprint != fingerprint


def test_an_unpickled_source_reads_the_original_samples_or_raises(by_path: Written, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(by_path.folder, tmp_path / "data"))
    source = by_path.open(moved)
    pickled = pickle.dumps(source)
    assert len(pickled) < 4000 + 60 * len(contents(moved))  # of each file its name and what was seen of it
    writers.grow(by_path.name, moved)
    try:
        arrived = pickle.loads(pickled)
        result = digests(arrived.__getitems__(range(writers.COUNT)))
    except SourceError as error:
        refused = error
    else:  # formats that add files, or versions (Lance), still have those that the source was opened with
        assert (len(arrived), result) == (writers.COUNT, digests(by_path.expected))
        return
    assert re.search(r"changed|replaced|damaged", refused.summary)
    assert str(moved) in str(refused)


def read_all(sources: dict[str, Any], results: Any) -> None:
    """In another process: each source in an order of its own."""
    for name, source in sources.items():
        try:
            ids = np.random.default_rng(3).permutation(len(source)).tolist()
            result = dict(zip(ids, digests(source.__getitems__(ids)), strict=True))
            results.put((name, (result, source.fingerprint)))
        except BaseException as error:
            results.put((name, repr(error)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_forked_and_a_spawned_process_read_the_same_samples(method: str, made: Made) -> None:
    """Sources that were read in this process go to another one; under fork by what it inherits."""
    every = [made(name) for name in writers.FORMATS]
    sources = {item.name: item.open() for item in every}
    for source in sources.values():
        source.fetch([1, 100, 50]).samples()  # files are open when the child starts
        assert len(pickle.dumps(source)) < 40_000  # paths, and what was seen of each file: nothing that was read
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=read_all, args=(sources, results), daemon=True)
    child.start()
    try:
        result = dict(results.get(timeout=600) for _ in every)
    finally:
        child.kill()
        child.join(600)
    for item in every:
        everything = dict(enumerate(digests(item.expected)))
        assert result[item.name] == (everything, sources[item.name].fingerprint), item.name


def test_reading_changes_no_file_of_the_data_and_adds_only_indexes(by_path: Written, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(by_path.folder, tmp_path / "data"))
    before = contents(folder)
    source = by_path.open(folder)
    source.fetch(range(len(source))).samples()
    del source
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before
    added = [name for name in after if name not in before]
    leaves = writers.FORMATS[by_path.name].leaves
    assert all(any(Path(name).match(pattern) for pattern in leaves) for name in added), added


def test_data_in_read_only_folders_are_read(by_path: Written, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(by_path.folder, tmp_path / "data"))
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        source = by_path.open(folder)
        assert digests(source.__getitems__([4, 90])) == digests([by_path.expected[4], by_path.expected[90]])
    finally:
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_an_epoch_of_two_ranks_delivers_every_sample_once(written: Written, source: Any) -> None:
    if written.name in WHOLE:
        return
    result: Counter[tuple[int, str]] = Counter()
    for rank in range(2):
        topology = rf.Topology(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        options: dict[str, Any] = {"ragged": "list", "id_column": "id", "topology": topology, "audit": True}
        for batch in rf.Loader(source, 8, shuffle=True, num_workers=2, **options):
            for row, sample_id in enumerate(batch.pop("id").tolist()):
                result[sample_id, digest({name: value[row] for name, value in batch.items()})] += 1
    assert result == Counter(enumerate(digests(written.expected)))


CUT = """
import os, sys
from pathlib import Path
from rankfeed.errors import RankfeedError
from tests.sources import writers
for name in sys.argv[2:]:
    print(name, end=" ", flush=True)
    folder = Path(sys.argv[1]) / name
    source = writers.open_as(name, folder)
    source.fetch(range(len(source))).samples()
    for path in folder.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)
    try:
        source.fetch(range(len(source))).samples()
    except RankfeedError as error:
        assert str(folder) in str(error), error
    print("lives", flush=True)
"""


def test_truncating_open_files_to_zero_bytes_does_not_end_the_reading_process(made: Made, tmp_path: Path) -> None:
    names = [name for name in writers.BY_PATH if name not in WHOLE]  # PyTorch maps those itself
    for name in names:
        shutil.copytree(made(name).folder, tmp_path / name)
    assert run_python(CUT, tmp_path, *names).splitlines() == [f"{name} lives" for name in names]
