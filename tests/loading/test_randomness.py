"""Random numbers belong to a sample: the same for any order, rank and worker, and others in the next epoch."""

from __future__ import annotations

import pickle
import random
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.loading.feeds import (
    ENGINES,
    NAMES,
    Drawing,
    Wrapped,
    batch_from_globals,
    batch_noise,
    drawn_too,
    feed,
    from_globals,
    keyed,
    loaded,
    same,
    state_after,
)

from rankfeed.loading import Loader
from rankfeed.plan import RngStreams, wants_rng
from rankfeed.sources import from_dataset
from rankfeed.topology import Topology


def draws(*loaders: Loader, name: str = "draw") -> dict[int, Any]:
    """What each sample drew."""
    out = {}
    for loader in loaders:
        for batch in loader:
            out |= dict(zip(batch["id"].tolist(), batch[name].tolist(), strict=True))
    return out


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_the_rng_of_a_sample_is_the_same_for_any_order_rank_batch_size_and_engine(engine: dict[str, Any]) -> None:
    expected = draws(feed(transform=keyed))
    assert len(set(expected.values())) == 50
    assert draws(*(feed(rank, 2, transform=keyed, batch_size=3, **engine) for rank in range(2))) == expected
    assert draws(feed(transform=keyed, shuffle=False, **engine)) == expected


def test_different_epochs_and_seeds_draw_different_random_numbers() -> None:
    loader = feed(transform=keyed)
    first, second = draws(loader), draws(loader)
    other = draws(feed(transform=keyed, seed=4))
    for one, two in ((first, second), (first, other), (second, other)):
        assert not set(one.values()) & set(two.values())


def test_a_resumed_epoch_draws_the_same_random_numbers_as_an_uninterrupted_one() -> None:
    options: dict[str, Any] = {"transform": keyed, "batch_transform": batch_noise}
    loader = loaded(state_after(4, **options), num_workers=2, **options)
    assert same(list(loader), list(feed(**options))[4:])


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_each_batch_transform_call_has_its_own_reproducible_rng(engine: dict[str, Any]) -> None:
    expected = [list(feed(rank, 2, batch_transform=batch_noise)) for rank in range(2)]
    noises = [tuple(batch["noise"].tolist()) for batches in expected for batch in batches]
    assert len(set(noises)) == len(noises)
    for rank in range(2):
        assert same(list(feed(rank, 2, batch_transform=batch_noise, **engine)), expected[rank])


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[3]], ids=[NAMES[0], NAMES[3]])
def test_global_generators_are_seeded_for_each_sample_and_batch(engine: dict[str, Any]) -> None:
    expected = list(feed(transform=from_globals, batch_transform=batch_from_globals))
    torch.rand(5), np.random.rand(5), random.random()
    assert same(list(feed(transform=from_globals, batch_transform=batch_from_globals, **engine)), expected)
    for name in ("torch", "numpy", "random"):
        drawn = draws(feed(transform=from_globals, **engine), name=name)
        assert len(set(drawn.values())) == 50
        assert drawn == draws(feed(1, 2, transform=from_globals), feed(0, 2, transform=from_globals), name=name)


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[3]], ids=[NAMES[0], NAMES[3]])
def test_a_datasets_own_random_numbers_are_seeded_for_each_sample(engine: dict[str, Any]) -> None:
    def rows(shuffle: Any, transform: Any = None, **engine: Any) -> list[tuple[Any, ...]]:
        options = {"shuffle": shuffle, "transform": transform, "topology": Topology(), **engine}
        loader = Loader(Wrapped(Drawing(20)), 3, **options)
        return sorted(tuple(map(float, row)) for batch in loader for row in zip(*batch, strict=True))

    expected = rows(False)
    assert rows("global", **engine) == expected
    assert len({row[1:] for row in expected}) == 20
    # The transform's numbers are not those of the Dataset over again.
    both = rows(True, drawn_too, **engine)
    assert [row[:4] for row in both] == expected
    assert all(row[4] != row[1] for row in both)


@pytest.mark.parametrize(
    "options",
    [
        {"transform": from_globals},
        {"batch_transform": batch_from_globals},
        {"collate_fn": lambda samples: {"noise": torch.rand(len(samples))}, "id_column": None},
        {"transform": keyed},
        {},
    ],
    ids=["transform", "batch_transform", "collate_fn", "keyed", "none"],
)
@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_iterating_does_not_change_the_global_random_generators(
    options: dict[str, Any], engine: dict[str, Any]
) -> None:
    if engine.get("worker_kind", "thread") == "thread" and engine["num_workers"]:
        options = {}  # threads share the generators with everybody, which is documented

    def numbers() -> list[Any]:
        return [float(torch.rand(())), float(np.random.rand()), random.random(), float(torch.randn(()))]

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = [numbers() for _ in range(4)]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    loader = feed(**options, **engine)
    assert [numbers() for _ in zip(range(4), loader, strict=False)] == expected


