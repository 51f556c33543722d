"""The stages that deal samples: what each rank and worker gets, in which order and epoch, and from where on."""

import copy
import pickle
from collections import Counter
from itertools import chain, zip_longest
from typing import Any

import pytest
import torch
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from tests.loading.feeds import ranks
from tests.support.marks import slow, soak
from torch.utils.data import DataLoader

import rankfeed as rf
from rankfeed.errors import ArgumentError, PlanError, StateError
from rankfeed.integrations.webdataset import Resampled, ShardedSamples

Keys = list[str]


def source(size: int) -> rf.Source:
    return rf.from_dataset([{"__key__": f"{i:04d}", "cls": b"%d" % i, "txt": b"t"} for i in range(size)])


def keys(samples: Any) -> Keys:
    return [sample["__key__"] for sample in samples]


def flat(batches: Any) -> list[int]:
    return [int(sample_id) for batch in batches for sample_id in batch]


def cut(stream: list[int], size: int) -> list[list[int]]:
    return [stream[first : first + size] for first in range(0, len(stream), size)]


def in_turn(streams: list[list[Any]]) -> list[Any]:
    """As a DataLoader takes from its workers."""
    return [sample for group in zip_longest(*streams) for sample in group if sample is not None]


@given(st.integers(1, 200), st.integers(1, 7), st.integers(1, 4), st.booleans())
def test_sharded_samples_gives_every_sample_to_exactly_one_worker_of_one_rank(
    size: int, world: int, workers: int, shuffle: bool
) -> None:
    stage = ShardedSamples(source(max(size, world)), shuffle=shuffle, seed=1)
    of_ranks = [
        [flat(stage.share(rank, worker=worker, num_workers=workers)) for worker in range(workers)]
        for rank in ranks(world)
    ]
    totals = [sum(map(len, rank)) for rank in of_ranks]
    assert Counter(chain.from_iterable(chain.from_iterable(of_ranks))) == Counter(range(max(size, world)))
    assert max(totals) - min(totals) <= 1


@given(
    st.integers(1, 200),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(["even", "drop", "pad"]),
)
def test_sharded_samples_has_equally_many_batches_on_all_ranks_for_each_tail(
    size: int, world: int, workers: int, batch_size: int, tail: Any
) -> None:
    size = max(size, world)
    stage = ShardedSamples(source(size), batch_size, shuffle="global", tail=tail)
    rest = size % (batch_size * world)
    if tail == "even" and 0 < rest < world:
        with pytest.raises(PlanError, match="equal steps") as caught:
            stage.share(ranks(world)[0])
        assert f"{rest} of {size}" in str(caught.value)
        assert 'tail="drop"' in str(caught.value)
        return
    made = []
    for rank in ranks(world):
        streams = [flat(stage.share(rank, worker=worker, num_workers=workers)) for worker in range(workers)]
        batches = in_turn([cut(stream, batch_size) for stream in streams])
        assert batches == [batch.tolist() for batch in stage.share(rank)]
        made.append(batches)
    assert len({len(batches) for batches in made}) == 1
    assert len(made[0]) == len(stage.share(ranks(world)[0]))
    read = Counter(flat(chain.from_iterable(made)))
    if tail == "even":
        assert read == Counter(range(size))
    elif tail == "drop":
        assert read.total() == size - rest
        assert not read or max(read.values()) == 1
    else:
        assert read.total() == len(made[0]) * batch_size * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sharded_samples_has_the_same_order_as_distributed_sampler(world: int) -> None:
    data = source(53)
    for rank in ranks(world):
        stage = ShardedSamples(data, 4, shuffle=True, seed=9, topology=rank)
        sampler = rf.DistributedSampler(data, 4, shuffle=True, seed=9, topology=rank)
        for epoch in range(2):
            stage.set_epoch(epoch)
            sampler.set_epoch(epoch)
            assert keys(stage) == [f"{sample_id:04d}" for sample_id in sampler]


