"""A checkpoint after any step resumes on any topology, nothing lost or repeated, or is refused with a reason."""

from __future__ import annotations

import collections
import json
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.loading.feeds import (
    ENGINES,
    NAMES,
    Memory,
    assert_once,
    delivered,
    feed,
    loaded,
    same,
    state_after,
    steps_of,
    take,
)

from rankfeed.diagnostics import verify_run
from rankfeed.errors import StateError
from rankfeed.loading import Loader
from rankfeed.loading.state import encode_state
from rankfeed.plan import Cursor, Plan
from rankfeed.topology import Topology


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_a_loader_state_saved_after_any_step_resumes_with_the_next_batch(engine: dict[str, Any]) -> None:
    plain = feed(1, 2, size=37)
    expected, following = list(plain), list(plain)
    loader = feed(1, 2, size=37, prefetch_factor=4, **engine)
    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())
    assert states[-1] == loader.state_dict() or loader.epoch == 1
    for step, state in enumerate(states):
        assert state["steps"] == step, "batches that were built ahead do not count"
        assert state["position"] == 8 * step or step > 3
        assert same(list(loaded(state, 1, 2, size=37, **engine)), expected[step:] or following)


@given(data=st.data())
def test_a_chain_of_resumes_on_changing_topologies_delivers_each_sample_once(data: st.DataObject) -> None:
    size = data.draw(st.integers(5, 120), "samples")
    shuffle = data.draw(st.sampled_from(["none", "global", "window"]), "shuffle")
    state, ids = None, []
    for _ in range(data.draw(st.integers(1, 6), "legs")):
        world_size, batch_size = data.draw(st.integers(1, 5), "ranks"), data.draw(st.integers(1, 6), "batch")
        workers = data.draw(st.sampled_from([0, 0, 1, 2]), "workers")
        options: dict[str, Any] = {"shuffle": shuffle, "window": 11, "num_workers": workers}
        loaders = [feed(rank, world_size, size, batch_size, **options) for rank in range(world_size)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        steps = steps_of(loaders, data.draw(st.integers(0, 9), "steps"))
        ids += [sample_id for step in steps for sample_id in delivered(step)]
        states = [json.dumps(loader.state_dict()) for loader in loaders]
        assert len(set(states)) == 1
        assert len(states[0]) < 1024
        state = json.loads(states[0])
        if state["epoch"] or state["position"] == size:
            break
    else:
        rest = loaded(state, size=size, shuffle=shuffle, window=11)
        ids += [sample_id for step in steps_of([rest]) for sample_id in delivered(step)]
    assert_once(ids, size)


@pytest.mark.parametrize("old", [1, 2, 3])
@pytest.mark.parametrize("new", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_state_saved_after_any_step_resumes_on_other_ranks_and_batch_sizes(
    old: int, new: int, batch_size: int
) -> None:
    size = 31
    total = len(feed(0, old, size=size))
    for stop in range(total + 1):
        before = [feed(rank, old, size=size) for rank in range(old)]
        ids = [sample_id for step in steps_of(before, stop) for sample_id in delivered(step)]
        (state,) = {json.dumps(loader.state_dict()) for loader in before}
        after = [feed(rank, new, size=size, batch_size=batch_size) for rank in range(new)]
        for loader in after:
            loader.load_state_dict(json.loads(state))
        is_over = stop == total
        ids = [] if is_over else ids
        ids += [sample_id for step in steps_of(after) for sample_id in delivered(step)]
        assert_once(ids, size)
        assert {loader.epoch for loader in after} == {1 + is_over}


def test_fewer_samples_left_than_ranks_give_one_step_with_padding_rows_masked() -> None:
    state = encode_state(Cursor(0, 48, 12), feed().plan.describe(), Memory(50).fingerprint)
    (step,) = steps_of([loaded(state, rank, 4) for rank in range(4)])
    assert len(delivered(step)) == 2
    assert sorted(len(batch["id"]) for batch in step) == [1, 1, 1, 1]
    assert sorted(delivered(step)) == sorted(delivered(list(loaded(state))))


def end_of_epoch(world_size: int = 1, **options: Any) -> dict[str, Any]:
    """A state saved in the loop body after the last batch of epoch 0."""
    for loader in (feed(rank, world_size, **options) for rank in range(world_size)):
        for _ in loader:
            state = loader.state_dict()
    assert state["steps"] == len(feed(0, world_size, **options))
    return state


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
def test_a_loader_resumed_from_the_end_of_an_epoch_delivers_the_next_epoch(
    engine: dict[str, Any], tail: str
) -> None:
    plain = feed(tail=tail)
    epochs = [list(plain) for _ in range(3)]
    state = end_of_epoch(tail=tail)
    resumed = loaded(state, tail=tail, **engine)
    assert (resumed.epoch, len(resumed)) == (1, len(epochs[1]))
    assert resumed.state_dict() == state, "nothing was delivered since"
    for epoch in (1, 2):
        assert resumed.epoch == epoch
        assert same(list(resumed), epochs[epoch])
    assert resumed.epoch == 3


@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
@pytest.mark.parametrize("old", [1, 3])
@pytest.mark.parametrize("new", [1, 2, 4])
def test_a_state_saved_at_the_end_of_an_epoch_resumes_with_the_next_epoch_on_other_ranks(
    tail: str, old: int, new: int
) -> None:
    state = end_of_epoch(old, size=31, tail=tail)
    plain = [feed(rank, new, size=31, batch_size=5, tail=tail) for rank in range(new)]
    for loader in plain:
        loader.set_epoch(1)
    expected = steps_of(plain)
    resumed = [loaded(state, rank, new, size=31, batch_size=5, tail=tail) for rank in range(new)]
    if 31 - state["position"] >= 5 * new:  # of what was dropped, these ranks have another step
        assert {loader.epoch for loader in resumed} == {0}
        return
    assert {loader.epoch for loader in resumed} == {1}
    assert {len(loader) for loader in resumed} == {len(expected)}
    assert same(steps_of(resumed), expected)


def test_a_loop_with_set_epoch_after_resuming_at_an_epoch_end_gets_each_epoch_once() -> None:
    plain = feed()
    epochs = [list(plain) for _ in range(3)]
    for first, is_asked in ((0, False), (0, True), (1, False), (1, True)):
        resumed = loaded(end_of_epoch())
        assert not is_asked or resumed.epoch == 1
        passes = []
        for epoch in range(first, 3):
            resumed.set_epoch(epoch)
            assert resumed.epoch == epoch
            passes.append(list(resumed))
        # The epoch that has ended is named: its end is kept, and nothing is left of it.
        assert same(passes, [[], *epochs[1:]][first:])
    other = loaded(end_of_epoch())
    other.set_epoch(2)
    assert same(list(other), epochs[2])


def test_set_epoch_after_iter_of_a_loader_resumed_at_an_epoch_end_applies_to_that_iterator() -> None:
    resumed = loaded(end_of_epoch())
    batches = iter(resumed)
    resumed.set_epoch(0)
    assert list(batches) == []
    assert resumed.epoch == 1
    again = loaded(end_of_epoch())
    batches = iter(again)
    assert (again.epoch, len(again)) == (1, 13)
    next(batches)
    assert again.state_dict() == {**again.state_dict(), "epoch": 1, "steps": 1, "position": 4}
    assert_once(delivered(list(again)), 50), "after a break the same epoch begins again"
    assert again.epoch == 2


def test_a_state_of_an_epoch_with_zero_steps_resumes_in_the_same_epoch() -> None:
    short = feed(size=3, tail="drop")
    assert loaded(short.state_dict(), size=3, tail="drop").epoch == 0


def test_stats_and_ledger_name_the_next_epoch_after_resuming_at_an_epoch_end(tmp_path: Path) -> None:
    list(feed(audit=tmp_path))
    resumed = loaded(end_of_epoch(), audit=tmp_path)
    next(iter(resumed))
    assert (resumed.stats()["epoch"], resumed.stats()["epoch_step"], resumed.stats()["epoch_steps"]) == (1, 1, 13)
    list(resumed)
    verdict = verify_run(tmp_path)
    assert verdict.sound
    assert [epoch.epoch for epoch in verdict.loaders[0].epochs] == [0, 1]


def test_loading_a_state_again_after_some_batches_resets_the_loader_to_it() -> None:
    state = state_after(2)
    loader = loaded(state)
    take(iter(loader), 3)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert same(list(loader), list(feed())[2:])


def test_a_loaded_state_is_returned_unchanged_for_a_source_fingerprint_with_a_hyphen() -> None:
    source = Memory(50, mark="-v1")
    first = Loader(source, 4, topology=Topology())
    next(iter(first))
    state = first.state_dict()
    second = Loader(source, 4, topology=Topology())
    second.load_state_dict(state)
    assert second.state_dict() == state


def test_state_dict_between_iter_and_the_first_batch_is_the_unchanged_position() -> None:
    loader = feed()
    fresh = loader.state_dict()
    iterator = iter(loader)
    assert loader.state_dict() == fresh
    take(iterator, 2)
    resumed = loaded(loader.state_dict())
    waiting = iter(resumed)
    assert resumed.state_dict() == loader.state_dict()
    assert same(list(waiting), list(feed())[2:])


def test_iterating_a_resumed_loader_again_after_a_break_restarts_the_epoch() -> None:
    loader = loaded(state_after(4))
    take(iter(loader), 1)
    again = iter(loader)
    assert loader.state_dict()["position"] == 0
    assert_once(delivered(list(again)), 50)


def test_a_loader_resumed_in_a_later_epoch_uses_the_order_of_that_epoch() -> None:
    whole = feed()
    whole.set_epoch(3)
    assert same(list(loaded(state_after(5, epoch=3))), list(whole)[5:])


def test_lanes_are_restored_from_the_state_and_a_conflicting_option_raises_state_error() -> None:
    options: dict[str, Any] = {"shuffle": "window", "lanes": 5, "window": 10}
    state = state_after(4, **options)
    loader = loaded(state, shuffle="window", window=10)
    assert loader.state_dict() == state
    assert same(list(loader), list(feed(**options))[4:])
    with pytest.raises(StateError, match="lanes was 5, is 7"):
        loaded(state, shuffle="window", window=10, lanes=7)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "options", [{"shuffle": "window", "window": 9, "lanes": 6}, {"shuffle": "global"}], ids=str
)
def test_a_loaded_state_determines_the_shuffle_and_its_order_version(
    options: dict[str, Any], version: int
) -> None:
    plan = Plan(Memory(50).blocks, seed=3, **options).with_order(version)
    whole, state = feed(shuffle=False, plan=plan), state_after(4, shuffle=False, plan=plan)
    expected = [list(whole) for _ in range(3)]
    loader = loaded(state, shuffle=True)
    assert loader.state_dict() == state
    assert same([list(loader) for _ in range(3)], [expected[0][4:], *expected[1:]])  # later epochs keep it
    # Of a plan of one's own, the version is that of the state.
    loader = loaded(state, shuffle=False, plan=plan.with_order(3 - version))
    assert same(list(loader), expected[0][4:])


WINDOWS: dict[str, Any] = {"shuffle": "window", "window": 9, "lanes": 6}
# options of the loader that saved, of the loader that resumes, what the error names
OTHER_PLANS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"seed": 4}, "seed was 3, is 4"),
    ({}, {"shuffle": "none"}, "shuffle was global, is none"),
    ({}, {"shuffle": "window"}, "shuffle was global, is window"),
    ({}, {"size": 51}, "samples was 50, is 51"),
    ({}, {"shuffle": False, "plan": Plan(50, seed=8)}, "seed was 3, is 8"),
    (WINDOWS, {"shuffle": True, "window": 10}, "window was 9, is 10"),
    (WINDOWS, {"shuffle": True, "lanes": 7}, "lanes was 6, is 7"),
    (WINDOWS, {"shuffle": "window"}, "window was 9, is 65536"),
    (WINDOWS, {"shuffle": "global"}, "shuffle was window, is global"),
    (WINDOWS, {"shuffle": True, "seed": 4}, "seed was 3, is 4"),
    (
        WINDOWS,
        {**WINDOWS, "window": 16, "lanes": 4},
        r"window was 9, is 16(?!.*group)[^:]*: set window=9, lanes=6, as",
    ),
    ({"shuffle": False}, {"shuffle": True}, "shuffle was none, is global"),
    ({"shuffle": False}, {"shuffle": True, "seed": 4}, "set shuffle='none', seed=3, as"),
]