def test_global_random_generators_are_restored_when_the_transform_raises() -> None:
    def broken(sample: dict[str, Any]) -> Any:
        torch.rand(3)
        raise RuntimeError

    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with pytest.raises(Exception, match="raised"):
        next(iter(feed(transform=broken)))
    assert torch.equal(torch.rand(2), expected)


def test_a_pickled_rng_draws_the_same_numbers() -> None:
    generator = RngStreams("a", 1, 2).generator(3)
    copy = pickle.loads(pickle.dumps(generator))
    assert copy.integers(1 << 62, size=5).tolist() == generator.integers(1 << 62, size=5).tolist()


def test_rng_streams_of_neighbouring_samples_epochs_seeds_and_purposes_are_uncorrelated() -> None:
    streams = [RngStreams(purpose, seed, epoch) for purpose in ("a", "b") for seed in (0, 1) for epoch in (0, 1)]
    firsts = [int(stream.generator(which).integers(1 << 62)) for stream in streams for which in range(200)]
    assert len(set(firsts)) == len(firsts)
    values = np.array([RngStreams("a", 0, 0).generator(which).random() for which in range(4000)])
    assert abs(values.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.08


class _Callable:
    def __call__(self, sample: Any, rng: Any) -> Any:
        return sample


@pytest.mark.parametrize(
    ("function", "wants"),
    [
        *((_Callable(), True), (lambda sample, rng=None: sample, True), (lambda sample, scale=2.0: sample, False)),
        *((lambda *samples: samples, False), (torch.nn.Identity(), False), (dict, False)),
    ],
)
def test_wants_rng_detects_whether_a_transform_has_an_rng_argument(function: Any, wants: bool) -> None:
    assert wants_rng(function) is wants


def test_probing_a_dataset_for_its_fields_does_not_change_the_global_random_generators() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = float(torch.rand(())), float(np.random.rand()), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    next(iter(Loader(Drawing(5), num_workers=1, worker_kind="process", topology=Topology())))
    assert (float(torch.rand(())), float(np.random.rand()), random.random()) == expected


def test_loaders_in_two_threads_never_access_torch_rng_state_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, at_once = Counter[str](), Counter[str]()

    def alone(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            inside["now"] += 1
            at_once["most"] = max(at_once["most"], inside["now"])
            time.sleep(0.002)
            inside["now"] -= 1
            return function(*arguments)

        return call

    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, alone(getattr(torch, name)))

    def read(rank: int) -> int:
        source = from_dataset([{"x": number} for number in range(20)])
        return len(list(Loader(source, 1, transform=lambda sample: sample, topology=Topology())))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, range(2))) == [20, 20]
    assert at_once["most"] == 1


GENERATORS = {"torch": lambda: torch.rand(()), "numpy.random": np.random.rand, "random": random.random}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("collate_fn", [None, lambda samples: {"size": len(samples)}])
def test_a_transform_drawing_from_a_global_generator_in_worker_threads_warns_once(
    name: str, collate_fn: Any
) -> None:
    def draw(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "draw": float(GENERATORS[name]())}

    loader = feed(num_workers=2, transform=draw, collate_fn=collate_fn)
    states = torch.get_rng_state(), random.getstate()
    with pytest.warns(UserWarning, match=rf"generators of {name}, .*transform\(sample, rng\)"):
        next(iter(loader))
    if name != "torch":  # the worker threads draw from it
        assert torch.equal(torch.get_rng_state(), states[0])
    if name != "random":
        assert random.getstate() == states[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)  # warns once


def test_source_fingerprint_in_the_state_is_stable_while_worker_threads_draw_global_random_numbers() -> None:
    def draw(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "draw": [np.random.rand() for _ in range(100)]}

    states = Counter[str]()
    source = from_dataset([{"x": np.full(200, number)} for number in range(1000)])
    for _ in range(10):
        loader = Loader(source, 8, transform=draw, num_workers=3, prefetch_factor=8, topology=Topology())
        batches = iter(loader)
        with pytest.warns(UserWarning, match="draws from the global generators"):
            next(batches)
        states[loader.state_dict()["source"]] += 1
        list(batches)  # so that the threads end
    assert [*states.values()] == [10]
    assert "-" in next(iter(states))  # the samples can be compared


def test_a_dataset_drawing_from_global_generators_in_worker_threads_warns() -> None:
    message = r"generators of numpy.random and random and torch, .*worker_kind='process'"
    with pytest.warns(UserWarning, match=message):
        list(Loader(from_dataset(Drawing(20)), 4, num_workers=2, topology=Topology()))


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_no_rng_warning_if_only_foreign_threads_draw_or_generators_are_seeded(engine: dict[str, Any]) -> None:
    is_over = threading.Event()

    def train() -> None:
        while not is_over.wait(1e-3):
            torch.rand(()), np.random.rand(), random.random()

    training = threading.Thread(target=train)
    training.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(feed(transform=keyed, **engine))
            if "worker_kind" in engine or not engine["num_workers"]:
                list(feed(transform=from_globals, **engine))
    finally:
        is_over.set()
        training.join()
