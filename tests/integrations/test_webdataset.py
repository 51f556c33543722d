"""Drop-ins for WebDataset pipelines: what ranks and workers are dealt, on real ranks beside the stock ones."""

import json
import pickle
import re
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from tests.support import jobs
from torch.utils.data import DataLoader

import rankfeed as rf
from rankfeed.errors import ArgumentError, PlanError, TopologyError
from rankfeed.integrations.webdataset import (
    NodeSplitter,
    ShardedSamples,
    WorkerSplitter,
    nodesplitter,
    workersplitter,
)
from rankfeed.integrations.webdataset.splitters import split_shards

SCRIPT = Path(__file__).parent / "jobs" / "pipelines.py"
SHARD = 10
STARTS = ("fork", "spawn", "forkserver")
#: (shards, ranks, workers): where dividing whole shards gives a worker fewer shards, or none.
LAYOUTS = ((5, 2, 0), (5, 2, 2), (3, 2, 2), (4, 3, 2))

Cell = dict[str, Any]


def write(folder: Path, shards: int) -> list[str]:
    """Tar shards as WebDataset writes them, of SHARD samples each."""
    folder.mkdir()
    urls = [str(folder / f"{number:03d}.tar") for number in range(shards)]
    for number, url in enumerate(urls):
        with wds.TarWriter(url) as out:
            for each in range(number * SHARD, (number + 1) * SHARD):
                out.write({"__key__": f"k{each:04d}", "cls": each, "txt": f"text {each}", "json": {"n": each}})
    return urls


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shards in (3, 4, 5):
        write(folder / str(shards), shards)
    return folder


def shards_of(data: Path, count: int) -> list[str]:
    return sorted(map(str, (data / str(count)).glob("*.tar")))


