"""Data that change after a checkpoint, or while they are read: an error or the original data, never a mixture."""

import itertools
import json
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.sources import writers
from tests.support.jobs import run_python
from tests.support.marks import slow
from tests.support.tables import write_table
from tests.support.tar import write_tar

import rankfeed as rf
from rankfeed._util.native import native_library
from rankfeed.errors import CorruptError, RankfeedError, StateError

#: Samples of a data set, and files where a format has several; values of the original and of the other one.
ROWS, FILES = 60, 6
OLD, NEW = 1000, 5000
FILE_ROWS = ROWS // FILES
TOPOLOGY = rf.Topology()
ENGINES: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"num_workers": 2},
    "process": {"num_workers": 2, "worker_kind": "process"},
}


def pieces(base: int, count: int = FILES) -> list[Any]:
    return np.split(np.arange(base, base + ROWS), count)


# Each format, written so that both data sets have files of equal sizes and equal headers.


def table_writer(suffix: str, count: int = FILES, **options: Any) -> Callable[[Path, int], None]:
    """Writes the values as a table into files of a format."""

    def write(folder: Path, base: int) -> None:
        for index, values in enumerate(pieces(base, count)):
            write_table(pa.table({"y": values}), folder / f"{index}.{suffix}", **options)

    return write


def file_writer(save: Callable[[Path, int], Any], suffix: str) -> Callable[[Path, int], None]:
    """Writes a file for each value."""

    def write(folder: Path, base: int) -> None:
        for value in range(base, base + ROWS):
            save(folder / f"{value - base:02}.{suffix}", np.full(3, value))

    return write


def write_packed(folder: Path, base: int) -> None:
    rows = [{"y": value} for value in range(base, base + ROWS)]
    rf.write(rows, folder / "data", shard_bytes=8 * FILE_ROWS, progress=False)


def save_npz(path: Path, values: Any, save: Callable[..., None] = np.savez) -> None:
    save(path, y=values)


def rows_writer(save: Callable[[Path, Any], Any], name: str) -> Callable[[Path, int], None]:
    """Writes all values into one file."""
    return lambda folder, base: save(folder / name, np.arange(base, base + ROWS))


def write_npy_columns(folder: Path, base: int) -> None:
    for name, first in (("other", base + ROWS), ("y", base)):
        np.save(folder / f"{name}.npy", np.arange(first, first + ROWS))


def write_shards(folder: Path, base: int) -> None:
    for index, piece in enumerate(pieces(base)):
        write_tar(folder / f"{index}.tar", {f"{value - base:04}.cls": str(value).encode() for value in piece})


def write_wids(folder: Path, base: int) -> None:
    write_shards(folder, base)
    shards = [{"url": f"{index}.tar", "nsamples": FILE_ROWS} for index in range(FILES)]
    (folder / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": shards}))


def write_energon(folder: Path, base: int) -> None:
    write_shards(folder, base)
    (folder / ".nv-meta").mkdir()
    counts = {f"{index}.tar": FILE_ROWS for index in range(FILES)}
    (folder / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": counts}))


def write_mds(folder: Path, base: int, **options: Any) -> None:
    from tests.sources.mds import streaming_mds

    samples = [{"y": value} for value in range(base, base + ROWS)]
    streaming_mds.write(folder / "data", {"y": "int64"}, samples, size_limit=300, **options)


def write_huggingface(folder: Path, base: int) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"y": range(base, base + ROWS)}).save_to_disk(folder / "data", num_shards=3)


def write_lance(folder: Path, base: int) -> None:
    for index, piece in enumerate(pieces(base)):
        write_table(pa.table({"y": piece}), folder / "data.lance", mode="append" if index else "create")


def graph(value: int) -> Any:
    import torch
    from torch_geometric.data import Data

    return Data(x=torch.ones(2, 1), y=torch.tensor([value]))


def write_pyg(folder: Path, base: int) -> None:
    from torch_geometric.data import InMemoryDataset

    (folder / "processed").mkdir()
    InMemoryDataset.save(list(map(graph, range(base, base + ROWS))), str(folder / "processed" / "data.pt"))


