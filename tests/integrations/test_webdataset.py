"""Splitters and stages for WebDataset pipelines: what each rank and worker reads of tar shards."""

import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from tests.loading.feeds import ranks
from tests.support.marks import slow
from torch.utils.data import DataLoader

import rankfeed as rf
from rankfeed.errors import ArgumentError, PlanError, TopologyError
from rankfeed.integrations.webdataset import NodeSplitter, Resampled, ShardedSamples, WorkerSplitter, nodesplitter
from rankfeed.integrations.webdataset.splitters import split_shards

SHARD = 10


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
def test_split_shards_follows_its_strategy_or_raises_plan_error(shards: int, parts: int, strategy: Any) -> None:
    possible = {"even": shards % parts == 0, "drop": shards >= parts, "uneven": shards >= parts}
    if not possible.get(strategy, True):
        for part in range(parts):  # on every rank, so that none continues alone
            with pytest.raises(PlanError, match="cannot be divided"):
                split_shards(range(shards), parts, part, strategy)
        return
    dealt = [split_shards(range(shards), parts, part, strategy) for part in range(parts)]
    read = Counter(sample_id for part in dealt for sample_id in part)
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
        (5, 2, "rank", ["5 shards cannot be divided evenly among 2 ranks", "rank 1 of 2", '"drop") leaves 1']),
        (5, 2, "rank", ['"uneven"', "ShardedSamples divides samples", '"repeat") reads 1 of them twice']),
        (2, 3, "rank", ["2 shards cannot be divided among 3 ranks: 1 would be empty", "fewer ranks", '"repeat")']),
        (1, 2, "worker", ["1 shard cannot be divided among 2 workers", "num_workers=1"]),
        (1, 2, "worker", ['"idle") with empty_check=False']),
        (5, 2, "worker", ["a num_workers that divides", 'WorkerSplitter("uneven")']),
        (0, 2, "rank", ["there are no shards", "pattern"]),
    ],
)
def test_split_shards_of_an_indivisible_number_of_shards_raises_plan_error(
    shards: int, parts: int, what: str, said: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        split_shards(range(shards), parts, 1, "even", what)
    assert [text for text in said if text not in str(caught.value)] == []


@pytest.mark.parametrize("splitter", [nodesplitter, NodeSplitter("drop")])
def test_a_pickled_splitter_keeps_the_rank_of_the_parent_process(
    splitter: NodeSplitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as parent:
        parent.setenv("RANK", "1")
        parent.setenv("WORLD_SIZE", "2")
        sent = pickle.dumps(splitter)
    assert list(pickle.loads(sent)(list("abcd"))) == ["b", "d"]
    assert list(splitter(list("abcd"))) == ["a", "b", "c", "d"]  # here there is one rank


def test_nodesplitter_with_world_size_but_no_rank_raises_topology_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(TopologyError):
        list(nodesplitter(list("abcd")))


def test_an_endless_list_of_shards_raises_argument_error() -> None:
    with pytest.raises(ArgumentError, match="is endless") as caught:
        list(nodesplitter(count()))
    assert "Resampled" in str(caught.value)


@pytest.mark.parametrize("kind", [NodeSplitter, WorkerSplitter])
def test_an_unknown_splitter_strategy_raises_argument_error_at_construction(kind: Any) -> None:
    with pytest.raises(ArgumentError, match="invalid strategy"):
        kind("evn")


# --- stages over tar shards -----------------------------------------------------------------------------------


def test_sharded_samples_equal_those_of_webdataset_byte_for_byte(data: Path) -> None:
    urls = shards_of(data, 5)
    theirs = list(wds.WebDataset(urls, shardshuffle=False))
    ours = list(ShardedSamples(urls, topology=rf.Topology()))
    assert ours == theirs
    assert list(ShardedSamples(str(data / "5" / "{000..004}.tar"), topology=rf.Topology())) == theirs


def test_samples_with_missing_members_or_duplicate_keys_equal_those_of_webdataset(tmp_path: Path) -> None:
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
        {name: sample[name] for name in ("__key__", "__url__", "__local_path__", *some) if name in sample}
        for sample in theirs
    ]
    assert list(ShardedSamples(url, columns=some, topology=rf.Topology())) == chosen


def test_webdataset_pipeline_stages_after_sharded_samples_give_the_same_as_after_webdataset(data: Path) -> None:
    urls = shards_of(data, 5)

    def behind(pipeline: Any) -> list[Any]:
        return list(pipeline.decode().rename(text="txt").to_tuple("__key__", "json", "text", "cls").batched(7))

    ours = behind(wds.FluidWrapper(ShardedSamples(urls, 7, topology=rf.Topology())))
    assert repr(ours) == repr(behind(wds.WebDataset(urls, shardshuffle=False)))


# --- pipelines of all ranks of a job --------------------------------------------------------------------------


def keys_of(stages: Any, workers: int) -> list[list[str]]:
    """The keys of each batch that a DataLoader over the pipeline delivers."""
    return [keys for (keys,) in DataLoader(stages, batch_size=None, num_workers=workers)]


def whole(shards: int) -> Counter[str]:
    return Counter(f"k{number:04d}" for number in range(shards * SHARD))


# strategy, shards, ranks, workers, strategy of the workers: distinct shards and shards that are read, or the error
SPLIT: list[tuple[Any, int, int, int, Any, tuple[int, int] | str]] = [
    ("even", 4, 2, 0, "uneven", (4, 4)),
    ("even", 5, 2, 0, "uneven", "5 shards cannot be divided evenly among 2 ranks"),
    ("drop", 5, 2, 0, "uneven", (4, 4)),
    ("repeat", 5, 2, 2, "uneven", (5, 6)),
    ("uneven", 5, 2, 0, "uneven", (5, 5)),
    ("uneven", 3, 2, 2, "uneven", "1 shard cannot be divided among 2 workers"),
    ("uneven", 3, 2, 2, "idle", (3, 3)),
    ("even", 3, 1, 4, "uneven", "3 shards cannot be divided among 4 workers"),
]


@pytest.mark.parametrize(("strategy", "shards", "world_size", "workers", "by_worker", "expected"), SPLIT)
def test_splitters_in_a_webdataset_pipeline_read_the_shards_of_their_strategy(
    strategy: Any, shards: int, world_size: int, workers: int, by_worker: Any, expected: Any, data: Path
) -> None:
    read: Counter[str] = Counter()
    steps, said = [], ""
    for topology in ranks(world_size):
        dataset = wds.WebDataset(
            shards_of(data, shards),
            shardshuffle=False,
            empty_check=by_worker != "idle",
            nodesplitter=NodeSplitter(strategy, topology=topology),
            workersplitter=WorkerSplitter(by_worker),
        )
        try:
            batches = keys_of(dataset.to_tuple("__key__").batched(4), workers)
        except PlanError as error:
            said += str(error)
            continue
        steps.append(len(batches))
        read.update(key for keys in batches for key in keys)
    if isinstance(expected, str):
        assert expected in said
        return
    assert said == ""
    assert read.keys() == whole(expected[0]).keys()
    assert read.total() == expected[1] * SHARD
    assert strategy == "uneven" or len({*steps}) == 1


DRAWS = 23
STAGES: dict[str, Callable[..., ShardedSamples]] = {
    "sharded": partial(ShardedSamples, shuffle=True),
    "resampled": partial(Resampled, epoch_size=DRAWS),
    "resampled without replacement": partial(Resampled, epoch_size=DRAWS, replacement=False),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("shards", "world_size", "workers"), [(5, 2, 2), *(slow(*case) for case in ((5, 2, 0), (3, 2, 2), (4, 3, 2)))]
)
def test_sharded_and_resampled_stages_give_equal_steps_and_a_new_order_each_epoch(
    stage: str, shards: int, world_size: int, workers: int, data: Path
) -> None:
    epochs = []
    for epoch in range(2):
        job = []
        for topology in ranks(world_size):
            samples = STAGES[stage](shards_of(data, shards), 4, seed=3, topology=topology)
            samples.set_epoch(epoch)
            pipeline = wds.DataPipeline(samples, wds.decode(), wds.to_tuple("__key__"), wds.batched(4))
            job.append(keys_of(pipeline, workers))
        assert len({len(batches) for batches in job}) == 1
        read = Counter(key for batches in job for keys in batches for key in keys)
        if stage == "sharded":
            assert read == whole(shards)
        else:
            assert read.total() == DRAWS
            assert "without" not in stage or max(read.values()) == 1
        epochs.append(job)
    assert epochs[0] != epochs[1]
