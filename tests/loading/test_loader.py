"""What iterating a loader promises: every sample once, equal steps, the same order, epochs in a row."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.loading.feeds import (
    ENGINES,
    NAMES,
    Memory,
    Tuples,
    Wrapped,
    assert_once,
    delivered,
    feed,
    loaded,
    same,
    state_after,
    steps_of,
    take,
    workers,
)
from torch.utils.data import ChainDataset, DataLoader, Dataset, IterableDataset, Subset

import rankfeed as rf
from rankfeed import errors
from rankfeed.columns.columns import Columns
from rankfeed.loading import Loader
from rankfeed.plan import Plan
from rankfeed.sources.packed import PackedSource
from rankfeed.topology import Topology


def of_ranks(world_size: int, **options: Any) -> list[Loader]:
    return [feed(rank, world_size, **options) for rank in range(world_size)]


@given(
    size=st.integers(1, 60),
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    tail=st.sampled_from(["even", "pad"]),
    shuffle=st.sampled_from([False, "global", "window"]),
    num_workers=st.sampled_from([0, 0, 2]),
)
def test_loader_delivers_every_sample_once_in_equal_steps_for_any_topology(
    size: int, world_size: int, batch_size: int, tail: str, shuffle: Any, num_workers: int
) -> None:
    if size < world_size:
        tail = "pad"
    loaders = of_ranks(
        world_size, size=size, batch_size=batch_size, tail=tail, shuffle=shuffle, window=8, num_workers=num_workers
    )
    steps = steps_of(loaders)
    assert_once([sample_id for step in steps for sample_id in delivered(step)], size)
    assert {len(loader) for loader in loaders} == {len(steps)}


@pytest.mark.parametrize("tail", ["even", "drop"])
@pytest.mark.parametrize("shuffle", ["none", "global", "window"])
@pytest.mark.parametrize("size", [48, 49, 67, 71, 24])
def test_global_batches_contain_the_same_samples_for_any_world_size(tail: str, shuffle: str, size: int) -> None:
    by_world = []
    for world_size in (1, 2, 3, 4, 6):
        loaders = of_ranks(
            world_size, size=size, batch_size=12 // world_size, tail=tail, shuffle=shuffle, window=9
        )
        by_world.append([sorted(delivered(step)) for step in steps_of(loaders)])
    assert all(world == by_world[0] for world in by_world)


def test_more_ranks_than_samples_raises_plan_error_unless_tail_is_pad() -> None:
    with pytest.raises(errors.PlanError, match="fewer samples than there are ranks"):
        iter(feed(0, 5, size=4))
    with pytest.raises(errors.PlanError):
        len(feed(0, 5, size=4))
    assert_once(delivered(steps_of(of_ranks(5, size=4, tail="pad"))[0]), 4)


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_exhausting_the_loader_advances_the_epoch_and_a_break_restarts_it(engine: dict[str, Any]) -> None:
    loader = feed(**engine)
    first = delivered(list(loader))
    assert loader.epoch == 1
    list(zip(range(5), loader, strict=False))
    assert loader.epoch == 1
    iterator = iter(loader)
    second = delivered(list(iterator))
    assert next(iterator, None) is None
    assert loader.epoch == 2
    assert_once(second, 50)
    assert first != second
    assert second == delivered(list(_at_epoch(feed(), 1)))


@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_taking_exactly_len_batches_advances_to_the_next_epoch_at_the_next_iteration(
    engine: dict[str, Any], tail: str
) -> None:
    expected = feed(tail=tail)
    loader = feed(tail=tail, **engine)
    for epoch in range(3):
        batches = [batch for _, batch in zip(range(len(loader)), loader, strict=False)]
        assert loader.epoch == loader.state_dict()["epoch"] == epoch, "unchanged until the next iteration"
        assert same(batches, list(expected))
    resumed = loaded(loader.state_dict(), tail=tail, **engine)
    assert same(next(iter(resumed)), next(iter(loader)))
    for step, _ in enumerate(loader, 1):
        if step == len(loader):
            break
    loader.set_epoch(loader.epoch)
    assert same(list(loader), list(_at_epoch(feed(tail=tail), 3))), "an epoch that is named begins"
    assert loader.epoch == 4


def _at_epoch(loader: Loader, epoch: int) -> Loader:
    loader.set_epoch(epoch)
    return loader


def test_len_of_a_loader_is_steps_done_plus_steps_left_in_the_epoch() -> None:
    loader = feed()
    total = len(loader)
    iterator = iter(loader)
    for _ in range(total):
        assert len(loader) == total
        next(iterator)
    other = loaded(state_after(5), batch_size=8)
    assert len(other) == 5 + len(list(other))


def test_set_epoch_keeps_a_loaded_position_in_the_same_epoch_and_resets_it_for_another_epoch() -> None:
    state = state_after(3, epoch=4)
    loader = loaded(state)
    loader.set_epoch(4)
    assert loader.state_dict() == state
    assert len(delivered(list(loader))) == 50 - 12
    loader.load_state_dict(state)
    loader.set_epoch(5)
    assert loader.state_dict()["position"] == 0
    assert_once(delivered(list(loader)), 50)


def test_set_epoch_during_an_iteration_lets_it_finish_without_moving_the_loader() -> None:
    loader = feed()
    iterator = iter(loader)
    seen = take(iterator, 2)
    loader.set_epoch(7)
    assert_once(delivered(seen + list(iterator)), 50)
    assert (loader.epoch, loader.state_dict()["position"]) == (7, 0)


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_set_epoch_after_iter_but_before_the_first_batch_applies_to_that_iterator(engine: dict[str, Any]) -> None:
    loader = feed(**engine)
    iterator = iter(loader)
    loader.batch_sampler.sampler.set_epoch(3)  # where Lightning does it, after iter()
    first = take(iterator, 2)
    assert (loader.epoch, loader.state_dict()["steps"]) == (3, 2)
    assert_once(delivered(first + list(iterator)), 50)
    assert delivered(first) == delivered(take(iter(_at_epoch(feed(), 3)), 2))
    assert loader.epoch == 4


def test_set_epoch_of_a_framework_to_an_earlier_epoch_keeps_the_loaded_position() -> None:
    state = state_after(3, epoch=1)
    loader = loaded(state)
    loader.batch_sampler.sampler.set_epoch(0)
    assert loader.state_dict() == state
    loader.batch_sampler.sampler.set_epoch(2)
    assert (loader.epoch, loader.state_dict()["position"]) == (2, 0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_set_epoch_of_a_framework_that_would_miscount_a_resumed_epoch_raises_state_error(ranks: int) -> None:
    state = state_after(4, 0, 2)
    loader = loaded(state, 0, ranks)
    with pytest.raises(errors.StateError, match=r"(?s)would lose samples.*callbacks=\[.*LoaderCheck\(\)\]"):
        loader.batch_sampler.sampler.set_epoch(0)
    loader.is_recounted = True
    loader.batch_sampler.sampler.set_epoch(0)
    assert loader.state_dict() == state


def test_set_epoch_of_a_framework_is_accepted_after_any_step_if_its_count_is_correct() -> None:
    for steps in range(1, 13):  # 50 samples on 2 ranks: the last two of 13 steps are smaller
        loader = loaded(state_after(steps, 0, 2, batch_size=2), 0, 2, batch_size=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader.batch_sampler.sampler.set_epoch(0)


def test_set_epoch_of_a_framework_counting_from_0_first_finishes_the_loaded_epoch() -> None:
    donor, loader = _at_epoch(feed(), 5), feed()
    first = take(iter(donor), 2)
    loader.load_state_dict(donor.state_dict())
    epochs = []
    for epoch in range(3):
        loader.batch_sampler.sampler.set_epoch(epoch)
        epochs.append(loader.epoch)
        batches = take(iter(loader), len(loader) - (len(first) if epoch == 0 else 0))
        assert_once(delivered(first + batches if epoch == 0 else batches), 50)
    assert epochs == [5, 1, 2]


def test_taking_exactly_len_batches_completes_the_audit_report_and_reuses_the_workers() -> None:
    loader = feed(num_workers=2, worker_kind="process", audit=True)
    pids = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        take(iterator, len(loader))
        assert loader.audit_report is not None
        assert loader.audit_report.epoch == epoch
        pids.append(sorted(worker.pid for worker in workers()))
    assert pids[0] == pids[1]
    assert len(pids[0]) == 2


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_two_concurrent_iterators_deliver_the_same_epoch_and_the_state_follows_the_later_one(
    engine: dict[str, Any],
) -> None:
    loader = feed(**engine)
    first, second = iter(loader), iter(loader)
    batches: tuple[list[Any], list[Any]] = ([], [])
    for step in range(len(loader)):
        batches[0].append(next(first))
        if step < 4:
            batches[1].append(next(second))
    assert loader.state_dict()["steps"] == 4
    assert next(first, None) is None
    assert loader.epoch == 0
    batches[1].extend(second)
    assert loader.epoch == 1
    assert same(batches[0], batches[1])
    assert_once(delivered(batches[0]), 50)


def fail_at_17(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["y"] == 170:
        raise KeyError("bad sample")
    return {"y": sample["y"]}


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_an_iterator_that_raised_raises_again_and_the_state_stays_at_the_failed_step(
    engine: dict[str, Any],
) -> None:
    loader = feed(size=40, batch_size=4, transform=fail_at_17, shuffle=False, **engine)
    batches, seen = iter(loader), Counter[int]()
    for _ in range(4):
        seen.update(next(batches)["id"].tolist())
    assert seen == Counter(range(16))
    with pytest.raises(errors.TransformError, match="bad sample"):
        next(batches)
    for _ in range(2):
        with pytest.raises(errors.RankfeedError, match=r"(?s)has failed.*the transform raised.*load_state_dict"):
            next(batches)
    assert (loader.epoch, loader.state_dict()["position"]) == (0, 16)
    # The step that failed is the next one of a loader that resumes, and of this one.
    healed = loaded(loader.state_dict(), size=40, batch_size=4, shuffle=False, **engine)
    seen.update(sample_id for batch in healed for sample_id in batch["id"].tolist())
    assert seen == Counter(range(40))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(errors.TransformError, match="bad sample"):
        next(iter(loader))


def test_an_iterator_over_a_stream_that_raised_raises_again_instead_of_stopping() -> None:
    loader = Loader(rf.from_iterable(lambda: ({"y": 10 * i} for i in range(40))), 4, transform=fail_at_17)
    batches = iter(loader)
    with pytest.raises(errors.RankfeedError, match="bad sample"):
        list(batches)
    with pytest.raises(errors.RankfeedError, match="has failed"):
        next(batches)
    assert loader.state_dict()["position"] == 16


def test_a_pickled_or_copied_loader_keeps_its_position() -> None:
    loader = feed(num_workers=2)
    iterator = iter(loader)
    take(iterator, 3)
    for twin in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert twin.state_dict() == loader.state_dict()
        assert delivered(list(loaded(twin.state_dict()))) == delivered(list(loaded(loader.state_dict())))
    assert len(list(iterator)) == len(loader) - 3


def test_repr_of_a_loader_shows_source_options_and_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rf.write(({"x": i} for i in range(40)), tmp_path / "data", progress=False)
    loader = rf.Loader(rf.open(tmp_path / "data"), 8, shuffle=True, seed=3, num_workers=2)
    refuse = pytest.fail
    monkeypatch.setattr(Topology, "detect", lambda *arguments: refuse("detected a topology"))
    monkeypatch.setattr(PackedSource, "fetch", lambda *arguments: refuse("read data"))
    data = str(tmp_path / "data")
    assert repr(loader) == (
        f"Loader(PackedSource('{data}', 40 samples), batch_size=8, tail='even', shuffle='global', seed=3, "
        "num_workers=2, worker_kind='thread'; epoch 0, 0 steps done)"
    )
    monkeypatch.undo()
    assert [repr(loader) for _, _ in zip(loader, range(2), strict=False)][1].endswith("; epoch 0, 2 steps done)")
    assert len(repr(rf.Loader(rf.from_dataset([{"x": i} for i in range(10**6)])))) < 300
    stream = rf.Loader(rf.from_iterable(range), 4)
    assert repr(stream).startswith("Loader(from_iterable(<class 'range'>), batch_size=4, ")
    assert "shuffle" not in repr(stream)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"batch_size": size}, "batch_size") for size in (0, 2.0, True)),
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch_factor": 0}, "prefetch_factor"),
        ({"tail": "odd"}, "tail"),
        ({"shuffle": "well"}, "shuffle"),
        ({"ragged": "torn"}, "ragged"),
        ({"worker_kind": "fibre"}, "worker_kind"),
        ({"on_error": "ignore"}, "on_error"),
        ({"columns": ["y", "z"]}, "no such column"),
        ({"columns": "y"}, "invalid columns"),
        *(({"id_column": name}, "exists already") for name in ("y", "x_lengths")),
        ({"tail": "pad", "id_column": "valid"}, "reserved"),
        ({"seed": 1.5}, "seed"),
        ({"lanes": 0}, "lanes"),
        ({"plan": Plan(49), "shuffle": False}, "belongs to another source"),
        ({"plan": Plan(50)}, "defines the order"),
        ({"device": "nonsense"}, "unknown device"),
        ({"size": 0}, "cannot plan without samples"),
    ],
    ids=str,
)
def test_invalid_loader_arguments_raise_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.RankfeedError, match=message) as caught:
        feed(**options)
    assert isinstance(caught.value, ValueError)


class Numbers(Dataset[dict[str, int]]):
    """A map-style torch Dataset."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": index}