def database_of_graphs(folder: Path) -> Any:
    from torch_geometric.data import OnDiskDataset

    class Graphs(OnDiskDataset):
        def serialize(self, data: Any) -> dict[str, Any]:
            return {"y": int(data.y)}

        def deserialize(self, data: dict[str, Any]) -> Any:
            return graph(data["y"])

    return Graphs(str(folder), schema={"y": int})


def write_pyg_database(folder: Path, base: int) -> None:
    dataset = database_of_graphs(folder)
    dataset.extend(list(map(graph, range(base, base + ROWS))))
    dataset.close()


@dataclass(frozen=True)
class Kind:
    """How a format is written and opened, and the engines that read it."""

    write: Callable[[Path, int], Any]
    open: Callable[[Path], rf.Source]
    engines: tuple[str, ...] = ("inline", "thread", "process")


def within(name: str, **options: Any) -> Callable[[Path], rf.Source]:
    return lambda folder: rf.open(f"{folder}/{name}" if name else folder, **options)


PLAIN_PAGES: dict[str, Any] = {"write_statistics": False, "use_dictionary": False, "compression": "none"}
KINDS = {
    "packed": Kind(write_packed, within("data")),
    "npy_files": Kind(file_writer(np.save, "npy"), within("")),
    "npz_files": Kind(file_writer(save_npz, "npz"), within("")),
    "npy": Kind(rows_writer(np.save, "rows.npy"), within("rows.npy")),
    "npy_columns": Kind(write_npy_columns, within("", layout="columns")),
    "npz": Kind(rows_writer(save_npz, "rows.npz"), within("rows.npz")),
    "npz_compressed": Kind(
        rows_writer(partial(save_npz, save=np.savez_compressed), "rows.npz"), within("rows.npz")
    ),
    "arrow": Kind(table_writer("arrow"), within("*.arrow")),
    "arrow_streams": Kind(table_writer("arrows", compression="zstd"), within("*.arrows")),
    "parquet_files": Kind(table_writer("parquet", **PLAIN_PAGES), within("")),
    "parquet": Kind(table_writer("parquet", 1, row_group_size=FILE_ROWS, **PLAIN_PAGES), within("0.parquet")),
    "tar": Kind(write_shards, within("*.tar")),
    "wids": Kind(write_wids, within("index.json")),
    "energon": Kind(write_energon, within("")),
    "mds": Kind(write_mds, within("data")),
    "mds_zstd": Kind(partial(write_mds, compression="zstd", hashes=["xxh64"]), within("data")),
    "huggingface": Kind(write_huggingface, within("data")),
    "csv": Kind(table_writer("csv"), within("*.csv")),
    "jsonl": Kind(table_writer("jsonl"), within("*.jsonl")),
    "lance": Kind(write_lance, within("data.lance")),
    "pyg": Kind(write_pyg, within("")),
    # Its class is made here: worker processes have no name to find it by.
    "pyg_database": Kind(
        write_pyg_database, lambda folder: rf.from_dataset(database_of_graphs(folder)), ("inline", "thread")
    ),
    "concat": Kind(
        table_writer("arrow"),
        lambda folder: rf.concat([rf.open(f"{folder}/[0-2].arrow"), rf.open(f"{folder}/[3-5].arrow")]),
    ),
    "select": Kind(table_writer("arrow"), lambda folder: within("*.arrow")(folder).select(range(ROWS)[::-1])),
}


def values_of(batch: Any) -> list[int]:
    column = (
        batch.y if hasattr(batch, "y") else next(batch[name] for name in ("y", "cls", "array") if name in batch)
    )
    result: list[int] = column.reshape(-1).tolist()
    return result if "y_lengths" not in batch and column.dim() == 1 else column[:, 0].tolist()


ORIGINAL = Counter(range(OLD, OLD + ROWS))


# The changes: each is made to a copy of the original, with a copy of the other data set at hand.