def test_padding_samples_are_marked_invalid_and_each_valid_sample_occurs_once() -> None:
    marked = [
        (sample["__key__"], sample["__valid__"])
        for rank in ranks(3)
        for sample in ShardedSamples(source(10), 2, tail="pad", topology=rank)
    ]
    assert len(marked) == 12
    assert Counter(key for key, valid in marked if valid) == Counter(f"{i:04d}" for i in range(10))


def test_sharded_samples_with_columns_yields_only_these_and_the_key() -> None:
    assert list(next(iter(ShardedSamples(source(3), columns=["txt"])))) == ["__key__", "txt"]
    with pytest.raises(rf.errors.ArgumentError, match="no such column"):
        ShardedSamples(source(3), columns=["jpg"])


@pytest.mark.parametrize("kind", [ShardedSamples, Resampled])
def test_invalid_stage_arguments_raise_an_error_at_construction(kind: Any) -> None:
    for options in ({"batch_size": 0}, {"tail": "fill"}, {"seed": 0.5}):
        with pytest.raises(rf.errors.ArgumentError, match=next(iter(options))):
            kind(source(3), **options)
    with pytest.raises(rf.errors.SourceError):
        kind("/nowhere/at/all.tar")


def test_fewer_samples_than_ranks_raise_plan_error_unless_tail_is_pad() -> None:
    stage = ShardedSamples(source(2), topology=rf.Topology(rank=2, world_size=3))
    with pytest.raises(PlanError, match="fewer samples than there are ranks"):
        iter(stage)
    padded = ShardedSamples(source(2), tail="pad", topology=rf.Topology(rank=0, world_size=3))
    assert [sample["__valid__"] for sample in padded] == [False]


def test_each_pass_over_a_stage_is_the_next_epoch_until_set_epoch_fixes_the_epoch() -> None:
    stage = ShardedSamples(source(20), shuffle=True, topology=rf.Topology())
    passes = [keys(stage) for _ in range(3)]
    assert len({tuple(pass_) for pass_ in passes}) == 3
    next(iter(stage))
    assert stage.epoch == 4  # one that was broken off counts
    stage.set_epoch(1)
    assert keys(stage) == passes[1] == keys(stage)
    stage.set_epoch(2)
    assert keys(stage) == passes[2]


