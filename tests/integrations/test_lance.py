"""Lance's own loader with our sampler: each row once, equal steps, a new order every epoch."""

import copy
from collections import Counter
from itertools import chain, pairwise
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.sampler import Sampler
from lance.torch.data import LanceDataset
from tests.support.marks import slow
from torch.utils.data import DataLoader

import rankfeed as rf
from rankfeed.errors import ArgumentError, PlanError
from rankfeed.integrations.lance import ShardedSampler, ids_at, num_batches, runs_of
from rankfeed.plan import Schedule

SIZES = [100, 1, 37, 250, 64, 3, 129, 16, 17, 90]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten unequal fragments, rows deleted in all but two of them."""
    path = str(tmp_path_factory.mktemp("lance") / "rows.lance")
    first = 0
    for size in SIZES:
        rows = pa.table({"id": range(first, first + size), "half": [index / 2 for index in range(size)]})
        lance.write_dataset(rows, path, mode="append" if first else "create")
        first += size
    lance.dataset(path).delete("id % 7 = 3 AND id > 101")
    return path


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def live(table: str) -> Counter[int]:
    return Counter(lance.dataset(table).to_table(["id"])["id"].to_pylist())


def read(table: str, sampler: ShardedSampler, batch: int = 16, **options: Any) -> list[list[int]]:
    dataset = LanceDataset(table, batch_size=batch, columns=["id"], sampler=sampler, **options)
    return [rows.tolist() for rows in dataset]


def samplers(world_size: int, **options: Any) -> list[ShardedSampler]:
    places = [rf.Topology(rank=rank, world_size=world_size) for rank in range(world_size)]
    return [ShardedSampler(topology=place, **options) for place in places]


@pytest.mark.parametrize(
    ("start", "epochs"),
    [("fork", (1, 0)), slow("spawn", (None, None, 0))],
    ids=["new workers", "persistent workers"],
)
def test_lance_dataset_in_dataloader_workers_gives_the_same_batches_as_in_one_process(
    table: str, start: str, epochs: tuple[int | None, ...]
) -> None:
    sampler, alone = (samplers(1, shuffle=True, seed=3)[0] for _ in range(2))
    dataset = LanceDataset(table, batch_size=16, columns=["id"], sampler=sampler)
    options: dict[str, Any] = {"multiprocessing_context": start, "persistent_workers": start == "spawn"}
    loader = DataLoader(dataset, batch_size=None, num_workers=2, **options)
    for epoch in epochs:
        if epoch is not None:
            torch.manual_seed(0)  # a script may draw the same seed for its workers in each epoch
            sampler.set_epoch(epoch)
            alone.set_epoch(epoch)
        steps = [rows.tolist() for rows in loader]
        assert steps == read(table, alone)
        assert Counter(flat(steps)) == live(table)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [False, True])
def test_lance_sampler_reads_every_row_once_in_equal_steps_for_any_number_of_ranks(
    table: str, world_size: int, shuffle: bool
) -> None:
    ranks = [read(table, sampler) for sampler in samplers(world_size, shuffle=shuffle)]
    assert Counter(chain.from_iterable(map(flat, ranks))) == live(table)
    assert len({len(rank) for rank in ranks}) == 1
    totals = [len(flat(rank)) for rank in ranks]
    assert max(totals) - min(totals) <= 1


def test_lance_sampler_honours_filter_columns_and_row_ids_of_lance_dataset(table: str) -> None:
    ranks = []
    options: dict[str, Any] = {"columns": ["id", "half"], "filter": "id % 5 = 0", "with_row_id": True}
    for sampler in samplers(2):
        dataset = LanceDataset(table, 16, sampler=sampler, **options)
        ranks += [row for batch in dataset for row in zip(*(batch[name].tolist() for name in batch), strict=True)]
    scan = lance.dataset(table).to_table(**options)
    assert Counter(ranks) == Counter(tuple(row.values()) for row in scan.to_pylist())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    batch=st.integers(1, 20),
    world_size=st.integers(1, 9),
    workers=st.integers(1, 4),
    tail=st.sampled_from(["rest", "drop"]),
)
def test_lance_sampler_steps_are_equal_on_all_ranks_after_lance_joins_small_batches(
    rows: int, batch: int, world_size: int, workers: int, tail: Any
) -> None:
    plan = rf.Plan(rows, seed=rows)
    if rows < world_size:
        with pytest.raises(PlanError):
            Schedule(plan, batch_size=batch, topology=rf.Topology(world_size=world_size), tail=tail)
        return
    seen: Counter[int] = Counter()
    counts = set()
    for rank in range(world_size):
        topology = rf.Topology(rank=rank, world_size=world_size)
        schedule = Schedule(plan, batch_size=batch, topology=topology, tail=tail)
        ids = [ids_at(schedule, index) for index in range(num_batches(schedule))]
        sizes = [len(batch) for batch in ids]
        for each in ids:
            seen.update(each.tolist())
        for worker in range(workers):
            own = sizes[worker::workers]
            assert all(first + second > batch for first, second in pairwise(own))
        counts.add(len(ids))
    assert len(counts) == 1
    full = rows // (batch * world_size) * (batch * world_size)
    assert seen.total() == (rows if tail == "rest" else full)
    assert max(seen.values(), default=1) == 1


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 20))
def test_lance_sampler_runs_do_not_cross_fragment_boundaries(counts: list[int], run: int) -> None:
    runs = runs_of(np.array(counts), run)
    assert runs.sum() == sum(counts)
    assert runs.size == 0 or 0 < runs.min() <= runs.max() <= run
    assert np.isin(np.cumsum(counts)[np.array(counts) > 0], np.cumsum(runs)).all()


def test_lance_sampler_shuffles_each_epoch_differently_and_supports_set_epoch(table: str) -> None:
    (sampler,) = samplers(1, shuffle=True, seed=5)
    first, second = read(table, sampler), read(table, sampler)
    assert first != second
    assert sampler.epoch == 2
    sampler.set_epoch(1)
    assert (read(table, sampler), sampler.epoch) == (second, 2)
    (again,) = samplers(1, shuffle=True, seed=6)
    assert read(table, again) != first
    sampler.set_epoch(0)
    assert read(table, copy.deepcopy(sampler)) == first


def test_lance_sampler_without_shuffle_keeps_the_stored_row_order(table: str) -> None:
    (sampler,) = samplers(1)
    assert flat(read(table, sampler)) == lance.dataset(table).to_table(["id"])["id"].to_pylist()


def test_longer_lance_sampler_runs_keep_more_neighbouring_rows_together(table: str) -> None:
    lying = lance.dataset(table).to_table(["id"])["id"].to_pylist()
    after = dict(pairwise(lying))

    def neighbours(**options: Any) -> int:
        (sampler,) = samplers(1, shuffle=True, **options)
        ids = flat(read(table, sampler))
        return sum(after.get(one) == other for one, other in pairwise(ids))

    assert neighbours(run=1) < 20 < 300 < neighbours(run=8) < neighbours(run=32)


def test_sharded_sampler_is_an_instance_of_lance_sampler() -> None:
    assert isinstance(ShardedSampler(), Sampler)


def test_invalid_lance_sampler_arguments_raise_an_error(table: str) -> None:
    with pytest.raises(ArgumentError, match="invalid tail"):
        ShardedSampler(tail="pad")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="shuffle"):
        ShardedSampler(shuffle="global")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="run"):
        ShardedSampler(run=0)
    with pytest.raises(ArgumentError, match="epoch"):
        ShardedSampler().set_epoch(-1)
    with pytest.raises(PlanError, match="fewer samples than there are ranks"):
        read(table, samplers(1000)[999])
    with pytest.raises(ArgumentError, match="filter"):
        read(table, samplers(1)[0], filter="nothing >")