def data_files(folder: Path) -> list[Path]:
    """All files but what rankfeed leaves there, folder by folder."""
    ours = (".rankfeed", ".lock")
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(ours))


def pairs(old: Path, new: Path) -> list[tuple[Path, Path]]:
    return list(zip(data_files(old), data_files(new), strict=False))


def shards_of(folder: Path) -> list[Path]:
    """The files that hold rows, as far as sizes tell: some of the largest."""
    about = (".json", ".sqlite", ".idx", ".manifest", ".txn")  # what says where rows are, and holds none
    files = [path for path in data_files(folder) if path.suffix not in about]
    most = max(path.stat().st_size for path in files)
    return [path for path in files if path.stat().st_size * 2 >= most]


def swap_folders(old: Path, new: Path, _: random.Random) -> None:
    os.rename(old, old.with_name("aside"))
    os.rename(new, old)


def replace_files(old: Path, new: Path, _: random.Random) -> None:
    for mine, other in pairs(old, new):
        os.replace(other, mine)


def replace_one(old: Path, new: Path, rng: random.Random) -> None:
    mine = rng.choice(shards_of(old))
    os.replace(dict(pairs(old, new))[mine], mine)


def rewrite(mine: Path, content: bytes) -> None:
    with open(mine, "r+b") as file:  # without truncating it first, which would end a process that has it mapped
        file.write(content)


def rewrite_files(old: Path, new: Path, _: random.Random) -> None:
    for mine, other in pairs(old, new):
        rewrite(mine, other.read_bytes())


def rewrite_one(old: Path, new: Path, rng: random.Random) -> None:
    mine = rng.choice(shards_of(old))
    rewrite(mine, dict(pairs(old, new))[mine].read_bytes())


def exchange_names(old: Path, new: Path, rng: random.Random) -> None:
    shards = shards_of(old)
    if len(shards) == 1:
        replace_one(old, new, rng)
        return
    one, other = rng.sample(shards, 2)
    os.rename(one, old / "between")
    os.rename(other, one)
    os.rename(old / "between", other)


def append_bytes(old: Path, _: Path, rng: random.Random) -> None:
    with open(rng.choice(shards_of(old)), "ab") as file:
        file.write(bytes(1024))


def copy_again(old: Path, _: Path, __: random.Random) -> None:
    for index, mine in enumerate(data_files(old)):
        if index % 2:
            os.replace(shutil.copyfile(mine, mine.with_name(mine.name + ".part")), mine)
        else:
            rewrite(mine, mine.read_bytes())