class Wrapping(IterableDataset[Any]):
    """Iterates a loader that is copied into each worker, or created there."""

    def __init__(self, wrap: Any, *, created: bool) -> None:
        self.wrap = wrap
        self.loader = None if created else self.create()

    def create(self) -> Any:
        return Loader(self.wrap([{"x": index} for index in range(20)]), 5, topology=Topology())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.create() if self.loader is None else self.loader)


@pytest.mark.parametrize("created", [False, True], ids=["copied", "created"])
@pytest.mark.parametrize("wrap", [rf.from_dataset, rf.from_iterable], ids=["dataset", "stream"])
def test_iterating_a_loader_in_several_workers_of_a_dataloader_raises_argument_error(
    wrap: Any, created: bool
) -> None:
    for num_workers in (0, 1):
        alone: Any = DataLoader(Wrapping(wrap, created=created), None, num_workers=num_workers)
        assert Counter(x for batch in alone for x in batch["x"].tolist()) == Counter(range(20))
    several: Any = DataLoader(Wrapping(wrap, created=created), None, num_workers=2)
    with pytest.raises(errors.ArgumentError, match=r"worker 0 of 2[\s\S]*num_workers=[\s\S]*rankfeed\.split"):
        list(several)


def test_loader_accepts_torch_datasets_and_lists_of_dicts_directly() -> None:
    given: Any
    for given in (Numbers(), [{"x": index} for index in range(5)], Subset(Numbers(), range(5))):
        assert [batch["x"].tolist() for batch in Loader(given, 2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (ChainDataset([]), r"rankfeed\.from_iterable"),
        (iter([{"x": 0}]), r"rankfeed\.from_iterable"),
        ("data/train", r"rankfeed\.open\('data/train'\)"),
        (Path("data"), r"rankfeed\.open\("),
        (DataLoader(Numbers()), r"loader\.dataset"),
        (Numbers, r"rankfeed\.open\(\), rankfeed\.from_dataset\(\)"),
        (None, r"rankfeed\.open\(\), rankfeed\.from_dataset\(\)"),
        ({"x": [1]}, r"rankfeed\.open\(\), rankfeed\.from_dataset\(\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_unsupported_source_raises_argument_error_naming_the_function_that_wraps_it(
    given: Any, remedy: str
) -> None:
    with pytest.raises(errors.ArgumentError, match=rf"(?s)cannot read this.*remedy: .*{remedy}"):
        Loader(given)


@pytest.mark.parametrize("stream", [False, True], ids=["source", "stream"])
@pytest.mark.parametrize(
    ("option", "value", "equivalent"),
    [
        ("drop_last", True, 'remedy: use tail="drop", which leaves out the rest'),
        ("pin_memory", True, "device="),
        ("pin_memory_device", "cuda", "device="),
        ("persistent_workers", True, "workers are kept"),
        ("sampler", range(5), "DistributedSampler"),
        ("batch_sampler", [[0]], "DistributedBatchSampler"),
        ("worker_init_fn", print, "rng"),
        ("generator", torch.Generator(), "seed="),
        ("timeout", 30, "rankfeed.Lockstep"),
        ("multiprocessing_context", "spawn", 'worker_kind="process"'),
        ("in_order", True, "always delivered in order"),
        ("dataset", [1], "first argument"),
    ],
)
def test_arguments_of_torch_dataloader_raise_argument_error_naming_the_equivalent(
    option: str, value: Any, equivalent: str, stream: bool
) -> None:
    source: Any = rf.from_iterable(lambda: [{"x": 0}]) if stream else Memory(5)
    with pytest.raises(errors.ArgumentError, match=rf"(?s){option} is an argument of torch.*{equivalent}"):
        Loader(source, **{option: value})


def test_a_misspelt_loader_argument_raises_type_error_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bach_size'; did you mean batch_size"):
        Loader(Memory(5), bach_size=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'; the options are batch_size, shuffle"):
        Loader(Memory(5), foo=1)  # type: ignore[arg-type]


def test_an_empty_list_of_columns_raises_argument_error(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(4))
    for function in (
        lambda: Loader(Memory(5), columns=[]),
        lambda: rf.open(tmp_path / "rows.npy", columns=[]),
        lambda: rf.concat([Memory(5), Memory(5)], columns=[]),
    ):
        with pytest.raises(errors.ArgumentError, match=r"(?s)invalid columns.*at least one.*None for all"):
            function()


def test_a_sample_that_lacks_a_column_raises_source_error_with_a_remedy() -> None:
    loader = Loader(rf.from_dataset([{"x": 1}, {"y": 1}]), columns=["x"], collate_fn=list)
    with pytest.raises(errors.SourceError, match=r"(?s)lacks a column.*sample 1.*remedy: return .* columns="):
        list(loader)


def test_a_plan_passed_to_the_loader_determines_the_order() -> None:
    plan = Plan(50, shuffle="global", seed=99)
    assert delivered(list(feed(plan=plan, shuffle=False))) == plan.sample_ids(0, np.arange(50)).tolist()


def test_the_columns_option_is_passed_to_the_source() -> None:
    asked = []

    class Watched(Memory):
        def fetch(self, sample_ids: Any, columns: Any = None) -> Columns:
            asked.append(columns)
            return super().fetch(sample_ids, columns)

    list(Loader(Watched(5), 2, columns=["y"], topology=Topology()))
    assert set(map(tuple, asked)) == {("y",)}


def test_device_cpu_gives_the_same_batches_as_no_device() -> None:
    assert same(list(feed(device="cpu")), list(feed()))


def test_transform_fields_named_like_lengths_are_not_counted_as_padding() -> None:
    loader = feed(transform=lambda sample: {**sample, "point_lengths": "a"}, columns=["point"])
    assert next(iter(loader))["point_lengths"] == ["a", "a", "a", "a"]
    assert loader.stats()["padding_share"] == 0.0


NEEDS_DICTS: list[dict[str, Any]] = [{"id_column": "id"}, {"tail": "pad"}]


@pytest.mark.parametrize("options", NEEDS_DICTS, ids=["id_column", "pad"])
def test_dataset_samples_other_than_dicts_raise_argument_error_before_the_first_batch(
    options: dict[str, Any],
) -> None:
    for columns in ({}, {"columns": ["a"]}):
        with pytest.raises(errors.ArgumentError, match="needs samples that are dicts"):
            Loader(Wrapped(Tuples(5)), 2, **columns, **options)  # type: ignore[arg-type]
    for dataset in ([(1, 2)] * 5, (1, 2, 3), torch.utils.data.TensorDataset(torch.arange(5))):
        with pytest.raises(errors.ArgumentError, match="needs samples that are dicts"):
            next(iter(Loader(rf.from_dataset(dataset), 2, **options)))
        loader = Loader(rf.from_dataset(dataset), 2, transform=lambda sample: {"x": sample}, **options)
        assert isinstance(next(iter(loader)), dict)


@pytest.mark.parametrize("engine", ENGINES[:3], ids=NAMES[:3])
@pytest.mark.parametrize("options", NEEDS_DICTS, ids=["id_column", "pad"])
def test_tuple_samples_raise_argument_error_before_batch_transform_is_called(
    engine: dict[str, Any], options: dict[str, Any]
) -> None:
    collated: list[Any] = []
    for source in (rf.from_dataset(Tuples(5)), rf.from_iterable(lambda: iter([(1, 2, 3)] * 5))):
        loader = Loader(source, 2, batch_transform=collated.append, **options, **engine)
        with pytest.raises(errors.ArgumentError, match=r"needs samples that are dicts[\s\S]*a tuple of 3"):
            next(iter(loader))
    assert not collated


@pytest.mark.parametrize("engine", ENGINES[:3], ids=NAMES[:3])
def test_kept_batches_are_never_overwritten_by_later_batches(engine: dict[str, Any]) -> None:
    class Wide(Memory):
        def fetch(self, sample_ids: Any, columns: Any = None) -> Columns:
            rows = [{"w": np.full(20_000, sample_id, np.float32)} for sample_id in np.asarray(sample_ids).tolist()]
            return Columns.from_samples(rows)

    loader = Loader(Wide(60), 4, id_column="id", topology=Topology(), **engine)
    kept = []
    for epoch in range(2):
        for step, batch in enumerate(loader):
            if (step + epoch) % 3 == 0:
                kept.append((batch["id"].clone(), batch["w"][1:3, 5:7].numpy()))
    assert all((rows == ids[1:3, None].numpy()).all() for ids, rows in kept)


def test_breaking_out_of_a_loader_with_a_worker_thread_stops_building_batches() -> None:
    made = []

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        made.append(int(sample["y"]))
        return sample

    loader = feed(size=400, num_workers=1, prefetch_factor=1, transform=note)
    for _ in loader:
        break
    assert len(made) <= 4 * 5


@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"batch_size": None, "num_workers": 1}])
def test_wrapping_a_loader_in_a_dataloader_raises_argument_error(options: dict[str, Any]) -> None:
    loader = Loader([{"x": 1}, {"x": 2}], topology=Topology())
    with pytest.raises(errors.ArgumentError, match="iterate the Loader itself"):
        next(iter(DataLoader(loader, **options)))  # type: ignore[arg-type]
    assert [batch["x"].tolist() for batch in loader] == [[1], [2]]