def test_a_sharded_samples_state_resumes_on_other_ranks_without_losing_or_repeating_samples() -> None:
    data = source(103)
    stages = [ShardedSamples(data, 4, shuffle=True, seed=2, topology=rank) for rank in ranks(2)]
    for stage in stages:
        stage.set_epoch(3)
    delivered = [key for stage in stages for key in keys(stage)[: 5 * 4]]
    states = [stage.state_dict(delivered_steps=5) for stage in stages]
    assert states[0] == states[1]
    for world, batch_size in ((1, 4), (3, 3), (5, 7)):
        rest = []
        for rank in ranks(world):
            stage = ShardedSamples(data, batch_size, shuffle=True, seed=2, topology=rank)
            stage.load_state_dict(states[0])
            stage.set_epoch(3)  # as frameworks do: the loaded place stays
            rest += keys(stage)
            assert stage.num_batches() == -(-(103 - 40) // (batch_size * world))
            stage.set_epoch(4)
            assert stage.num_batches() == -(-103 // (batch_size * world))
        assert Counter(delivered + rest) == Counter(f"{i:04d}" for i in range(103))


def test_a_stage_state_saved_with_order_version_1_resumes_in_that_order() -> None:
    data = source(50)
    options: dict[str, Any] = {"shuffle": "window", "window": 7, "topology": rf.Topology()}
    plan = rf.Plan(data.blocks, shuffle="window", window=7, lanes=64).with_order(1)
    state = {
        "rankfeed": 1, "epoch": 1, "position": 20, "steps": 2, "plan": plan.describe(), "source": data.fingerprint,
    }  # fmt: skip
    stage = ShardedSamples(data, 10, **options)
    stage.load_state_dict(state)
    assert keys(stage) == [f"{sample_id:04d}" for sample_id in plan.sample_ids(1, range(20, 50))]
    # The workers of an iteration have the present order.
    begun = ShardedSamples(data, 10, **options)
    keys(begun)
    with pytest.raises(StateError, match="before the first iteration"):
        begun.load_state_dict(state)


def test_resuming_fewer_samples_than_ranks_raises_plan_error_unless_dropped_or_padded() -> None:
    data = source(50)
    stage = ShardedSamples(data, 4, shuffle=True, topology=rf.Topology(rank=0, world_size=2))
    stage.set_epoch(1)
    state, rest = stage.state_dict(delivered_steps=6), [flat(stage.share(rank)[6:]) for rank in ranks(2)]

    def resumed(rank: rf.Topology, tail: Any) -> list[tuple[str, bool]]:
        again = ShardedSamples(data, 4, shuffle=True, tail=tail, topology=rank)
        again.load_state_dict(state)
        return [(sample["__key__"], sample.get("__valid__", True)) for sample in again]

    for rank in ranks(3):
        with pytest.raises(PlanError, match="fewer ranks"):
            resumed(rank, "even")
        assert resumed(rank, "drop") == []
    filled = [sample for rank in ranks(3) for sample in resumed(rank, "pad")]
    assert len(filled) == 12
    assert Counter(key for key, valid in filled if valid) == Counter(
        f"{sample_id:04d}" for sample_id in flat(rest)
    )


def test_a_stage_state_after_the_last_step_yields_no_more_samples_of_that_epoch() -> None:
    stage = ShardedSamples(source(10), 2, topology=rf.Topology(rank=0, world_size=2))
    stage.set_epoch(0)
    stage.load_state_dict(stage.state_dict(stage.num_batches()))
    assert keys(stage) == []


@pytest.mark.parametrize("between", [[], [wds.shuffle(5)]], ids=["at once", "with a stage between"])
def test_webdataset_splitters_after_sharded_samples_raise_argument_error_if_they_would_shard_again(
    between: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    stage = ShardedSamples(source(8))
    with pytest.raises(ArgumentError, match="shard data again") as told:
        list(wds.DataPipeline(stage, *between, wds.split_by_node))
    assert "split_by_node" in str(told.value)
    assert len(list(wds.DataPipeline(stage, *between, wds.split_by_worker))) == 4, "there are no workers"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    alone = ShardedSamples(source(8))
    assert len(list(wds.DataPipeline(alone, *between, wds.split_by_node))) == 8, "there are no ranks"
    workers = DataLoader(wds.DataPipeline(alone, *between, wds.split_by_worker), batch_size=None, num_workers=2)
    with pytest.raises(Exception, match="shard data again"):
        list(workers)


def test_a_stage_state_of_another_seed_or_an_unknown_position_raises_an_error() -> None:
    stage = ShardedSamples(source(10), 2, topology=rf.Topology())
    with pytest.raises(StateError, match=r"set_epoch\(\) not called"):
        stage.state_dict(1)
    stage.set_epoch(0)
    with pytest.raises(StateError, match="seed was 0, is 1"):
        ShardedSamples(source(10), 2, seed=1).load_state_dict(stage.state_dict(1))
    unbatched = ShardedSamples(source(10), topology=rf.Topology())
    unbatched.set_epoch(0)
    with pytest.raises(StateError, match="batch_size=None"):
        unbatched.state_dict(1)
    with pytest.raises(PlanError, match="no such step"):
        stage.state_dict(6)


def test_num_batches_is_known_before_iterating_and_raises_plan_error_without_batch_size() -> None:
    assert ShardedSamples(source(10), 2, topology=rf.Topology(rank=1, world_size=2)).num_batches() == 3
    with pytest.raises(PlanError, match="batch_size"):
        ShardedSamples(source(10), topology=rf.Topology()).num_batches()


def test_a_pickled_pipeline_keeps_the_rank_detected_in_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = ShardedSamples(source(10))
    with monkeypatch.context() as parent:
        parent.setenv("RANK", "1")
        parent.setenv("WORLD_SIZE", "2")
        sent = pickle.dumps(wds.DataPipeline(stage, wds.to_tuple("__key__")))
    assert [key for (key,) in pickle.loads(sent)] == [f"{i:04d}" for i in range(1, 10, 2)]


def test_resampled_stage_divides_one_set_of_draws_between_ranks() -> None:
    data = source(10)
    stages = [Resampled(data, 3, epoch_size=26, seed=1, topology=rank) for rank in ranks(2)]
    for epoch in range(2):
        read = []
        for stage in stages:
            stage.set_epoch(epoch)
            assert stage.num_batches() == 5
            read += [int(sample_id) for sample_id in keys(stage)]
        assert Counter(read) == Counter(stages[0].plan.sample_ids(epoch, range(26)).tolist())


def test_resampled_stage_without_replacement_reads_every_sample_equally_often() -> None:
    data = source(10)
    read = [
        key for rank in ranks(3) for key in keys(Resampled(data, epoch_size=30, replacement=False, topology=rank))
    ]
    assert Counter(read) == Counter({f"{i:04d}": 3 for i in range(10)})


def loaded(stage: ShardedSamples, **options: Any) -> DataLoader[Any]:
    behind = (wds.to_tuple("__key__"), wds.batched(4))
    return DataLoader(wds.DataPipeline(stage, *behind), batch_size=None, num_workers=2, **options)


def epoch_of(loader: DataLoader[Any]) -> list[Keys]:
    return [list(names) for (names,) in loader]


@pytest.mark.parametrize("start", ["fork", slow("spawn")])
def test_persistent_workers_follow_set_epoch_even_after_a_break(start: str) -> None:
    stage = ShardedSamples(source(50), 4, shuffle=True, topology=rf.Topology())
    loader = loaded(stage, persistent_workers=True, multiprocessing_context=start)
    for epoch in (0, 2):
        stage.set_epoch(epoch)
        wanted = [[f"{sample_id:04d}" for sample_id in batch] for batch in stage.share()]
        next(iter(loader))
        assert epoch_of(loader) == wanted
    stage.load_state_dict(stage.state_dict(delivered_steps=2))
    assert epoch_of(loader) == wanted[2:]


def test_persistent_workers_advance_to_the_next_epoch_without_set_epoch() -> None:
    stage = ShardedSamples(source(50), 4, shuffle=True, topology=rf.Topology())
    loader = loaded(stage, persistent_workers=True, multiprocessing_context="fork")
    alone = ShardedSamples(source(50), 4, shuffle=True, topology=rf.Topology())
    for _ in range(3):
        wanted = [f"{sample_id:04d}" for batch in alone.share() for sample_id in batch]
        keys(alone)
        assert list(chain.from_iterable(epoch_of(loader))) == wanted


@pytest.mark.parametrize("start", ["fork", soak("spawn")])
def test_non_persistent_workers_start_the_next_epoch_unless_set_epoch_is_called(start: str) -> None:
    stage = ShardedSamples(source(50), 4, shuffle=True, topology=rf.Topology())
    loader = loaded(stage, multiprocessing_context=start)
    epochs = [epoch_of(loader) for _ in range(3)]
    assert stage.epoch == 3
    assert len({tuple(map(tuple, epoch)) for epoch in epochs}) == 3
    for epoch in (1, 0):
        stage.set_epoch(epoch)
        assert epoch_of(loader) == epochs[epoch] == epoch_of(loader)


def test_set_epoch_on_a_stage_does_not_change_a_deep_copy_of_it() -> None:
    stage = ShardedSamples(source(20), shuffle=True, topology=rf.Topology())
    other = copy.deepcopy(stage)
    stage.set_epoch(3)
    assert (stage.epoch, other.epoch) == (3, 0)


def set_and_say(stage: ShardedSamples, said: Any) -> None:
    stage.set_epoch(3)
    said.put(stage.epoch)


@pytest.mark.parametrize("start", ["fork", slow("spawn")])
def test_set_epoch_in_a_child_process_does_not_change_the_stage_of_the_parent(start: str) -> None:
    stage = ShardedSamples(source(20), shuffle=True)
    context = torch.multiprocessing.get_context(start)
    said = context.SimpleQueue()
    rank = context.Process(target=set_and_say, args=(stage, said))
    rank.start()
    rank.join(60)
    assert rank.exitcode == 0
    assert (said.get(), stage.epoch) == (3, 0)