CHANGES: dict[str, Callable[[Path, Path, random.Random], None]] = {
    change.__name__: change
    for change in (
        *(swap_folders, replace_files, replace_one, rewrite_files),
        *(rewrite_one, exchange_names, append_bytes, copy_again),
    )
}
#: Those that reach what is open, and are found within a second.
IN_PLACE = ("rewrite_files", "rewrite_one", "append_bytes")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Filled as formats are asked for: each with a folder of the original and one of the other data set."""
    return {"": tmp_path_factory.mktemp("written")}


class Data:
    """Copies of both data sets of a format, for one round."""

    def __init__(self, name: str, originals: dict[str, Path], place: Path) -> None:
        self.kind = KINDS[name]
        if name not in originals:
            originals[name] = originals[""] / name
            for which, base in (("old", OLD), ("new", NEW)):
                (originals[name] / which).mkdir(parents=True)
                self.kind.write(originals[name] / which, base)
        self.old, self.new = place / "old", place / "new"
        shutil.rmtree(place, ignore_errors=True)
        for folder in (self.old, self.new):
            shutil.copytree(originals[name] / folder.name, folder)

    def change(self, name: str, rng: random.Random, *, keep_times: bool = False) -> None:
        times = {path: path.stat().st_mtime_ns for path in data_files(self.old)}
        CHANGES[name](self.old, self.new, rng)
        for path, mtime in times.items():
            if keep_times and path.exists():
                os.utime(path, ns=(mtime, mtime))

    def loader(self, engine: str = "inline", shuffle: Any = False, seed: int = 0) -> rf.Loader:
        source = self.kind.open(self.old)
        return rf.Loader(source, 7, shuffle=shuffle, seed=seed, topology=TOPOLOGY, **ENGINES[engine])


@pytest.fixture
def copies(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Data]:
    """Copies of both data sets of a format, which replace those made before."""
    return lambda name: Data(name, originals, tmp_path / "data")


Copies = Callable[[str], Data]


def read(batches: Iterator[Any], most: int = ROWS) -> Counter[int]:
    return Counter(value for batch in itertools.islice(batches, most) for value in values_of(batch))


def between(data: Data, change: str, rng: random.Random, engine: str = "inline", keep_times: bool = True) -> str:
    """Save, change the data, resume. What came of it."""
    shuffle, seed = rng.choice([False, "global", "window"]), rng.randrange(100)
    first = data.loader(engine, shuffle, seed)
    batches = iter(first)
    delivered = read(batches, rng.randrange(1, 8))
    state = json.loads(json.dumps(first.state_dict()))
    del batches
    data.change(change, rng, keep_times=keep_times)
    try:
        second = data.loader(engine, shuffle, seed)
        second.load_state_dict(state)
        delivered += read(iter(second))
    except StateError:
        return "refused"
    except RankfeedError:
        return "error"
    assert delivered == ORIGINAL, change
    return "original"


def during(data: Data, change: str, rng: random.Random, engine: str = "inline", keep_times: bool = False) -> str:
    """Change the data while they are read. What came of it."""
    loader = data.loader(engine, rng.choice([False, "global", "window"]), rng.randrange(100))
    batches = iter(loader)
    delivered = read(batches, rng.randrange(0, 8))
    data.change(change, rng, keep_times=keep_times)
    try:
        while batch := next(batches, None):
            delivered.update(values_of(batch))
        loader.state_dict()
    except RankfeedError:
        mixed = delivered - ORIGINAL
        assert not mixed or change in IN_PLACE, (change, mixed)
        return "error"
    assert delivered == ORIGINAL, change
    return "original"


@pytest.mark.parametrize("name", KINDS)
def test_resuming_raises_for_changed_data_of_equal_sizes_and_not_for_a_copy(name: str, copies: Copies) -> None:
    rng = random.Random(name)
    # To open a Lance table starts a process.
    for change in ("swap_folders", "rewrite_one", "exchange_names") if name != "lance" else ("rewrite_one",):
        assert between(copies(name), change, rng) in ("refused", "error"), change
    assert between(copies(name), "copy_again", rng, keep_times=False) == "original"


@pytest.mark.parametrize("name", KINDS)
def test_data_changed_during_an_epoch_raise_or_are_read_as_they_were(name: str, copies: Copies) -> None:
    rng = random.Random(name)
    for change in ("replace_files", "exchange_names") if name != "lance" else ():
        during(copies(name), change, rng)
    in_memory = name in ("csv", "jsonl")
    assert during(copies(name), "rewrite_files", rng) == ("original" if in_memory else "error")
    assert during(copies(name), "copy_again", rng) == "original"


@pytest.mark.parametrize("name", ["packed", "tar"])
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_loaders_with_workers_raise_for_changed_data(engine: str, name: str, copies: Copies) -> None:
    rng = random.Random(name)
    assert between(copies(name), "replace_files", rng, engine=engine) == "refused"
    assert during(copies(name), "rewrite_files", rng, engine=engine) == "error"


CAMPAIGN = [(name, change) for change in CHANGES for name in KINDS]


@pytest.mark.soak
@pytest.mark.parametrize("when", ["between save and resume", "while reading"])
def test_a_hundred_random_changes_end_in_an_error_or_the_original_data(when: str, copies: Copies) -> None:
    rng = random.Random(when)
    play = between if when.startswith("between") else during
    outcomes: Counter[tuple[str, str]] = Counter()
    for name, change in rng.sample(CAMPAIGN, 100):
        engine = rng.choice(KINDS[name].engines)
        outcome = play(copies(name), change, rng, engine=engine, keep_times=rng.random() < 0.5)
        if change == "copy_again":
            assert outcome == "original", (name, engine)
        elif play is between:
            assert outcome != "original", (name, change, engine)
        outcomes[change, outcome] += 1
    print(f"\n{when}: {outcomes.total()} rounds, {len(KINDS)} kinds of data")
    for (change, outcome), count in sorted(outcomes.items()):
        print(f"  {change:16} {outcome:10} {count}")


# What decides where a file is not what it was.


@pytest.fixture
def array(tmp_path: Path) -> Path:
    """Rows in a file that three samples do not cover."""
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(100_000))
    return path


def test_state_dict_raises_corrupt_error_after_a_file_was_rewritten_in_place(array: Path) -> None:
    loader = rf.Loader(rf.open(array), 10, topology=TOPOLOGY)
    next(iter(loader))
    loader.state_dict()
    rewrite(array, array.read_bytes()[:128] + np.arange(100_000, 200_000).tobytes())
    message = rf"changed or replaced while it was in use[\s\S]*expected: {array.stat().st_size} bytes, modified 20"
    message += r"[\s\S]*other content[\s\S]*rows\.npy[\s\S]*start the job again"
    with pytest.raises(CorruptError, match=message):
        loader.state_dict()


@pytest.mark.parametrize("name", ["npy", "pyg"])
def test_each_fetch_raises_corrupt_error_after_a_file_was_rewritten_in_place(
    name: str, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankfeed.storage.data_files.CHECK_SECONDS", 0.0)
    data = copies(name)
    source = data.kind.open(data.old)
    source.fetch([5])
    data.change("rewrite_files", random.Random(0))
    for _ in range(2):
        with pytest.raises(CorruptError, match="changed or replaced"):
            source.fetch([5])


def test_a_change_outside_of_the_sampled_bytes_keeps_the_fingerprint(array: Path) -> None:
    source = rf.open(array)
    assert int(source[70_000]["array"]) == 70_000
    values = np.load(array, mmap_mode="r+")
    values[70_000] = -1
    values.flush()
    source.check_unchanged()
    assert rf.open(array).fingerprint == source.fingerprint


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A folder of 100 files."""
    (tmp_path / "many").mkdir()
    for index in range(100):
        np.save(tmp_path / "many" / f"{index:03}.npy", np.full(3, index))
    return tmp_path / "many"