# --- splitters ------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 20), st.sampled_from(["even", "drop", "repeat", "uneven", "idle"]))
def test_shards_are_dealt_as_the_strategy_says_or_not_at_all(shards: int, parts: int, strategy: Any) -> None:
    possible = {"even": shards % parts == 0, "drop": shards >= parts, "uneven": shards >= parts}
    if not possible.get(strategy, True):
        for part in range(parts):  # on every rank, so that none continues alone
            with pytest.raises(PlanError, match="cannot be divided"):
                split_shards(range(shards), parts, part, strategy)
        return
    dealt = [split_shards(range(shards), parts, part, strategy) for part in range(parts)]
    read = Counter(each for part in dealt for each in part)
    if strategy in ("even", "uneven", "idle"):
        assert read == Counter(range(shards))
    elif strategy == "drop":
        assert read == Counter(range(shards - shards % parts))
    else:
        assert read.keys() == set(range(shards))
        assert read.total() == -(-shards // parts) * parts
    sizes = [len(part) for part in dealt]
    assert max(sizes) - min(sizes) <= (strategy in ("uneven", "idle"))
    assert min(sizes) > 0 or strategy == "idle"


@pytest.mark.parametrize(
    ("shards", "parts", "what", "said"),
    [
        (
            5,
            2,
            "rank",
            ["5 shards cannot be divided evenly among 2 ranks", "rank 1 of 2", '"drop") leaves 1', '"uneven"'],
        ),
        (5, 2, "rank", ["ShardedSamples divides samples", '"repeat") reads 1 of them twice']),
        (2, 3, "rank", ["2 shards cannot be divided among 3 ranks: 1 would be empty", "fewer ranks", '"repeat")']),
        (
            1,
            2,
            "worker",
            ["1 shard cannot be divided among 2 workers", "num_workers=1", '"idle") with empty_check=False'],
        ),
        (5, 2, "worker", ["a num_workers that divides", 'WorkerSplitter("uneven")']),
        (0, 2, "rank", ["there are no shards", "pattern"]),
    ],
)
def test_shards_that_cannot_be_dealt_are_an_error_that_says_what_to_do(
    shards: int, parts: int, what: str, said: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        split_shards(range(shards), parts, 1, "even", what)
    assert [text for text in said if text not in str(caught.value)] == []


def test_a_splitter_stands_where_those_of_webdataset_stand(data: Path) -> None:
    urls = shards_of(data, 4)
    read: list[str] = []
    for rank in range(2):
        splitter = NodeSplitter("even", topology=rf.Topology(rank=rank, world_size=2))
        dataset = wds.WebDataset(urls, shardshuffle=False, nodesplitter=splitter, workersplitter=workersplitter)
        mine = [sample["__key__"] for sample in dataset]
        assert len(mine) == 2 * SHARD
        read += mine
    assert Counter(read) == Counter(f"k{each:04d}" for each in range(4 * SHARD))


@pytest.mark.parametrize("splitter", [nodesplitter, NodeSplitter("drop")])
def test_the_rank_is_found_in_the_parent_and_travels_by_pickle(
    splitter: NodeSplitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    sent = pickle.dumps(splitter)
    for name in place:
        monkeypatch.delenv(name)
    assert list(pickle.loads(sent)(list("abcd"))) == ["b", "d"]
    assert list(splitter(list("abcd"))) == ["a", "b", "c", "d"]  # here there is one rank


def test_several_processes_of_whom_nobody_knows_the_rank_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(TopologyError):
        list(nodesplitter(list("abcd")))


def test_a_list_of_shards_that_does_not_end_is_refused() -> None:
    with pytest.raises(ArgumentError, match="is endless") as caught:
        list(nodesplitter(count()))
    assert "Resampled" in str(caught.value)


@pytest.mark.parametrize("kind", [NodeSplitter, WorkerSplitter])
def test_an_unknown_strategy_is_refused_when_the_splitter_is_made(kind: Any) -> None:
    with pytest.raises(ArgumentError, match="invalid strategy"):
        kind("evn")


def test_an_idle_worker_is_had_only_where_asked_for(data: Path) -> None:
    urls = shards_of(data, 3)

    def read(strategy: Any) -> list[str]:
        splitters: dict[str, Any] = {"nodesplitter": nodesplitter, "workersplitter": WorkerSplitter(strategy)}
        dataset = wds.WebDataset(urls, shardshuffle=False, empty_check=False, **splitters)
        loader = DataLoader(dataset.to_tuple("__key__"), batch_size=None, num_workers=4)
        return [key for (key,) in loader]

    assert Counter(read("idle")) == Counter(f"k{each:04d}" for each in range(3 * SHARD))
    with pytest.raises(PlanError, match="3 shards cannot be divided among 4 workers"):
        read("uneven")


# --- stages over tar shards -----------------------------------------------------------------------------------


def test_samples_are_those_of_webdatasets_own_reader_to_the_byte(data: Path) -> None:
    urls = shards_of(data, 5)
    theirs = list(wds.WebDataset(urls, shardshuffle=False))
    ours = list(ShardedSamples(urls, topology=rf.Topology()))
    assert ours == theirs
    assert list(ShardedSamples(str(data / "5" / "{000..004}.tar"), topology=rf.Topology())) == theirs


def test_samples_that_lack_members_or_share_a_key_come_as_webdatasets_own_reader_gives_them(
    tmp_path: Path,
) -> None:
    url = str(tmp_path / "odd.tar")
    with wds.TarWriter(url) as out:
        out.write({"__key__": "folder/a", "jpg": b"1", "txt": b"one", "cls": b"1"})
        out.write({"__key__": "folder/b", "jpg": b"2"})
        out.write({"__key__": "c", "txt": b"", "seg.png": b"3"})
        out.write({"__key__": "folder/a", "jpg": b"4"})
    theirs = list(wds.WebDataset(url, shardshuffle=False))
    assert list(ShardedSamples(url, topology=rf.Topology())) == theirs
    some = ["txt", "seg.png"]
    chosen = [
        {name: each[name] for name in ("__key__", "__url__", "__local_path__", *some) if name in each}
        for each in theirs
    ]
    assert list(ShardedSamples(url, columns=some, topology=rf.Topology())) == chosen


def test_all_that_comes_behind_in_a_pipeline_works_as_behind_webdatasets_own_reader(data: Path) -> None:
    urls = shards_of(data, 5)

    def behind(pipeline: Any) -> list[Any]:
        return list(pipeline.decode().rename(text="txt").to_tuple("__key__", "json", "text", "cls").batched(7))

    ours = behind(wds.FluidWrapper(ShardedSamples(urls, 7, topology=rf.Topology())))
    assert repr(ours) == repr(behind(wds.WebDataset(urls, shardshuffle=False)))


# --- real ranks -----------------------------------------------------------------------------------------------


def cell(kind: str, shards: int, workers: int, start: str = "fork", **more: Any) -> Cell:
    return {"kind": kind, "shards": shards, "workers": workers, "start": start, **more}


def splitting(strategy: str, shards: int, workers: int, start: str = "fork", by_worker: str = "uneven") -> Cell:
    return cell("splitter", shards, workers, start, strategy=strategy, by_worker=by_worker)


def stages(shards: int, workers: int, start: str) -> list[Cell]:
    """Our stages: these are held to what they promise."""
    epochs = {"epochs": 2, "persistent": workers > 0 and start != "fork"}  # these take long to start
    return [
        cell("sharded", shards, workers, start, **epochs),
        cell("resampled", shards, workers, start, draws=23, replacement=True, **epochs),
        cell("resampled", shards, workers, start, draws=23, replacement=False, **epochs),
    ]


def run(ranks: int, cells: list[Cell], data: Path, out: Path, timeout: float) -> list[list[dict[str, Any]]]:
    """What each rank wrote down of each cell: [cell][rank]."""
    jobs.run(jobs.torchrun(ranks, SCRIPT, data, out, json.dumps(cells)), out / "log", timeout)
    of_ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return [list(of_cell) for of_cell in zip(*of_ranks, strict=True)]


def read_by(results: list[dict[str, Any]], epoch: int = 0) -> Counter[str]:
    epochs = [result["epochs"][epoch] for result in results]
    return Counter(key for batches in epochs for batch in batches for key in batch)


def check(each: Cell, results: list[dict[str, Any]]) -> None:
    """What our stages and splitters promise."""
    ranks, total = len(results), each["shards"] * SHARD
    whole = Counter(f"k{number:04d}" for number in range(total))
    if each["kind"] == "splitter":
        check_splitter(each, results, whole)
        return
    assert [result["error"] for result in results] == [""] * ranks, each
    for epoch in range(each["epochs"]):
        steps = {len(result["epochs"][epoch]) for result in results}
        assert len(steps) == 1, each
        read = read_by(results, epoch)
        if each["kind"] == "sharded":
            assert read == whole, each
        elif each["replacement"]:
            assert read.total() == each["draws"], each
        else:
            assert read.total() == each["draws"], each
            assert max(read.values()) == 1, each
    assert results[0]["epochs"][0] != results[0]["epochs"][1], each


def check_splitter(each: Cell, results: list[dict[str, Any]], whole: Counter[str]) -> None:
    ranks, shards, strategy = len(results), each["shards"], each["strategy"]
    least = -(-shards // ranks) if strategy == "repeat" else shards // ranks
    of_rank = [max(least, len(range(rank, shards, ranks)) if strategy != "drop" else 0) for rank in range(ranks)]
    if strategy == "even" and shards % ranks:
        for result in results:
            assert f"{shards} shards cannot be divided evenly among {ranks} ranks" in result["error"], each
        return
    if min(of_rank) < each["workers"] and each["by_worker"] != "idle":
        for result, mine in zip(results, of_rank, strict=True):
            said = "cannot be divided among 2 workers" if mine < each["workers"] else ""
            assert said in result["error"], each
        return
    assert [result["error"] for result in results] == [""] * ranks, each
    read = read_by(results)
    if strategy == "uneven":
        assert read == whole, each
    elif strategy == "drop":
        assert read == Counter(f"k{number:04d}" for number in range((shards - shards % ranks) * SHARD)), each
    else:
        assert read.keys() == whole.keys(), each
        assert read.total() == -(-shards // ranks) * ranks * SHARD, each
    if strategy != "uneven":
        assert len({len(result["epochs"][0]) for result in results}) == 1, each


def figures(each: Cell, results: list[dict[str, Any]]) -> str:
    """A row of the table: what was read of how much, and in how many steps by each rank."""
    what = each["kind"] + (f" {each['strategy']}" if "strategy" in each else "")
    what += f" ({'with' if each['replacement'] else 'no'} replacement)" if "replacement" in each else ""
    layout = f"{each['shards']} on {len(results)} x {each['workers']}"
    raised = re.compile(r"^[\w.]*Error: (?!Caught)(.*)$", re.MULTILINE)
    errors = [raised.findall(result["error"])[-1] for result in results if result["error"]]
    whole = [result["epochs"] and result["epochs"][0] for result in results]
    read = Counter(key for batches in whole for batch in batches or [] for key in batch)
    steps = " / ".join(str(len(batches or [])) for batches in whole)
    missing = each["shards"] * SHARD - len(read)
    repeated = read.total() - len(read)
    told = f"steps {steps}; {missing} never read, {repeated} too often" if not errors else f"error: {errors[0]}"
    return f"{what:34} {layout:10} {each['start']:10} {told}"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_sample_once_in_equal_steps_where_shards_cannot_be_dealt_to_two_ranks(
    data: Path, tmp_path: Path
) -> None:
    ours = [
        *stages(5, 0, "fork"),
        cell("sharded", 5, 2, "spawn", epochs=2, persistent=True),
        cell("sharded", 3, 2, "fork", epochs=2),
        *(splitting(strategy, 5, 0) for strategy in ("even", "drop", "uneven")),
        splitting("repeat", 5, 2),
        splitting("uneven", 3, 2),
        splitting("uneven", 3, 2, by_worker="idle"),
    ]
    for each, results in zip(ours, run(2, ours, data, tmp_path, 200), strict=True):
        check(each, results)


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_every_sample_once_in_equal_steps_where_shards_cannot_be_dealt_to_three_ranks(
    data: Path, tmp_path: Path
) -> None:
    ours = [
        cell("sharded", 4, 2, "fork", epochs=2),
        cell("resampled", 4, 2, "fork", draws=23, epochs=2, replacement=False),
        splitting("even", 4, 0),
        splitting("repeat", 4, 2),
    ]
    for each, results in zip(ours, run(3, ours, data, tmp_path, 200), strict=True):
        check(each, results)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_cell_of_layouts_stages_and_start_methods_beside_the_stock_ones(
    ranks: int, data: Path, tmp_path: Path
) -> None:
    ours: list[Cell] = []
    theirs: list[Cell] = []
    for shards, _, workers in (layout for layout in LAYOUTS if layout[1] == ranks):
        for start in STARTS if workers else ("fork",):
            ours += stages(shards, workers, start)
            ours += [
                splitting(strategy, shards, workers, start) for strategy in ("even", "drop", "repeat", "uneven")
            ]
            theirs += [cell(kind, shards, workers, start) for kind in ("stock", "huggingface")]
    cells = [*ours, *theirs]
    found = run(ranks, cells, data, tmp_path, 1700)
    print(f"\n{len(ours)} cells of rankfeed's drop-ins, held to what they promise; then the stock ones")
    for each, results in zip(cells, found, strict=True):
        print(figures(each, results))
        if each in ours:
            check(each, results)
