"""A Loader of a stream, alone or on ranks that know the end by themselves."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import os
import pickle
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.loading.feeds import ENGINES, Pair
from torch.utils.data import DataLoader

import rankfeed as rf
from rankfeed.errors import ArgumentError, PlanError, StateError, StreamError, TopologyError, TransformError
from rankfeed.loading.streams.stream import samples_fingerprint


def numbers(size: int) -> Iterator[dict[str, Any]]:
    return ({"x": number} for number in range(size))


def place(rank: int, ranks: int) -> rf.Topology:
    return rf.Topology(rank=rank, world_size=ranks)


def feed(size: int, rank: int = 0, ranks: int = 1, batch_size: int = 2, **options: Any) -> Any:
    stream = rf.from_iterable(partial(numbers, size))
    return rf.Loader(stream, batch_size, topology=place(rank, ranks), **options)


def counted(batch: dict[str, Any], name: str = "x") -> list[int]:
    rows = batch[name] if "valid" not in batch else batch[name][batch["valid"]]
    return rows.tolist()  # type: ignore[no-any-return]


def content(value: Any) -> Any:
    """What is in a batch, to be compared; a pickle of a tensor has addresses in it."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: content(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [content(each) for each in value]
    return value


def drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "draw": rng.random(), "torch": torch.rand(2), "y": np.arange(sample["x"] % 4)}


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 5), st.sampled_from(["even", "drop", "pad"]))
def test_a_stream_gives_the_same_global_batches_as_a_map_style_dataset_of_its_samples(
    size: int, batch_size: int, ranks: int, tail: Any
) -> None:
    if size < ranks:
        tail = "pad"
    listed, streamed = [], []
    for rank in range(ranks):
        source = rf.from_dataset([{"x": number} for number in range(size)])
        given: dict[str, Any] = {"tail": tail, "topology": place(rank, ranks), "id_column": "id"}
        listed.append(list(rf.Loader(source, batch_size, **given)))
        streamed.append(list(feed(size, rank, ranks, batch_size, tail=tail, id_column="id")))
    assert {len(each) for each in streamed} == {len(listed[0])}
    for ours, theirs in zip(zip(*streamed, strict=True), zip(*listed, strict=True), strict=True):
        rows = [sorted(itertools.chain(*map(counted, each))) for each in (ours, theirs)]
        assert rows[0] == rows[1]
        assert sorted(map(len, map(counted, ours))) == sorted(map(len, map(counted, theirs)))
        assert [len(batch["x"]) for batch in ours] == [batch_size] * ranks or tail != "pad"
        assert all(counted(batch) == counted(batch, "id") for batch in ours)
        assert {tuple(batch) for batch in ours} == {tuple(theirs[0])}


def test_a_stream_gives_the_same_batches_with_every_kind_and_number_of_workers() -> None:
    found = []
    for engine in ENGINES:
        options: dict[str, Any] = {"id_column": "id", "seed": 5, **engine}
        if engine.get("worker_kind") == "process" or not engine["num_workers"]:
            options["transform"] = drawn
            loader = feed(37, 1, 2, 3, **options)
            found.append([content(list(loader)) for _ in range(2)])
            assert loader.epoch == 2
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "epochs draw the same"
    plain = [list(map(counted, feed(37, 1, 2, 3, **engine))) for engine in ENGINES]
    assert plain.count(plain[0]) == len(ENGINES)


def test_a_stream_is_read_in_order_and_only_as_far_ahead_as_the_prefetch_limit() -> None:
    for engine in ENGINES:
        read = []

        def stream(read: list[int] = read) -> Iterator[dict[str, int]]:
            for number in itertools.count():
                read.append(number)
                yield {"x": number}

        loader = rf.Loader(rf.from_iterable(stream), 4, tail="drop", **engine)
        for batch in itertools.islice(iter(loader), 3):
            assert len(batch["x"]) == 4
        ahead = engine.get("num_workers", 0) * engine.get("prefetch_factor", 2)
        assert read == list(range(len(read)))
        assert len(read) <= 4 * (3 + ahead + 2)