def touch_all(folder: Path) -> None:
    for path in data_files(folder):
        os.utime(path, ns=(1, 1))


def outcomes_of(source: rf.Source, column: str) -> Counter[str]:
    """How many samples are their own index, how many are not, and how many are which error."""
    result: Counter[str] = Counter()
    for index in range(len(source)):
        try:
            result["right" if np.ravel(source[index][column])[0] == index else "wrong"] += 1
        except CorruptError as error:
            result[error.summary] += 1
    return result


def test_of_100_touched_files_64_are_compared_by_content_and_36_raise(many: Path) -> None:
    source = rf.open(many)
    touch_all(many)
    assert outcomes_of(source, "array") == {"right": 64, "a file was changed or replaced while it was in use": 36}


def test_packed_shards_that_are_not_sampled_are_compared_by_checksum(tmp_path: Path) -> None:
    packed = rf.write([{"y": index} for index in range(200)], tmp_path / "p", shard_bytes=8, progress=False)
    shards = sorted((tmp_path / "p").glob("*.arrow"))
    assert len(shards) > 64
    source = rf.open(tmp_path / "p")
    touch_all(tmp_path / "p")
    assert outcomes_of(source, "y") == {"right": 200}
    assert source.fingerprint == packed.fingerprint
    content = shards[-1].read_bytes()
    source = rf.open(tmp_path / "p")
    for shard in shards:
        shard.write_bytes(content)
    outcomes = outcomes_of(source, "y")
    assert not outcomes["wrong"]
    assert outcomes["right"] <= 200 // len(shards) + 1  # those of the shard that is what it was


