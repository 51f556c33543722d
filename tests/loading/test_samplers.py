"""rankfeed's samplers under torch's own DataLoader: each sample once, equal steps, states shared with a Loader."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.loading.feeds import Memory, Tuples, Wrapped, assert_once, delivered, feed, ranks, steps_of, take
from tests.support.marks import soak
from tests.support.packages import need_package
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from rankfeed import errors
from rankfeed.loading import DistributedBatchSampler, DistributedSampler, Loader
from rankfeed.sources import from_dataset
from rankfeed.topology import Topology

BOTH = [DistributedBatchSampler, DistributedSampler]


def stock(sampler: Any, size: int, batch_size: int, *, loader: type[Any] = DataLoader, **options: Any) -> Any:
    """torch's own DataLoader, or one like it, over a sampler of either kind."""
    if isinstance(sampler, DistributedBatchSampler):
        return loader(range(size), batch_sampler=sampler, **options)
    return loader(range(size), batch_size, sampler=sampler, **options)


def flat(batches: Any) -> list[int]:
    return [sample_id for batch in batches for sample_id in batch.tolist()]


def of_ranks(kind: Any, size: int, world_size: int, batch_size: int, **options: Any) -> list[Any]:
    return [kind(size, batch_size, topology=topology, **options) for topology in ranks(world_size)]


@given(size=st.integers(1, 80), world_size=st.integers(1, 5), batch_size=st.integers(1, 7), shuffle=st.booleans())
def test_distributed_batch_sampler_yields_every_sample_once_in_equal_steps(
    size: int, world_size: int, batch_size: int, shuffle: bool
) -> None:
    assume(size >= world_size)
    samplers = of_ranks(DistributedBatchSampler, size, world_size, batch_size, shuffle=shuffle)
    for _ in range(2):
        lengths = {len(sampler) for sampler in samplers}
        batches = [list(sampler) for sampler in samplers]
        assert {len(each) for each in batches} == lengths
        assert_once([sample_id for mine in batches for batch in mine for sample_id in batch], size)


