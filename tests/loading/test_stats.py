"""`Loader.stats` is correct for every engine and at any time."""

import mmap
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankfeed as rf
from rankfeed._util.process_info import private_bytes
from rankfeed.columns.columns import ColumnBuffer
from rankfeed.columns.field import Field
from rankfeed.sources.chunked import ChunkedSource

ENGINES = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "worker_kind": "process"}]
LIMIT = 30


class Chunks(ChunkedSource):
    """Ten chunks of four rows, decoded when they are asked for and not before."""

    def __init__(self) -> None:
        self._init_chunks([4] * 10)
        self.prefetch_distance = 0

    @property
    def blocks(self) -> Any:
        return np.full(10, 4)

    @property
    def fields(self) -> Mapping[str, Field]:
        return {"x": Field("dense", "int64", ())}

    @property
    def fingerprint(self) -> str:
        return "00"

    def _load_chunk(self, number: int, names: Sequence[str]) -> dict[str, ColumnBuffer]:
        return {"x": ColumnBuffer(np.arange(4 * number, 4 * number + 4))}


@pytest.mark.parametrize("engine", ENGINES, ids=["inline", "threads", "processes"])
def test_stats_count_steps_samples_and_cache_hits_of_all_workers(engine: Any) -> None:
    loader = rf.Loader(Chunks(), batch_size=4, topology=rf.Topology(), **engine)
    for _ in range(2):
        assert sum(len(batch["x"]) for batch in loader) == 40
    stats = loader.stats()
    assert (stats["steps"], stats["samples"], stats["padding_share"]) == (20, 80, 0.0)
    assert stats["samples_per_second"] > 0
    assert stats["cache_lookups"] == 80
    # A process has its own cache, and makes every other batch: it comes to the same chunks again.
    assert stats["cache_hits"] == 40
    assert stats["cache_hit_share"] == 0.5


