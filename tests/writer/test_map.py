"""A map function: its samples are written the same by every runner, and its errors are named."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.values import column_of, contents

import rankfeed as rf
from rankfeed.errors import ArgumentError, WriteError
from rankfeed.writer import tasks as tasks_module
from rankfeed.writer.sample_map import SampleMap
from rankfeed.writer.tasks import WriteJob, align_to_blocks, partition

ROWS = [{"id": i, "x": np.arange(i % 5, dtype=np.int32)} for i in range(400)]


# Of a module, so that worker processes find them.
def none_one_or_two(sample: dict[str, Any]) -> Any:
    made = {"id": sample["id"], "length": len(sample["x"])}
    return (None, made, [made, made])[int(sample["id"]) % 3]


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    for _ in range(int(rng.integers(3))):
        yield {"id": sample["id"], "noise": rng.normal(size=3)}


@pytest.fixture
def source(tmp_path: Path) -> rf.Source:
    return rf.write(ROWS, tmp_path / "source", shard_bytes=900, progress=False)


def test_a_map_returns_none_one_or_several_rows_of_a_sample(source: rf.Source, tmp_path: Path) -> None:
    expected = [i for i in range(400) for _ in range(i % 3)]
    packed = rf.write(source, tmp_path / "p", shard_bytes=500, map=none_one_or_two, workers=0, progress=False)
    assert column_of(packed, "id") == expected
    assert len(packed.manifest.shards) > 3
    by_iterable = rf.write(iter(ROWS), tmp_path / "q", map=none_one_or_two, progress=False)
    assert column_of(by_iterable, "id") == expected


def test_the_bytes_of_a_mapped_write_depend_on_the_seed_not_on_workers(source: rf.Source, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"shard_bytes": 700, "map": noisy, "seed": 5, "progress": False}
    rf.write(source, tmp_path / "alone", workers=0, **arguments)
    rf.write(source, tmp_path / "three", workers=3, **arguments)
    assert contents(tmp_path / "alone") == contents(tmp_path / "three")
    other = rf.write(source, tmp_path / "seed", workers=0, **{**arguments, "seed": 6})
    assert other.fingerprint != rf.open(tmp_path / "alone").fingerprint


def test_a_map_draws_the_same_random_numbers_for_a_sample_in_any_order(source: rf.Source, tmp_path: Path) -> None:
    def drawn(order: Any) -> Counter[tuple[int, bytes]]:
        packed = rf.write(source, tmp_path / order, map=noisy, seed=5, order=order, progress=False)
        return Counter((int(sample["id"]), sample["noise"].tobytes()) for sample in packed)

    assert drawn("stored") == drawn("shuffled")
    assert [key for key, count in drawn("stored").items() if count > 1] == []


def test_the_bytes_of_a_batched_map_do_not_depend_on_workers(source: rf.Source, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"map": paired, "map_batch": 6, "shard_bytes": 500, "progress": False}
    packed = rf.write(source, tmp_path / "alone", workers=0, **arguments)
    rf.write(source, tmp_path / "two", workers=2, **arguments)
    assert contents(tmp_path / "alone") == contents(tmp_path / "two")
    assert Counter(int(sample["size"]) for sample in packed) == {6: 66, 4: 1}
    assert [int(sample["first"]) for sample in packed] == list(range(0, 400, 6))


def paired(samples: list[dict[str, Any]], rng: np.random.Generator) -> dict[str, Any]:
    return {"first": samples[0]["id"], "size": len(samples), "noise": rng.random()}


def test_a_shuffled_write_has_the_order_of_a_plan_with_the_same_seed(source: rf.Source, tmp_path: Path) -> None:
    packed = rf.write(source, tmp_path / "p", order="shuffled", seed=3, shard_bytes=900, workers=0, progress=False)
    expected = rf.Plan(400, shuffle="global", seed=3).sample_ids(0, np.arange(400))
    assert column_of(packed, "id") == expected.tolist()
    assert Counter(column_of(packed, "id")) == Counter(range(400))
    rf.write(source, tmp_path / "q", order="shuffled", seed=3, shard_bytes=900, workers=2, progress=False)
    assert contents(tmp_path / "p") == contents(tmp_path / "q")


def test_a_map_with_a_key_is_not_called_again_but_one_without_is(source: rf.Source, tmp_path: Path) -> None:
    calls: Counter[int] = Counter()

    def counted(sample: dict[str, Any]) -> dict[str, Any]:
        calls[int(sample["id"])] += 1
        return {"id": sample["id"]}

    rf.write(source, tmp_path / "named", map=counted, key="v1", progress=False)
    before = calls.copy()
    rf.write(source, tmp_path / "named", map=counted, key="v1", progress=False)
    assert calls == before
    with pytest.raises(WriteError, match="another input"):
        rf.write(source, tmp_path / "named", map=counted, key="v2", progress=False)
    rf.write(source, tmp_path / "nameless", map=counted, progress=False)
    with pytest.raises(WriteError, match="other rows"):
        rf.write(source, tmp_path / "nameless", map=none_one_or_two, progress=False)
    rf.write(source, tmp_path / "nameless", map=counted, progress=False)
    assert all(count >= 3 for count in calls.values())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda sample: 3, "int"),
        (lambda sample: "text", "str"),
        (lambda sample: [sample, 3], "list that contains a int"),
        (lambda sample: [sample][int(sample["id"] == 7)], "IndexError"),
        (lambda sample: {"x": object()}, "object"),
        (lambda sample: {"id": 1} if sample["id"] < 7 else {"id": "one"}, "str"),
    ],
)
def test_errors_of_a_map_name_the_sample(function: Any, said: str, source: rf.Source, tmp_path: Path) -> None:
    for given in (source, ROWS):
        with pytest.raises(WriteError, match=rf"(?s){said}.*sample") as caught:
            rf.write(given, tmp_path / "p", map=function, progress=False)
        assert caught.value.where is not None
    assert not (tmp_path / "p").exists()


def test_a_map_that_returns_no_samples_at_all_raises(source: rf.Source, tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="map returned no samples"):
        rf.write(source, tmp_path / "p", map=lambda sample: None, progress=False)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *({"map": 3}, {"map": none_one_or_two, "map_batch": -1}, {"map": none_one_or_two, "map_batch": 2.0}),
        *({"map_batch": 2}, {"order": "random"}, {"key": 3}, {"key": "\ud800"}, {"append": 1}, {"resume": "x"}),
        *({"stall_timeout": 0}, {"stall_timeout": "60"}, {"workers": "2"}, {"workers": True}, {"workers": 1.5}),
        *({"workers": -1}, {"workers": 2**70}, {"shard_bytes": "1MB"}, {"shard_bytes": 1e6}, {"shard_bytes": 0}),
        *({"seed": 1.5}, {"runner": "spark"}, {"progress": "no"}),
    ],
    ids=", ".join,
)
def test_invalid_arguments_of_write_raise(arguments: dict[str, Any], source: rf.Source, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=[*arguments][-1]):
        rf.write(source, tmp_path / "p", **{"progress": False, **arguments})
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("option", [{"order": "shuffled"}, {"runner": "ray"}, {"runner": "ranks"}], ids=str)
def test_an_iterable_cannot_be_shuffled_or_written_by_ray_or_ranks(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="iterable"):
        rf.write(ROWS, tmp_path / "p", progress=False, **option)
    assert not (tmp_path / "p").exists()


def test_write_tasks_cover_all_rows_and_end_at_block_or_batch_boundaries(
    source: rf.Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tasks_module, "_PROBES", 8)
    ends = set(np.cumsum(source.blocks).tolist())
    for sample_map in (None, SampleMap(none_one_or_two), SampleMap(paired, batch=7)):
        job, tasks = partition(WriteJob("", source, tmp_path, 600, sample_map=sample_map))
        assert [task.stop for task in tasks[:-1]] == [task.start for task in tasks[1:]]
        assert (tasks[0].start, tasks[-1].stop) == (0, 400)
        if sample_map is None:
            assert any(task.stop in ends for task in tasks[:-1])
        elif sample_map.batch:
            assert all(task.start % sample_map.batch == 0 for task in tasks)
            assert job.batch % sample_map.batch == 0
    assert align_to_blocks(np.array([0, 50, 100]), np.ones(100, np.int64)).tolist() == [0, 50, 100]
    assert align_to_blocks(np.array([0, 50, 100]), np.array([100])).tolist() == [0, 50, 100]


@pytest.mark.parametrize("key", ["", "kept"])
def test_a_write_resumed_with_another_map_has_each_row_once(key: str, source: rf.Source, tmp_path: Path) -> None:
    """Without a key every row is of the new function; with a kept key, staged rows of the old one may remain."""

    def failing(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == 399:
            raise ValueError
        return {"id": sample["id"], "x": np.zeros(9)}

    arguments: dict[str, Any] = {"shard_bytes": 300, "key": key, "workers": 0, "progress": False}
    with pytest.raises(WriteError, match=r"(?s)map raised" + ".*change its key" * bool(key)):
        rf.write(source, tmp_path / "p", map=failing, **arguments)
    assert any((tmp_path / "p" / ".rankfeed-write").glob("*.arrow"))
    written = rf.write(source, tmp_path / "p", map=lambda s: {"id": s["id"], "x": np.ones(1)}, **arguments)
    assert Counter(column_of(written, "id")) == Counter(range(400))
    assert key or all(row.tolist() == [1] for row in written.fetch(range(400))["x"].rows())


def test_a_map_that_yields_many_rows_of_a_sample_keeps_few_in_memory(tmp_path: Path) -> None:
    source = rf.write([{"id": 1}], tmp_path / "source", progress=False)
    alive = most = 0

    class Row(np.ndarray):  # type: ignore[type-arg]
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def many(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
        nonlocal alive, most
        for _ in range(5000):
            alive, row = alive + 1, np.zeros(100).view(Row)
            most = max(most, alive)
            yield {"x": row}

    packed = rf.write(source, tmp_path / "p", map=many, shard_bytes=40_000, workers=0, progress=False)
    assert (len(packed), alive) == (5000, 0)
    assert most < 1000


def test_a_map_error_whose_str_raises_is_reported_with_the_sample(source: rf.Source, tmp_path: Path) -> None:
    for workers in (0, 2):
        with pytest.raises(WriteError, match=r"(?s)Mute.*__str__ raised.*sample 300"):
            rf.write(source, tmp_path / "p", map=mute, shard_bytes=500, workers=workers, progress=False)


class Mute(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)

    def __str__(self) -> str:
        raise ValueError


def mute(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["id"] == 300:
        raise Mute(1, 2)
    return sample


@pytest.mark.parametrize("name", ["\ud800", "", 3])
def test_a_map_that_returns_an_invalid_field_name_raises(name: Any, source: rf.Source, tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="field name must be a non-empty str"):
        rf.write(source, tmp_path / "p", map=lambda sample: {name: 1}, progress=False)