def test_a_stream_epoch_resumes_after_any_step_on_any_number_of_ranks() -> None:
    for (size, engine), tail in itertools.product(((7, ENGINES[1]), (16, {})), ("even", "drop", "pad")):
        for before, after in itertools.product((1, 2, 3), (1, 2, 3)):
            loaders = [feed(size, rank, before, 2, tail=tail, **engine) for rank in range(before)]
            iterations = [iter(loader) for loader in loaders]
            seen: list[int] = []
            while True:
                states = [json.dumps(loader.state_dict()) for loader in loaders]
                assert len(set(states)) == 1
                assert len(states[0]) < 1024
                rest = list(seen)
                position = json.loads(states[0])["position"]
                left = size - position
                is_over = position > 0 and (left < 3 * after if tail == "drop" else left == 0)
                for rank in range(after):
                    other = feed(size, rank, after, 3, tail=tail)
                    other.load_state_dict(json.loads(states[0]))
                    for batch in other:
                        rest += counted(batch)
                    assert other.epoch == 1 + is_over
                assert max(Counter(rest).values(), default=0) <= 1 + is_over
                if tail != "drop":
                    assert Counter(rest) == Counter([*range(size)] * (1 + is_over))
                batches = [next(iterator, None) for iterator in iterations]
                if None in batches:
                    assert batches == [None] * before
                    break
                for batch in batches:
                    seen += counted(batch)


#: Streams of 40 samples in another order each time they are opened.
UNSEEDED: dict[str, Any] = {
    "shuffled": lambda: ({"x": x} for x in random.sample(range(40), 40)),
    "keyed": lambda: ({"__key__": str(x), "x": x} for x in random.sample(range(40), 40)),
    "arrays": lambda: ({"x": np.int64(x), "y": np.ones(3)} for x in random.sample(range(40), 40)),
    "dataloader": lambda: iter(DataLoader([{"x": x} for x in range(40)], batch_size=None, shuffle=True)),
}


@pytest.mark.parametrize("stream", UNSEEDED)
@pytest.mark.parametrize("engine", ENGINES)
def test_resuming_a_stream_whose_order_changed_raises_state_error(stream: str, engine: dict[str, Any]) -> None:
    def loader(rank: int, ranks: int, batch_size: int) -> Any:
        return rf.Loader(rf.from_iterable(UNSEEDED[stream]), batch_size, topology=place(rank, ranks), **engine)

    first = loader(0, 1, 4)
    list(itertools.islice(first, 3))
    state = json.loads(json.dumps(first.state_dict()))
    for rank, ranks in ((0, 1), (1, 3)):
        resumed = loader(rank, ranks, 3)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        with pytest.raises(StateError, match=r"in another order[\s\S]*position 12[\s\S]*seed"):
            next(iter(resumed))
    earlier = loader(0, 1, 4)  # a state without a fingerprint, as earlier versions wrote it
    earlier.load_state_dict({name: value for name, value in state.items() if name != "last"})
    assert sum(len(batch["x"]) for batch in earlier) == 28
    for _ in first:
        end = first.state_dict()
    ended = loader(0, 1, 4)
    ended.load_state_dict(end)  # nothing is left, so the order does not matter
    assert Counter(x for batch in ended for x in batch["x"].tolist()) == Counter(range(40))
    assert ended.epoch == 2


def test_streams_with_random_sample_values_and_stable_keys_resume() -> None:
    def stream() -> Iterator[dict[str, Any]]:
        for i in range(20):
            yield {"__key__": str(i), "x": i, "noise": random.random(), "text": str(random.random())}

    first: Any = rf.Loader(rf.from_iterable(stream), 4, topology=place(0, 1))
    next(iter(first))
    resumed: Any = rf.Loader(rf.from_iterable(stream), 4, topology=place(0, 1))
    resumed.load_state_dict(first.state_dict())
    assert [x for batch in resumed for x in batch["x"].tolist()] == [*range(4, 20)]