def test_a_source_pickled_on_another_host_ignores_file_times(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(rf.open(many))
    touch_all(many)
    with pytest.raises(CorruptError, match="changed or replaced"):
        pickle.loads(pickled).fetch(range(100))
    monkeypatch.setattr("rankfeed.storage.data_files.boot_id", lambda: "another host")
    assert outcomes_of(pickle.loads(pickled), "array") == {"right": 100}
    for path in data_files(many):
        rewrite(path, path.read_bytes()[:-1] + b"\1")
    with pytest.raises(CorruptError, match=r"not those that the job opened on another host[\s\S]*many"):
        pickle.loads(pickled).fetch([0])


def test_a_loader_reads_the_old_data_to_their_end_after_prepare_once_replaced_them(tmp_path: Path) -> None:
    def build(base: int) -> Callable[[Path], None]:
        return lambda folder: np.save(folder / "rows.npy", np.arange(base, base + ROWS))

    folder = rf.prepare_once(tmp_path / "prepared", build(OLD), key="old")
    loader = rf.Loader(rf.open(folder / "rows.npy"), 7, shuffle=True, topology=TOPOLOGY)
    batches = iter(loader)
    delivered = read(batches, 3)
    rf.prepare_once(tmp_path / "prepared", build(NEW), key="new")
    assert delivered + read(batches) == ORIGINAL
    state = loader.state_dict()
    with pytest.raises(StateError, match="fingerprint"):
        rf.Loader(rf.open(folder / "rows.npy"), 7, shuffle=True, topology=TOPOLOGY).load_state_dict(state)


def test_threads_that_read_recopied_files_at_once_get_the_original_samples(copies: Copies) -> None:
    data = copies("packed")
    source = data.kind.open(data.old)
    copy_again(data.old, data.new, random.Random(0))
    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(lambda _: [int(sample["y"]) for sample in source], range(4)))
    assert result == [[*range(OLD, OLD + ROWS)]] * 4


TRUNCATES_BETWEEN_CHECK_AND_READ = """
import os, sys
from tests.sources import writers
import rankfeed as rf
from rankfeed.sources.npy import rows
from rankfeed.storage.data_files import DataFiles

folder, left, *names = sys.argv[1:]
get, check = DataFiles.get, rows.check_not_truncated

def get_and_truncate(files, index, parse):
    parsed = get(files, index, parse)
    os.truncate(files.path(index), int(left))
    return parsed

def check_and_truncate(file, where):
    check(file, where)
    os.truncate(where, int(left))

for name in names:
    source = writers.open_as(name, writers.Path(folder, name))
    source.fetch([0])
    DataFiles.get, rows.check_not_truncated = get_and_truncate, check_and_truncate
    delivered, error = [], None
    try:
        delivered.extend(rf.Loader(source, 50, ragged="list", topology=rf.Topology()))
    except rf.errors.CorruptError as raised:
        error = raised
    DataFiles.get, rows.check_not_truncated = get, check
    print(name, len(delivered), "truncated" in str(error) or "was changed" in str(error))
"""


@pytest.mark.skipif(native_library() is None, reason="needs the native library")
@pytest.mark.parametrize("left", [0, slow(600)])
def test_truncating_a_file_between_its_check_and_its_read_raises_corrupt_error(left: int, tmp_path: Path) -> None:
    """Of every format that is read from mapped files: in place, and decoded by numpy, pyarrow and others."""
    names = ["packed", "arrow_file", "arrow_stream", "arrow_file_lz4", "huggingface", "mds", "webdataset"]
    names += ["npy", "npy_fortran"]
    for name in names:
        writers.make(name, tmp_path / name)
    printed = run_python(TRUNCATES_BETWEEN_CHECK_AND_READ, tmp_path, left, *names)
    assert printed.splitlines() == [f"{name} 0 True" for name in names]
