"""A batch is a pure function of its step: the same for any worker, and when built twice."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.loading.feeds import Memory, keyed_all, same

import rankfeed as rf
from rankfeed.columns.columns import Columns, Dense
from rankfeed.loading.batch_builder import BatchBuilder
from rankfeed.plan import Plan, Schedule
from rankfeed.topology import Topology


def builder(**options: Any) -> BatchBuilder:
    functions = dict.fromkeys(("columns", "transform", "batch_transform", "collate_fn"))
    usual = {"source": Memory(40), "ragged": "pad", "pad_to": 1, "seed": 5, "id_column": "id"}
    return BatchBuilder(**{**functions, **usual, "seed_globals": True, **options})


def schedule(**options: Any) -> Schedule:
    return Schedule(Plan(40, seed=5), batch_size=3, topology=Topology(1, 2), tail="pad", **options)


@cache
def built_alone() -> list[Any]:
    return [builder(transform=keyed_all).build_step(schedule(), step).batch for step in range(len(schedule()))]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_steps_built_in_any_order_and_repeatedly_give_the_same_batches(order: list[int]) -> None:
    ours, plan, expected = builder(transform=keyed_all), schedule(), built_alone()
    for step in order:
        assert same(ours.build_step(plan, step).batch, expected[step])


@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("columns", [None, ["y", "x", "tokens"], ["point"]])
def test_batches_of_several_steps_built_together_equal_those_built_one_by_one(
    tail: Any, stride: int, columns: list[str] | None, tmp_path: Path
) -> None:
    rows = [
        {"y": i, "point": np.full(3, i), "x": np.full((i % 5, 2), i), "tokens": [i] * (i % 3)} for i in range(307)
    ]
    texts = [{**row, "name": str(row["y"])} if columns is None else row for row in rows]
    source = rf.write(texts, tmp_path / "data", shard_bytes=4000, progress=False)
    plan = Schedule(Plan(307, seed=5), batch_size=3, topology=Topology(rank=1, world_size=2), tail=tail)
    options = {"source": source, "id_column": None, "columns": columns, "stride": stride, "pad_to": 2}
    one, other = builder(**options), builder(**options)
    calls: Counter[int] = Counter()
    gather = Dense.gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dense, "gather", lambda self, *given: calls.update([len(self)]) or gather(self, *given))
        many = list(one.build_steps(plan, range(1, len(plan), stride)))
    assert (max(calls) > 6) == (columns is not None and tail != "pad")
    alone = [other.build_step(plan, step) for step in range(1, len(plan), stride)]
    assert [each.step for each in many] == [each.step for each in alone]
    for ours, theirs in zip(many, alone, strict=True):
        assert list(ours.batch) == list(theirs.batch)
        assert same(ours.batch, theirs.batch)
        assert ours.sample_ids.tolist() == theirs.sample_ids.tolist()
        assert ours.padding == theirs.padding


class Told(Memory):
    """Writes down which samples it was told of before they were asked for."""

    prefetch_distance = 1

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.told: list[list[int]] = []
        self.read: list[list[int]] = []

    def expect(self, sample_ids: Any, columns: Any = None) -> None:
        self.told.append(np.asarray(sample_ids).tolist())

    def fetch(self, sample_ids: Any, columns: Any = None) -> Columns:
        self.read.append(np.asarray(sample_ids).tolist())
        return super().fetch(sample_ids, columns)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("ahead", [2, 4, 7, 8, 17, 40])
def test_a_source_receives_prefetch_hints_for_each_step_once_before_it_is_read(stride: int, ahead: int) -> None:
    plan = Schedule(Plan(400, seed=5), batch_size=3, topology=Topology(1, 2), tail="pad")
    batches = [plan.batch(step).tolist() for step in range(len(plan))]
    for worker in range(stride):
        source = Told(400)
        ours = builder(source=source, prefetch_steps=ahead * stride, stride=stride)
        own = batches[worker::stride]
        expected = list(chain.from_iterable(own))
        for at, step in enumerate(range(worker, len(plan), stride)):
            ours.build_step(plan, step)
            told = list(chain.from_iterable(source.told))
            assert told == expected[: len(told)]
            assert len(told) >= min(len(own), at + 1 + ahead * 7 // 8) * 3
        assert source.read == own
        assert list(chain.from_iterable(source.told)) == expected


class Batched(torch.utils.data.Dataset[dict[str, float]]):
    """A Dataset that reads batches, and counts how often."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"x": float(index), "noise": torch.rand(1).item()}

    def __getitems__(self, indices: list[int]) -> list[dict[str, float]]:
        self.asked += 1
        return [self[index] for index in indices]


def test_a_dataset_with_batched_getitem_is_read_by_batch_with_reproducible_random_numbers() -> None:
    dataset = Batched()
    source = rf.from_dataset(dataset)
    first = list(rf.Loader(source, 4, topology=rf.Topology()))
    asked = dataset.asked
    again = list(rf.Loader(source, 4, topology=rf.Topology(), num_workers=1, worker_kind="process"))
    assert asked <= 3 + 1  # three batches, and once to look at the fields
    assert [batch["noise"].tolist() for batch in first] == [batch["noise"].tolist() for batch in again]


def test_nested_dict_samples_are_collated_the_same_with_and_without_workers() -> None:
    source = rf.from_dataset([{"x": {"a": number, "b": "text"}} for number in range(4)])
    for workers in (0, 2):
        batches = list(rf.Loader(source, 2, num_workers=workers))
        assert [batch["x"]["a"].tolist() for batch in batches] == [[0, 1], [2, 3]]
        assert batches[1]["x"]["b"] == ["text", "text"]