class Stateful:
    """Says where it is, and goes there."""

    def __init__(self, size: int, log: list[str]) -> None:
        self.size, self.at, self.log, self.loaded = size, 0, log, 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        self.at, self.loaded = self.loaded, 0
        self.log.append(f"begun at {self.at}")
        while self.at < self.size:
            self.at += 1
            yield {"x": self.at - 1}

    def state_dict(self) -> dict[str, int]:
        return {"line": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["line"]


class StatefulIterator(Stateful):
    """The same of an iterator."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> dict[str, int]:
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        return {"x": self.at - 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["line"]
        self.log.append(f"begun at {self.at}")


class LateStream:
    """A stream that takes a loaded state in with its first sample, as Hugging Face datasets 5.2 do."""

    def __init__(self) -> None:
        self._loaded, self._at = 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        begin, self._loaded = self._loaded, 0
        for number in range(begin, 60):
            self._at = number + 1
            yield {"x": number}

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._loaded, self._at = state["at"], 0


@pytest.mark.parametrize("tail", ["even", "pad"])
@pytest.mark.parametrize("engine", [{}, {"num_workers": 2}])
def test_a_stream_that_applies_its_loaded_state_late_can_be_resumed_repeatedly_without_loss(
    tail: Any, engine: dict[str, Any]
) -> None:
    for sizes in ((16, 44, 5), (16, 30, 3), (7, 60, 4), (10, 20, 20)):
        state, rows = None, Counter[int]()
        for number, size in enumerate(sizes):
            loader: Any = rf.Loader(rf.from_iterable(LateStream), size, tail=tail, topology=place(0, 1), **engine)
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                if loader.epoch:  # that began with the state of the end
                    break
                valid = batch["valid"] if tail == "pad" else slice(None)
                rows.update(batch["x"][valid].tolist())
                state = json.loads(json.dumps(loader.state_dict()))
                if number < len(sizes) - 1:
                    break
            if state["position"] == 60:
                break
        assert rows == Counter(range(60)), sizes


@pytest.mark.parametrize("kind", [Stateful, StatefulIterator])
@pytest.mark.parametrize("bare", [False, True])
def test_a_stream_with_its_own_state_dict_resumes_from_that_state(kind: type[Stateful], bare: bool) -> None:
    if bare and kind is StatefulIterator:
        return
    for size, step in ((20, 1), (20, 3), (20, 5), (17, 3), (17, 4)):
        log: list[str] = []
        seen: list[int] = []
        states = []
        for rank in range(2):
            stream = kind(size, log) if bare else partial(kind, size, log)
            loader = rf.Loader(rf.from_iterable(stream), 2, topology=place(rank, 2))
            for batch in itertools.islice(iter(loader), step):
                seen += counted(batch)
            states.append(loader.state_dict())
        assert states[0] == states[1]
        assert states[0]["position"] - 4 < states[0]["at"] <= states[0]["position"]
        log.clear()
        for rank in range(3):
            stream = kind(size, log) if bare else partial(kind, size, log)
            other: Any = rf.Loader(rf.from_iterable(stream), 1, topology=place(rank, 3))
            other.load_state_dict(json.loads(json.dumps(states[0])))
            for batch in other:
                seen += counted(batch)
            again = [number for batch in other for number in counted(batch)]
            assert again[0] == rank, "the epoch after it begins at its start"
        # At the end of an epoch the next one is delivered.
        assert Counter(seen) == Counter([*range(size)] * (1 + (states[0]["position"] == size)))
        assert f"begun at {states[0]['at']}" in log


@pytest.mark.parametrize("kind", ["plain", "start", "state", "own shard"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_stream_loader_resumed_from_the_end_of_an_epoch_delivers_the_next_epoch(
    kind: str, engine: dict[str, Any]
) -> None:
    def stream(epoch: int) -> Iterator[dict[str, int]]:
        return ({"x": 100 * epoch + number} for number in range(17))

    factories: dict[str, Any] = {
        "plain": stream,
        "start": lambda epoch, start: itertools.islice(stream(epoch), start, None),
        "state": lambda epoch: Stateful(17 + epoch, []),
        "own shard": lambda epoch, shard: stream(epoch),
    }

    def loader() -> rf.Loader:
        tail: Any = "pad" if kind == "own shard" else "even"
        return rf.Loader(rf.from_iterable(factories[kind]), 5, tail=tail, topology=place(0, 1), **engine)

    first = loader()
    for _ in first:
        state = first.state_dict()
    expected = [[counted(batch) for batch in first] for _ in range(2)]
    for set_first in (None, 0, 1):
        resumed = loader()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        passes = []
        for epoch in range(set_first or 0, 3):
            if set_first is not None:
                resumed.set_epoch(epoch)
            passes.append([counted(batch) for batch in resumed])
        # Where the epoch that has ended is named, its end is kept.
        assert passes[bool(set_first == 0) :][:2] == expected
        assert set_first != 0 or passes[0] == []
        assert resumed.epoch == 4 - (set_first is not None)


def test_a_stream_factory_receives_the_epoch_and_the_start_position_on_resume() -> None:
    asked = []

    def stream(epoch: int, start: int = 0) -> Iterator[dict[str, int]]:
        asked.append((epoch, start))
        return ({"x": number} for number in range(start, 12))

    loader = rf.Loader(rf.from_iterable(stream), 2)
    loader.set_epoch(4)
    next(it := iter(loader))
    next(it)
    other = rf.Loader(rf.from_iterable(stream), 3)
    other.load_state_dict(loader.state_dict())
    assert [counted(batch) for batch in other] == [[4, 5, 6], [7, 8, 9], [10, 11]]
    assert asked == [(4, 0), (4, 4)]
    assert [number for batch in other for number in counted(batch)] == list(range(12))
    assert asked[-1] == (5, 0)


class Shards:
    """Opens something each time it is iterated, and has a state that costs something."""

    opened = asked = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.opened += 1
        return numbers(6)

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the factory continues without being asked")


def test_a_stream_is_opened_once_and_its_unused_state_dict_is_never_called() -> None:
    for tail in ("drop", "pad"):
        mine, told = Shards(), Shards()
        by_shard = rf.from_iterable(lambda shard, mine=mine: mine)
        by_start = rf.from_iterable(lambda start, told=told: told)
        for stream, made in ((by_shard, mine), (by_start, told)):
            loader: Any = rf.Loader(stream, 2, tail=tail)
            assert len(list(loader)) == 3
            assert (made.opened, made.asked) == (1, 0)


def test_a_stream_loader_counts_epochs_and_accepts_set_epoch_through_its_batch_sampler() -> None:
    loader = feed(5)
    assert [number for batch in loader for number in counted(batch)] == list(range(5))
    assert loader.epoch == 1
    loader.batch_sampler.sampler.set_epoch(3)
    assert loader.epoch == 3
    for _ in loader:
        break
    assert loader.epoch == 3
    assert [number for batch in loader for number in counted(batch)] == list(range(5)), "restarted"
    assert loader.state_dict()["position"] == 0
    with pytest.raises(TypeError, match="has no len"):
        len(loader)
    assert not hasattr(loader, "sampler")
    assert not hasattr(loader, "plan")


def test_two_concurrent_iterators_over_a_stream_loader_each_deliver_all_samples() -> None:
    for engine in ENGINES:
        loader = feed(9, **engine)
        first, second = iter(loader), iter(loader)
        pairs = list(zip(first, second, strict=True))
        assert len(pairs) == 5
        assert all(torch.equal(one["x"], other["x"]) for one, other in pairs)


def test_an_iterable_is_read_again_each_epoch_and_a_second_pass_over_an_iterator_raises_stream_error() -> None:
    again = rf.Loader(rf.from_iterable([{"x": 1}, {"x": 2}]))
    assert len(list(again)) == len(list(again)) == 2
    once = rf.Loader(rf.from_iterable(numbers(3)))
    assert len(list(once)) == 3
    with pytest.raises(StreamError, match=r"can be read only once.*\n.*\n.*\n.*opens the stream each time"):
        list(once)
    made = numbers(3)
    kept = rf.Loader(rf.from_iterable(lambda: made))
    next(iter(kept))
    with pytest.raises(StreamError, match=r"can be read only once"):
        next(iter(kept))
    outside = numbers(3)
    wrapped = rf.Loader(rf.from_iterable(lambda: (each for each in outside)))
    assert len(list(wrapped)) == 3
    with pytest.raises(StreamError, match="yielded nothing"):
        list(wrapped)


def test_stream_samples_are_collated_like_dataset_samples() -> None:
    samples = [(torch.ones(2) * number, number, (number / 2, "a")) for number in range(4)]
    pairs = [Pair(torch.ones(2) * number, number) for number in range(4)]
    tokens = [{"t": list(range(1 + number)), "name": f"n{number}", "raw": b"r"} for number in range(4)]
    for rows in (samples, pairs, tokens):
        ours, theirs = (list(rf.Loader(wrap(rows), 2)) for wrap in (rf.from_iterable, rf.from_dataset))
        assert content(ours) == content(theirs)
    nested = [{"x": number, "meta": {"y": [number, 1]}} for number in range(4)]
    (batch,) = rf.Loader(rf.from_iterable(nested), 4, tail="pad")
    assert content(batch["meta"]["y"]) == ("torch.int64", [[0, 1], [1, 1], [2, 1], [3, 1]])
    assert batch["meta"]["y_lengths"].tolist() == [2] * 4, "lists are ragged"
    assert batch["valid"].all()
    same = [{"t": [1, 2]}, {"t": [3, 4]}]
    (batch,) = rf.Loader(rf.from_iterable(same, ragged=["t"]), 2)
    assert batch["t_lengths"].tolist() == [2, 2]
    (batch,) = rf.Loader(rf.from_iterable(same), 2, collate_fn=lambda rows: {"rows": rows})
    assert batch == {"rows": same}
    pictures = [{"image": object(), "x": 1}]
    (batch,) = rf.Loader(rf.from_iterable(pictures), transform=lambda row: {"x": row["x"]})
    assert batch["x"].tolist() == [1]


def bad(size: int, at: int) -> Iterator[dict[str, int]]:
    for number in range(size):
        if number == at:
            raise ValueError("a broken shard")
        yield {"x": number}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_of_a_stream_or_transform_is_raised_after_all_batches_before_it(engine: dict[str, Any]) -> None:
    loader = rf.Loader(rf.from_iterable(partial(bad, 9, 5)), 2, tail="drop", **engine)
    seen: list[int] = []
    with pytest.raises(StreamError, match=r"(?s)the stream raised.*ValueError: a broken shard.*sample 5, epoch 0"):
        seen.extend(number for batch in loader for number in counted(batch))
    assert seen == [0, 1, 2, 3]
    failing = feed(9, transform=lambda row: {"x": row["x"] + 0 // (row["x"] - 5)}, tail="drop", **engine)
    seen.clear()
    with pytest.raises(TransformError, match=r"(?s)ZeroDivisionError.*sample 5, rank 0, epoch 0, step 2"):
        seen.extend(number for batch in failing for number in counted(batch))
    assert seen == [0, 1, 2, 3]


def dying(path: Path | None, sample: dict[str, int]) -> dict[str, int]:
    """Kills its process at a sample behind the first step; with a path, once."""
    if sample["x"] == 6 and (path is None or not path.exists()):
        if path is not None:
            path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_a_killed_worker_of_a_stream_loader_is_replaced_and_loses_no_sample(tmp_path: Path) -> None:
    options = {"num_workers": 2, "worker_kind": "process"}
    loader = feed(20, transform=partial(dying, tmp_path / "died"), **options)
    assert [number for batch in loader for number in counted(batch)] == list(range(20))
    assert (tmp_path / "died").exists()
    with pytest.raises(rf.errors.WorkerError, match="died 3 times"):
        list(feed(20, transform=partial(dying, None), **options))


def test_large_stream_samples_sent_to_and_from_worker_processes_do_not_deadlock() -> None:
    stream = rf.from_iterable(lambda: ({"x": number, "raw": bytes(1 << 18)} for number in range(24)))
    options: dict[str, Any] = {"num_workers": 2, "worker_kind": "process"}
    loader = rf.Loader(stream, 4, transform=lambda row: {"x": row["x"], "y": np.zeros(1 << 15)}, **options)
    assert [number for batch in loader for number in counted(batch)] == list(range(24))


def test_stream_samples_that_cannot_be_pickled_for_a_worker_process_raise_stream_error() -> None:
    tensors = [{"x": number, "y": torch.ones(3) * number} for number in range(9)]
    options: dict[str, Any] = {"num_workers": 2, "worker_kind": "process"}
    ours, theirs = (list(rf.Loader(rf.from_iterable(tensors), 2, **each)) for each in (options, {}))
    assert content(ours) == content(theirs)
    locks = [{"x": number, "lock": threading.Lock()} for number in range(3)]
    with pytest.raises(StreamError, match=r"(?s)cannot be sent to a worker process.*lock.*worker_kind='thread'"):
        list(rf.Loader(rf.from_iterable(locks), 1, transform=lambda sample: {"x": sample["x"]}, **options))


def test_breaking_out_of_a_stream_loader_closes_the_stream_and_ends_its_threads() -> None:
    before = threading.active_count()
    for engine in ENGINES:
        closed = []

        def stream(closed: list[bool] = closed) -> Iterator[dict[str, int]]:
            try:
                yield from numbers(1000)
            finally:
                closed.append(True)

        loader = rf.Loader(rf.from_iterable(stream), 2, **engine)
        for _ in loader:
            break
        assert closed == [True]
        del loader
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_loader_options_that_a_stream_does_not_support_raise_errors_with_a_remedy() -> None:
    stream: Any = rf.from_iterable(lambda: numbers(3))
    sharded: Any = rf.from_iterable(lambda shard: numbers(3))
    for options, said in (
        ({"batch_size": 0}, "batch_size"),
        ({"shuffle": True}, "shuffle inside the stream"),
        ({"shuffle": "window"}, "a stream has no shuffle"),
        ({"columns": ["x"]}, "let the stream yield what you need"),
        ({"audit": True}, "rankfeed.audit"),
        ({"plan": rf.Plan(3)}, "a stream has no plan"),
        ({"lanes": 3}, "a stream has no lanes"),
        ({"tail": "some"}, "invalid tail"),
        ({"worker_kind": "fiber"}, "invalid worker_kind"),
        ({"id_column": "valid"}, "mask"),
    ):
        with pytest.raises(ArgumentError, match=said):
            rf.Loader(stream, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bach_size'"):
        rf.Loader(stream, bach_size=3)
    with pytest.raises(ArgumentError, match=r'(?s)tail="drop".*"pad"'):
        rf.Loader(sharded, 2)
    with pytest.raises(TopologyError, match=r"(?s)agree on its end.*init_process_group"):
        list(rf.Loader(sharded, 2, tail="drop", topology=place(0, 2)))
    assert len(list(rf.Loader(sharded, 1, tail="drop", topology=place(0, 1)))) == 3
    for wrong in (3, None):
        with pytest.raises(ArgumentError, match="this is not a stream"):
            rf.from_iterable(wrong)
    with pytest.raises(ArgumentError, match=r"(?s)without a default.*found: path.*functools\.partial"):
        rf.from_iterable(lambda path: [])
    with pytest.raises(ArgumentError, match="list of names"):
        rf.from_iterable([], ragged="tokens")
    with pytest.raises(ArgumentError, match="from_iterable"):
        rf.Loader(iter([1, 2, 3]))  # type: ignore[arg-type]


def test_failing_or_empty_stream_factories_raise_stream_error_at_the_first_batch() -> None:
    def broken() -> Any:
        raise OSError("no such shard")

    for factory, said in (
        (broken, "(?s)the factory of the stream raised.*OSError: no such shard.*epoch 0, rank 0"),
        (lambda: 5, "(?s)the factory of the stream raised.*not iterable"),
        (lambda: iter(()), "yielded nothing"),
        (lambda shard: iter(()), "yielded nothing"),
    ):
        loader = rf.Loader(rf.from_iterable(factory), 2, tail="pad")
        with pytest.raises(StreamError, match=said):
            next(iter(loader))
    with pytest.raises(PlanError, match="fewer samples than there are ranks"):
        list(feed(2, 0, 3))


def test_a_subclass_of_loader_reads_a_stream() -> None:
    class Named(rf.Loader):
        pass

    class Own(rf.Loader):
        def __init__(self, size: int) -> None:
            super().__init__(rf.from_iterable(partial(numbers, size)))

    for loader in (Named(rf.from_iterable(partial(numbers, 4))), Own(4)):
        assert len(list(loader)) == 4


def test_inspect_signature_of_loader_lists_its_arguments() -> None:
    assert list(inspect.signature(rf.Loader).parameters)[:3] == ["source", "batch_size", "shuffle"]


def test_invalid_or_mismatched_stream_states_raise_state_error() -> None:
    loader = feed(9)
    next(it := iter(loader))
    next(it)
    state = loader.state_dict()
    assert copy.deepcopy(state) == json.loads(json.dumps(state))
    for wrong, said in (
        ({**state, "seed": 3}, "another seed"),
        ({**state, "shards": 4}, "(?s)sharded differently.*4 streams, one for each rank.*same number of ranks"),
        ({**state, "at": 5}, "impossible position"),
        ({**state, "position": -1}, "impossible position"),
        ({**state, "steps": 7}, "impossible position"),
        ({**state, "rankfeed": 9}, "another version"),
        (rf.Loader(rf.from_dataset([{"x": 1}])).state_dict(), "not a state of a rankfeed"),
        ("x", "not a state of a rankfeed"),
    ):
        with pytest.raises(StateError, match=said):
            feed(9).load_state_dict(wrong)
    with pytest.raises(StateError, match="not a state of a rankfeed"):
        rf.Loader(rf.from_dataset([{"x": 1}])).load_state_dict(state)
    short = feed(3)
    short.load_state_dict(state)
    with pytest.raises(StateError, match=r"(?s)beyond the end of the stream.*at least 4 samples.*found: 3"):
        next(iter(short))


def test_a_stream_state_that_json_changes_is_dropped_with_a_warning_and_resumed_by_counting() -> None:
    class Odd(Stateful):
        def state_dict(self) -> Any:
            return {"line": (self.at, 1)}

    loader = rf.Loader(rf.from_iterable(lambda: Odd(9, [])), 2)
    with pytest.warns(UserWarning, match="JSON changes it"):
        next(iter(loader))
    state = loader.state_dict()
    assert state["own"] is None
    other = rf.Loader(rf.from_iterable(lambda: Odd(9, [])), 2)
    other.load_state_dict(state)
    with pytest.warns(UserWarning, match="JSON changes it"):
        assert [number for batch in other for number in counted(batch)] == list(range(2, 9))


def test_audit_of_a_padded_stream_loader_is_sound_and_counts_each_sample_once() -> None:
    report = rf.audit(feed(9, tail="pad", id_column="place"), epochs=2, universe=9)
    assert report.sound, str(report)
    assert report.epochs[1].samples == 9


def test_a_pickled_stream_loader_keeps_its_position() -> None:
    loader = rf.Loader(rf.from_iterable([{"x": number} for number in range(9)]), 2, num_workers=1)
    next(it := iter(loader))
    next(it)
    assert pickle.loads(pickle.dumps(loader)).state_dict() == loader.state_dict()


def test_lines_of_a_text_file_used_as_a_stream_are_delivered_in_order(tmp_path: Path) -> None:
    lines = [str(number / 7) for number in range(50)]
    (tmp_path / "lines").write_text("\n".join(lines))
    for engine in ENGINES:
        loader = rf.Loader(rf.from_iterable(lambda: (tmp_path / "lines").open()), 7, **engine)
        assert [line.strip() for batch in loader for line in batch] == lines


def test_sample_fingerprints_of_a_stream_differ_by_content_and_ignore_random_floats() -> None:
    same = [{"text": "a", "x": np.random.rand(3), "n": 1.5}, {"text": "a", "x": np.random.rand(3), "n": 2.5}]
    assert samples_fingerprint([same[0]]) == samples_fingerprint([same[1]])
    keyed = [{"__key__": "a", "__url__": f"/{node}/0.tar"} for node in ("n1", "n2")]
    assert samples_fingerprint([keyed[0]]) == samples_fingerprint([keyed[1]])
    others = [{"text": "b"}, {"text": "a", "label": 1}, ("a",), "a", b"a", 1, 2, None]
    assert len({samples_fingerprint([other]) for other in others}) == len(others)
    numbers = [7, np.int64(7), np.array(7), np.array([7]), torch.tensor(7), torch.tensor([7])]
    assert len({samples_fingerprint([{"id": number}]) for number in numbers}) == 1