@given(
    size=st.integers(1, 80),
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    tail=st.sampled_from(["even", "drop"]),
)
def test_distributed_sampler_yields_every_sample_once_and_warns_if_steps_may_differ(
    size: int, world_size: int, batch_size: int, shuffle: bool, tail: Any
) -> None:
    assume(size >= world_size)
    samplers = of_ranks(DistributedSampler, size, world_size, batch_size, shuffle=shuffle, tail=tail)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shares = [list(sampler) for sampler in samplers]
    fresh = of_ranks(DistributedSampler, size, world_size, batch_size, shuffle=shuffle, tail=tail)
    assert [len(share) for share in shares] == [len(sampler) for sampler in fresh]
    rest = size % (batch_size * world_size)
    steps = {-(-len(share) // batch_size) for share in shares}
    if tail == "drop":
        assert sum(map(len, shares)) == len({sample_id for share in shares for sample_id in share}) == size - rest
        assert len(steps) == 1
    else:
        assert_once([sample_id for share in shares for sample_id in share], size)
        assert len(steps) == 1 or said
        assert bool(said) == (0 < rest < world_size)


def test_wrapping_a_sampler_in_a_distributed_batch_sampler_raises_argument_error() -> None:
    with pytest.raises(errors.ArgumentError, match="use_distributed_sampler=False"):
        DistributedBatchSampler(DistributedSampler(20, 2), batch_size=2, drop_last=False)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_with_tail_pad_every_sampler_batch_is_full_and_contains_all_samples(kind: Any, world_size: int) -> None:
    size, batch_size = 23, 4
    ids = []
    for sampler in of_ranks(kind, size, world_size, batch_size, tail="pad", shuffle=True):
        for batch in stock(sampler, size, batch_size):
            assert len(batch) == batch_size
            ids += batch.tolist()
    assert set(ids) == set(range(size))


def test_a_resumed_batch_sampler_warns_if_fewer_samples_than_ranks_are_left() -> None:
    state = DistributedBatchSampler(10, 4, tail="drop", topology=Topology(0, 2)).state_dict(delivered_steps=1)

    def rest_of(tail: str, world_size: int) -> tuple[list[int], list[str]]:
        ids, caught = [], []
        for rank in range(world_size):
            topology = Topology(rank=rank, world_size=world_size)
            sampler = DistributedBatchSampler(10, 4, topology=topology, tail=tail)  # type: ignore[arg-type]
            sampler.load_state_dict(state)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                ids += [sample_id for batch in sampler for sample_id in batch]
                caught += [str(each.message) for each in said]
        return ids, caught

    ids, caught = rest_of("even", 5)
    assert len(ids) == 5
    assert len(caught) == 5
    assert all("2 samples are left" in text and "valid(step)" in text and 'tail="drop"' in text for text in caught)
    assert rest_of("drop", 5) == ([], [])
    assert rest_of("pad", 5)[1] == []
    for world_size in (1, 2):
        ids, caught = rest_of("even", world_size)
        assert (Counter(ids), caught) == (Counter([8, 9]), [])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("tail", ["even", "pad"])
def test_the_mean_over_valid_rows_of_all_ranks_is_the_exact_mean_of_the_data(tail: Any, world_size: int) -> None:
    """Compares Loader and DistributedBatchSampler with the exact mean: sums of float32 are exact in float64."""
    values = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    sizes = [size for size in range(1, 41, 3) if tail == "pad" or size >= world_size]
    for size, batch_size in itertools.product(sizes, (1, 3)):
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "tail": tail}
        rows: Any = [{"x": float(value)} for value in values[:size]]
        fed: dict[str, list[torch.Tensor]] = {"loader": [], "sampler": []}
        for topology in ranks(world_size):
            for batch in Loader(from_dataset(rows), topology=topology, **options):
                fed["loader"].append(batch["x"][batch["valid"]] if "valid" in batch else batch["x"])
            sampler = DistributedBatchSampler(rows, topology=topology, **options)
            for step, batch in enumerate(DataLoader(rows, batch_sampler=sampler)):
                fed["sampler"].append(batch["x"][torch.tensor(sampler.valid(step))])
        means = {name: float(torch.cat(parts).sum() / len(torch.cat(parts))) for name, parts in fed.items()}
        assert means == dict.fromkeys(fed, math.fsum(values[:size].tolist()) / size), (size, batch_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_distributed_batch_sampler_yields_the_same_batches_as_a_loader(world_size: int) -> None:
    source = Memory(50)
    for topology in ranks(world_size):
        sampler = DistributedBatchSampler(source, 4, shuffle=True, seed=3, topology=topology)
        loader = Loader(source, 4, shuffle="global", seed=3, id_column="id", topology=topology)
        for _ in range(2):
            assert list(sampler) == [batch["id"].tolist() for batch in loader]


def test_distributed_sampler_is_a_torch_distributed_sampler_that_needs_no_process_group() -> None:
    sampler = DistributedSampler(20, 2, topology=Topology(rank=1, world_size=4))
    assert isinstance(sampler, TorchDistributedSampler)
    assert (sampler.rank, sampler.num_replicas, sampler.epoch, sampler.num_samples) == (1, 4, 0, 5)
    assert sampler.drop_last is False
    assert isinstance(DistributedBatchSampler(20, 2), torch.utils.data.Sampler)


def test_dataloader_batch_sampler_sampler_set_epoch_sets_the_epoch_of_the_batch_sampler() -> None:
    sampler = DistributedBatchSampler(20, 2, shuffle=True, topology=Topology())
    DataLoader(range(20), batch_sampler=sampler).batch_sampler.sampler.set_epoch(3)  # type: ignore[union-attr]
    assert sampler.epoch == 3


@pytest.mark.parametrize("kind", BOTH)
def test_a_sampler_without_set_epoch_advances_through_the_same_epochs_as_with_it(kind: Any) -> None:
    counting, told = (kind(30, 4, shuffle=True, topology=Topology()) for _ in range(2))
    orders = []
    for epoch in range(3):
        told.set_epoch(epoch)
        orders.append(list(counting))
        assert list(told) == orders[-1]
        assert counting.epoch == epoch
    assert orders[0] != orders[1] != orders[2]
    told.set_epoch(0)
    assert list(told) == orders[0]


@pytest.mark.parametrize("kind", BOTH)
def test_iterating_a_sampler_again_after_a_break_restarts_the_same_epoch(kind: Any) -> None:
    sampler = kind(30, 4, shuffle=True, topology=Topology())
    loader = stock(sampler, 30, 4)
    expected = flat(loader)
    sampler.set_epoch(0)
    list(zip(range(3), loader, strict=False))
    assert flat(loader) == expected


@pytest.mark.parametrize("kind", BOTH)
def test_taking_exactly_len_batches_advances_the_sampler_to_the_next_epoch(kind: Any) -> None:
    loader, expected = (stock(kind(30, 4, shuffle=True, topology=Topology()), 30, 4) for _ in range(2))
    for _ in range(3):
        batches = [batch for _, batch in zip(range(len(loader)), loader, strict=False)]
        assert [x for batch in batches for x in flat([batch])] == flat(expected)
    sampler = kind(30, 4, shuffle=True, topology=Topology())
    iterator, whole = iter(sampler), list(kind(30, 4, shuffle=True, topology=Topology()))
    assert [next(iterator) for _ in range(len(whole) - 1)] == whole[:-1]
    assert list(sampler) == whole, "the last item was not delivered"


WORKERS: list[Any] = [
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    *(
        soak({"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": method})
        for persistent in (False, True)
        for method in ("spawn", "forkserver")
    ),
]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_a_stock_dataloader_with_a_sampler_gives_the_same_batches_for_any_workers(
    kind: Any, options: dict[str, Any]
) -> None:
    expected = kind(31, 4, shuffle=True, topology=Topology(rank=1, world_size=2))
    sampler = kind(31, 4, shuffle=True, topology=Topology(rank=1, world_size=2))
    loader = stock(sampler, 31, 4, **options)
    for _ in range(3):
        assert flat(loader) == flat(stock(expected, 31, 4))
        assert sampler.epoch == expected.epoch


def test_a_batch_sampler_works_with_a_different_number_of_workers_each_epoch() -> None:
    sampler = DistributedBatchSampler(31, 4, shuffle=True, topology=Topology())
    for epoch, num_workers in enumerate([0, 2, 1, 0]):
        assert_once(flat(stock(sampler, 31, 4, num_workers=num_workers)), 31)
        assert sampler.epoch == epoch


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_sampler_state_dict_of_delivered_steps_resumes_at_the_next_batch(kind: Any, num_workers: int) -> None:
    loader = stock(kind(50, 4, shuffle=True, topology=Topology()), 50, 4)
    expected, following = ([batch.tolist() for batch in loader] for _ in range(2))
    sampler = kind(50, 4, shuffle=True, topology=Topology())
    iterator = iter(stock(sampler, 50, 4, num_workers=num_workers))
    for stop in range(len(expected) + 1):
        state = json.loads(json.dumps(sampler.state_dict(stop)))
        resumed = kind(50, 4, shuffle=True, topology=Topology())
        resumed.load_state_dict(state)
        rest = flat(stock(resumed, 50, 4))
        if kind is DistributedBatchSampler or stop < len(expected):
            assert rest == [*itertools.chain(*(expected[stop:] or following))]
        if stop < len(expected):
            assert next(iterator).tolist() == expected[stop]


@pytest.mark.parametrize("kind", BOTH)
def test_sampler_state_dict_without_an_argument_counts_the_steps_already_requested(kind: Any) -> None:
    sampler = kind(50, 4, shuffle=True, topology=Topology())
    for step, _ in zip(range(1, 13), stock(sampler, 50, 4), strict=False):
        assert sampler.state_dict() == sampler.state_dict(step)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("new", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_sampler_resumes_on_other_ranks_and_batch_sizes(kind: Any, new: int, batch_size: int) -> None:
    size = 45
    for stop in range(6):
        before = of_ranks(kind, size, 2, 4, shuffle=True)
        ids = []
        for sampler in before:
            ids += flat(take(iter(stock(sampler, size, 4)), stop))
        (state,) = {json.dumps(sampler.state_dict(stop)) for sampler in before}
        assert len(state) < 1024
        for topology in ranks(new):
            after = kind(size, batch_size, shuffle=True, topology=topology)
            after.load_state_dict(json.loads(state))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ids += flat(stock(after, size, batch_size))
        assert_once(ids, size)


def stateful(sampler: Any, size: int, batch_size: int, every: int, workers: int) -> Any:
    """torchdata's StatefulDataLoader over a sampler of either kind."""
    need_package("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    options = {"num_workers": workers, "snapshot_every_n_steps": every}
    return stock(sampler, size, batch_size, loader=StatefulDataLoader, **options)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("every", "workers", "skips"), [(1, 1, False), (3, 0, False), (3, 1, True)])
def test_a_stateful_dataloader_with_a_sampler_resumes_on_other_ranks_and_batch_sizes(
    kind: Any, every: int, workers: int, skips: bool
) -> None:
    def sampler(world_size: int, batch_size: int) -> Any:
        return kind(45, batch_size, shuffle=True, topology=Topology(rank=world_size - 1, world_size=world_size))

    def loader(world_size: int, batch_size: int) -> Any:
        return stateful(sampler(world_size, batch_size), 45, batch_size, every, workers)

    donor, told = loader(2, 3), sampler(2, 3)
    assert flat(take(iter(donor), 4)) == flat(take(iter(stock(told, 45, 3)), 4))
    state = donor.state_dict()
    for world_size, batch_size in ((2, 3), (3, 2), (3, 5)):
        resumed, expected = loader(world_size, batch_size), sampler(world_size, batch_size)
        resumed.load_state_dict(state)
        if skips and world_size * batch_size != 6:
            with pytest.raises(errors.StateError, match="have another size now"):
                iter(resumed)
        else:
            expected.load_state_dict(told.state_dict())
            assert flat(resumed) == flat(stock(expected, 45, batch_size))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("every", "workers"), [(1, 0), (3, 0), (1, 2), (3, 2)])
def test_a_stateful_dataloader_resumed_at_the_end_of_an_epoch_delivers_the_next_epoch(
    kind: Any, every: int, workers: int
) -> None:
    def loader() -> Any:
        return stateful(kind(13, 3, shuffle=True, topology=Topology()), 13, 3, every, workers)

    plain = loader()
    epochs = [flat(plain) for _ in range(4)]
    for is_ended in (False, True):
        donor = loader()
        batches = iter(donor)
        take(batches, 5)
        assert not is_ended or next(batches, None) is None
        resumed = loader()
        resumed.load_state_dict(donor.state_dict())
        passes = [flat(resumed) for _ in range(3)]
        if passes[0] == []:  # it skips steps from an earlier snapshot by itself
            assert (every, workers, is_ended) == (3, 2, False)
            passes = [*passes[1:], flat(resumed)]
        assert passes == epochs[1:]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
@pytest.mark.parametrize("new", [1, 2, 4])
def test_a_sampler_resumed_from_the_end_of_an_epoch_yields_the_next_epoch(kind: Any, tail: str, new: int) -> None:
    plain = kind(50, 4, shuffle=True, tail=tail, topology=Topology())
    list(plain)
    state = plain.state_dict()
    for topology in ranks(new):

        def sampler(epoch: int | None = None, topology: Topology = topology) -> Any:
            made = kind(50, 4, shuffle=True, tail=tail, topology=topology)
            made.load_state_dict(state)
            if epoch is not None:
                made.set_epoch(epoch)
            return made

        expected = list(sampler(1))
        assert expected
        resumed = sampler()
        assert (resumed.epoch, len(resumed)) == (1, len(expected))
        assert resumed.state_dict() == state
        assert list(resumed) == expected
        assert (resumed.epoch, resumed.state_dict()["epoch"]) == (1, 1)
        again = sampler(0)
        assert list(again) == [], "the epoch that has ended is named"
        assert list(again) == expected
        assert sampler().state_dict(1)["epoch"] == 1


@pytest.mark.parametrize("kind", BOTH)
def test_a_loader_state_loads_into_a_sampler_and_a_sampler_state_into_a_loader(kind: Any) -> None:
    source = Memory(50)
    loaders = [feed(rank, 2) for rank in range(2)]
    ids = [sample_id for step in steps_of(loaders, 3) for sample_id in delivered(step)]
    state = loaders[0].state_dict()
    for topology in ranks(3):
        sampler = kind(source, 3, shuffle=True, seed=3, topology=topology)
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
        ids += flat(take(iter(stock(sampler, 50, 3)), 1))
        later = sampler.state_dict(1)
    resumed = feed()
    resumed.load_state_dict(later)
    assert resumed.state_dict() == {**state, "position": 24 + 9, "steps": 4}
    ids += delivered(list(resumed))
    assert_once(ids, 50)


@pytest.mark.parametrize("kind", BOTH)
def test_set_epoch_to_the_loaded_epoch_keeps_the_loaded_position_of_a_sampler(kind: Any) -> None:
    donor = kind(50, 4, shuffle=True, topology=Topology())
    donor.set_epoch(2)
    state = donor.state_dict(5)
    sampler = kind(50, 4, shuffle=True, topology=Topology())
    sampler.load_state_dict(state)
    sampler.set_epoch(2)
    assert sum(map(len, stock(sampler, 50, 4))) == 30
    sampler.load_state_dict(state)
    sampler.set_epoch(3)
    assert sum(map(len, stock(sampler, 50, 4))) == 50


@pytest.mark.parametrize("kind", BOTH)
def test_loading_a_sampler_state_of_another_plan_or_source_raises_state_error(kind: Any) -> None:
    state = feed().state_dict()
    for sampler in (
        kind(Memory(50), 4, shuffle=True, seed=9),
        kind(Memory(50), 4, seed=3),
        kind(Memory(51), 4, shuffle=True, seed=3),
        kind(Memory(50, mark="a"), 4, shuffle=True, seed=3),
    ):
        with pytest.raises(errors.StateError, match=r"was .*, is "):
            sampler.load_state_dict(state)
    with pytest.raises(errors.StateError):
        kind(50).load_state_dict({"epoch": 1})


@pytest.mark.parametrize("kind", BOTH)
def test_sampler_start_skips_that_many_samples_of_the_first_epoch_only(kind: Any) -> None:
    whole = flat(stock(kind(30, 5, shuffle=True, topology=Topology()), 30, 5))
    sampler = kind(30, 5, shuffle=True, start=10, topology=Topology())
    assert flat(stock(sampler, 30, 5)) == whole[10:]
    assert len(flat(stock(sampler, 30, 5))) == 30


@pytest.mark.parametrize("kind", BOTH)
def test_invalid_sampler_arguments_raise_an_error(kind: Any) -> None:
    for arguments, options in (((10, 0), {}), ((0, 2), {}), ((-1,), {}), ((10, 2), {"start": -1}), ((1.5,), {})):
        with pytest.raises((errors.ArgumentError, errors.PlanError)):
            kind(*arguments, **options)
    for options in ({"tail": "odd"}, {"start": 11}):
        with pytest.raises((errors.ArgumentError, errors.PlanError)):
            list(kind(10, 2, topology=Topology(), **options))
    with pytest.raises(errors.PlanError, match="fewer samples than there are ranks"):
        len(kind(3, 2, topology=Topology(rank=0, world_size=4)))
    with pytest.raises(errors.ArgumentError):
        kind(10, 2, topology=Topology()).state_dict(-1)


def test_a_batch_sampler_takes_its_size_from_a_dataset_source_list_or_int() -> None:
    for samples in (Tuples(7), Wrapped(Tuples(7)), Memory(7), [0] * 7, 7):
        assert sum(map(len, DistributedBatchSampler(samples, 2, topology=Topology()))) == 7


def test_a_rankfeed_source_works_as_a_dataset_of_a_stock_dataloader() -> None:
    source = Memory(20)
    sampler = DistributedBatchSampler(source, 4, shuffle=True, topology=Topology())
    loader = DataLoader(source, batch_sampler=sampler, num_workers=1, collate_fn=list)
    assert_once([int(sample["y"]) // 10 for batch in loader for sample in batch], 20)