class Slow(torch.utils.data.Dataset[Any]):
    """Numbers that take as long to read as the test says."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, int]:
        time.sleep(self.seconds)
        return {"x": index}


@pytest.mark.parametrize("engine", ENGINES, ids=["inline", "threads", "processes"])
@pytest.mark.parametrize("slow", ["source", "transform", "collate"])
def test_stats_show_the_slowest_of_source_transform_and_collate(engine: Any, slow: str) -> None:
    def longest(seconds: float) -> str:
        def pause(value: Any) -> Any:
            time.sleep(seconds)
            return value

        functions = {"transform": {"transform": pause}, "collate": {"collate_fn": pause}}.get(slow, {})
        loader = rf.Loader(Slow(seconds * (slow == "source")), 2, topology=rf.Topology(), **engine, **functions)
        assert sum(1 for _ in loader) == 30
        stats = loader.stats()
        stages = {name: stats[f"{name}_seconds"] for name in ("source", "transform", "collate", "transfer")}
        assert stages[slow] >= 30 * seconds / max(1, loader.num_workers)
        return max(stages, key=lambda name: stages[name])

    # On a busy machine any stage may wait for a CPU.
    assert any(longest(seconds) == slow for seconds in (0.01, 0.1, 1.0))


@pytest.mark.parametrize("engine", ENGINES, ids=["inline", "threads", "processes"])
def test_stats_count_the_time_of_a_slow_stream_as_source_seconds(engine: Any) -> None:
    def is_longest(seconds: float) -> bool:
        def numbers() -> Iterator[dict[str, int]]:
            for number in range(40):
                time.sleep(seconds)
                yield {"x": number}

        loader = rf.Loader(rf.from_iterable(numbers), 2, topology=rf.Topology(), **engine)
        assert sum(1 for _ in loader) == 20
        stats = loader.stats()
        assert stats["source_seconds"] >= 40 * seconds
        return bool(stats["source_seconds"] > stats["transform_seconds"] + stats["collate_seconds"])

    assert any(map(is_longest, (0.005, 0.05, 0.5)))  # as above


def test_two_loaders_of_one_source_have_separate_cache_hit_counts() -> None:
    source = Chunks()
    first = rf.Loader(source, batch_size=2, topology=rf.Topology())
    list(first)
    assert first.stats()["cache_hits"] == 20  # the second half of each chunk
    second = rf.Loader(source, batch_size=2, topology=rf.Topology())
    list(second)
    assert (first.stats()["cache_hits"], second.stats()["cache_hits"]) == (20, 40)


def test_stats_epoch_step_includes_steps_done_before_a_resume() -> None:
    loader = rf.Loader(Chunks(), batch_size=4, topology=rf.Topology())
    assert loader.stats()["epoch_steps"] == 0
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert [loader.stats()[name] for name in ("epoch", "epoch_step", "epoch_steps", "steps")] == [0, 3, 10, 3]
    again = rf.Loader(Chunks(), batch_size=4, topology=rf.Topology())
    again.load_state_dict(loader.state_dict())
    next(iter(again))
    assert [again.stats()[name] for name in ("epoch", "epoch_step", "epoch_steps", "steps")] == [0, 4, 10, 1]
    list(again)
    list(again)
    assert [again.stats()[name] for name in ("epoch", "epoch_step", "epoch_steps")] == [1, 10, 10]


@pytest.mark.parametrize("workers", [0, 1])
def test_stats_read_from_another_thread_include_a_wait_in_progress(workers: int) -> None:
    held, reading = threading.Event(), threading.Event()

    def slow(sample: Any) -> Any:
        reading.set()
        assert held.wait(LIMIT)
        return sample

    loader = rf.Loader(Chunks(), batch_size=4, transform=slow, num_workers=workers, topology=rf.Topology())
    consumer = threading.Thread(target=lambda: list(loader))
    consumer.start()
    assert reading.wait(LIMIT)
    seen = [loader.stats() for _ in range(50)]
    while not seen[-1]["waiting_seconds"]:
        seen.append(loader.stats())
    held.set()
    while consumer.is_alive():
        seen.append(loader.stats())
    consumer.join(LIMIT)
    seen.append(loader.stats())
    assert all(snapshot["waited_seconds"] <= snapshot["seconds"] for snapshot in seen)
    assert all(0 <= snapshot["waited_share"] <= 1 for snapshot in seen)
    assert seen[-1]["waiting_seconds"] == 0
    assert seen[-1]["steps"] == 10
    assert max(snapshot["waiting_seconds"] for snapshot in seen) <= seen[-1]["waited_seconds"] + 1e-3


def test_stats_show_no_wait_in_progress_after_a_transform_error() -> None:
    def fails(sample: Any) -> Any:
        if sample["x"] == 9:
            raise ValueError("no")
        return sample

    loader = rf.Loader(Chunks(), batch_size=4, transform=fails, topology=rf.Topology())
    with pytest.raises(rf.errors.TransformError):
        list(loader)
    assert loader.stats()["waiting_seconds"] == 0
    assert loader.stats()["epoch_step"] == loader.stats()["steps"] == 2


def test_stats_of_a_pickled_loader_start_at_zero() -> None:
    loader = rf.Loader(Chunks(), batch_size=4, topology=rf.Topology())
    list(loader)
    assert pickle.loads(pickle.dumps(loader)).stats()["steps"] == 0
    assert loader.stats()["steps"] == 10


def test_all_stats_are_numbers_with_the_same_keys_before_and_after_an_epoch() -> None:
    loader = rf.Loader(rf.from_dataset([{"x": 1}] * 4), batch_size=2, topology=rf.Topology())
    before = loader.stats()
    list(loader)
    for stats in (before, loader.stats()):
        assert {type(value) for value in stats.values()} <= {int, float}
    assert before.keys() == loader.stats().keys()


def test_stats_count_padding_bytes_of_empty_rows(tmp_path: Path) -> None:
    rows = [{"tokens": np.arange(length)} for length in (0, 0, 3, 1)]
    halves = rows[:2], rows[2:]
    files = [rf.write(half, tmp_path / str(number), progress=False) for number, half in enumerate(halves)]
    for source in (rf.from_dataset(rows), rf.concat(list(map(rf.from_dataset, halves))), rf.concat(files)):
        loader = rf.Loader(source, batch_size=4, topology=rf.Topology())
        (batch,) = loader
        assert batch["tokens_lengths"].tolist() == [0, 0, 3, 1]
        stats = loader.stats()
        assert (stats["padding_bytes"], stats["padded_bytes"], stats["padding_share"]) == (8 * 8, 12 * 8, 8 / 12)


def test_private_bytes_does_not_count_memory_mapped_files(tmp_path: Path) -> None:
    size = 256 << 20
    with (tmp_path / "data").open("wb") as file:
        file.truncate(size)
    before = private_bytes()
    assert before > 1 << 20
    with (tmp_path / "data").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[place] for place in range(0, size, mmap.PAGESIZE)) == 0
        assert private_bytes() - before < size // 2
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE) as held:  # the heap may have as much that is free
        held.write(b"x" * size)
        assert private_bytes() - before > size // 2