@pytest.mark.parametrize(("saved", "options", "reason"), OTHER_PLANS, ids=str)
def test_loading_a_state_of_another_plan_raises_state_error(
    saved: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(StateError, match=reason):
        loaded(feed(**saved).state_dict(), **options)


@pytest.mark.parametrize("order", [0, 3, -1, "2", 2**62])
def test_loading_a_state_of_an_unknown_order_version_raises_state_error_and_changes_nothing(order: Any) -> None:
    donor = feed(shuffle="window", window=9)
    state = donor.state_dict()
    state["plan"]["order"] = order
    loader = feed(shuffle="window", window=9)
    with pytest.raises(StateError, match="unknown version of the windowed order"):
        loader.load_state_dict(state)
    assert same(list(loader), list(donor))


def test_loading_a_state_with_an_invalid_plan_raises_state_error_naming_the_value() -> None:
    saved = feed(shuffle="window").state_dict()
    saved["plan"]["lanes"] = -3
    with pytest.raises(StateError, match="invalid lanes: -3"):
        feed(shuffle=True).load_state_dict(saved)


def test_loading_a_state_of_other_data_raises_state_error_naming_the_difference() -> None:
    for source, options, reason in (
        (Memory(50, mark="ff"), {"shuffle": "global"}, "fingerprint was 32, is 32ff"),
        (Memory(50, block=10), {"shuffle": "window", "window": 20}, "blocks was 8, is 5"),
    ):
        loader: Any = Loader(source, 4, seed=3, topology=Topology(), **options)
        with pytest.raises(StateError, match=reason):
            loader.load_state_dict(feed(**options).state_dict())


GOOD = feed().state_dict()


@pytest.mark.parametrize(
    "bad",
    [
        *(None, "state", b"state", [], [1, 2], {}, 7, {"epoch": 1}),
        {"_snapshot": {"_snapshot_step": 3}, "_num_workers": 2},
        *({**GOOD, "epoch": epoch} for epoch in (-1, 1.5, "1", True)),
        *({**GOOD, "position": position} for position in (-3, 51, 2**80, None)),
        *({**GOOD, "plan": plan} for plan in ({}, None)),
        *({**GOOD, "plan": {**GOOD["plan"], "lanes": lanes}} for lanes in (0, "1", 2**70)),
        {**GOOD, "plan": {**GOOD["plan"], "seed": [1]}},
        *({**GOOD, "rankfeed": version} for version in (2, "1")),
        *({**GOOD, "more": 1}, {**GOOD, "steps": -1}, {**GOOD, "source": 12}),
        {**GOOD, "rankfeed": 2, "invented_later": {}},
    ],
    ids=lambda bad: repr(bad)[:60],
)
def test_loading_an_invalid_state_raises_state_error_and_keeps_the_position(bad: Any) -> None:
    before = state_after(2)
    loader = loaded(before)
    with pytest.raises(StateError):
        loader.load_state_dict(bad)
    assert loader.state_dict() == before


def test_loading_a_state_of_another_format_version_raises_state_error() -> None:
    with pytest.raises(StateError, match="another version"):
        feed().load_state_dict({**GOOD, "rankfeed": 2, "invented_later": {}})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*GOOD, *GOOD["plan"], "x"]), inner),
    ).flatmap(lambda value: st.sampled_from([value, *({**GOOD, name: value} for name in GOOD)]))
)
def test_loading_a_random_value_either_raises_state_error_or_succeeds(garbage: Any) -> None:
    loader = feed()
    # Any other exception fails the test.
    with suppress(StateError):
        loader.load_state_dict(garbage)
    assert 0 <= loader.state_dict()["position"] <= 50


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, types.MappingProxyType])
def test_load_state_dict_accepts_any_mapping_type(kind: Any) -> None:
    loader = feed()
    loader.load_state_dict(kind(GOOD))
    assert loader.state_dict() == GOOD


def test_a_returned_state_dict_is_independent_of_later_steps() -> None:
    loader = feed()
    iterator = iter(loader)
    take(iterator, 1)
    state = loader.state_dict()
    copy = json.loads(json.dumps(state))
    take(iterator, 3)
    assert state == copy
    state["plan"]["seed"] = 99
    assert loader.state_dict()["plan"]["seed"] == 3


def test_the_state_of_a_trillion_sample_epoch_is_below_1_kb() -> None:
    plan = Plan(10**12, shuffle="window", seed=2**62, lanes=64)
    state = encode_state(Cursor(10**9, 10**12, 10**12), plan.describe(), "f" * 64)
    assert len(json.dumps(state)) < 1024
