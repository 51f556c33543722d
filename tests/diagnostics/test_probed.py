"""What a rank does and sees, without a process of its own."""

from __future__ import annotations

import builtins
import functools
import gc
import pickle
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.marks import slow
from tests.zoo import of_torch
from tests.zoo.of_torch import Rows
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

import rankfeed as rf
from rankfeed.diagnostics import tagged
from rankfeed.diagnostics.doctor import Examination, examine
from rankfeed.diagnostics.doctor.inspection import ImportMeter, described
from rankfeed.diagnostics.doctor.rank import LoaderReader, read
from rankfeed.diagnostics.doctor.records import Built, Event, Job, Record, RunFailure, Step, remove_padding
from rankfeed.diagnostics.findings import Finding
from rankfeed.errors import ArgumentError
from rankfeed.integrations.pytest_plugin import Rankfeed

DATA = Rows(64)


def built(loader: Any) -> Built:
    return described(loader, seconds=0, grown=0, start_method="fork")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shuffle": True}, True),
        ({"shuffle": False}, False),
        ({"sampler": DistributedSampler(DATA, 2, 0, shuffle=True)}, True),
        ({"sampler": DistributedSampler(DATA, 2, 0, shuffle=False)}, False),
        ({"batch_sampler": BatchSampler(RandomSampler(DATA), 4, drop_last=False)}, True),
        ({"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, drop_last=False)}, False),
        ({"batch_sampler": [[1, 0], [3, 2]]}, None),  # torch makes a SequentialSampler, which is not used
    ],
)
def test_whether_a_dataloader_shuffles_is_read_from_its_sampler(
    options: dict[str, Any], expected: bool | None
) -> None:
    assert built(DataLoader(DATA, **options)).traits.shuffles is expected


@pytest.mark.parametrize("says", [True, False])
def test_whether_an_iterable_dataset_shuffles_is_read_from_its_shuffle_attribute(says: bool) -> None:
    class Streaming(IterableDataset[Any]):
        shuffle = says

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    assert built(DataLoader(Streaming())).traits.shuffles is says


def test_a_distributed_sampler_shards_the_dataset_only_if_it_has_several_replicas() -> None:
    """With one replica it is used where each rank has its own files."""
    assert not built(DataLoader(DATA, sampler=DistributedSampler(DATA, 1, 0))).cuts_one_dataset
    assert built(DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))).cuts_one_dataset


def test_the_cache_fingerprint_of_a_dataset_is_not_recorded_for_comparison() -> None:
    """The datasets library makes up a fingerprint in each process if it cannot hash a function."""

    class Mapped(Rows):
        _fingerprint = "random"

    assert built(DataLoader(Mapped())).fingerprint is None


class Counting:
    """Batches of unknown length, with a state."""

    def __init__(self, steps: int) -> None:
        self.steps, self.step = steps, 0

    def __iter__(self) -> Iterator[Any]:
        for step in range(1, self.steps + 1):
            self.step = step
            yield {"sample_id": [step]}

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@pytest.mark.parametrize(
    ("steps", "length", "after"),
    [(12, None, 8), (8, None, 4), (9, None, 8), (1, None, None), (12, 12, 6), (3, 3, 1), (1, 1, None)],
)
def test_the_doctor_saves_the_state_of_a_loader_in_the_middle_of_an_epoch(
    steps: int, length: int | None, after: int | None, tmp_path: Path
) -> None:
    """Never at its end, after which there is nothing to resume."""
    job = Job("", "a:b", ranks=1, workers=0, start_method="spawn", epochs=1, states=str(tmp_path))
    lines: list[Record] = []
    assert LoaderReader(job, 0, lines.append)._epoch(Counting(steps), 0, length=length, resumes=True)
    taken = [line.value for line in lines if isinstance(line, Event) and line.name == "state"]
    assert (taken[-1] if taken else None) == after
    assert (tmp_path / "0.pt").exists() == (after is not None)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "but NoneType"),
        ({"train": DataLoader(DATA)}, "but dict"),
        ((DataLoader(DATA), DataLoader(DATA)), "return one"),
        ((DataLoader(DATA), None), "return one"),
    ],
)
def test_a_factory_that_does_not_return_one_loader_raises_type_error(returned: Any, said: str) -> None:
    job = Job("", "a:b", ranks=1, workers=0, start_method="spawn", epochs=1)
    with pytest.raises(TypeError, match=said):
        LoaderReader(job, 0, print)._build(lambda: returned, 0)


def said_of(factory: str) -> list[Record]:
    job = Job("", f"{__file__}:{factory}", ranks=1, workers=0, start_method="spawn", epochs=1)
    said: list[Record] = []
    original = builtins.__import__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoaderReader, "init_group", lambda self: None)
        patch.setattr(gc, "freeze", lambda: None)
        read(job, 0, said.append)
    assert builtins.__import__ is original
    return said


def halves_of_characters() -> Any:
    return [{"sample_id": ["img\udc80.jpg"]}]


def raises_halves() -> Any:
    raise FileNotFoundError("img\udc80.jpg")


def with_a_wrong_path() -> Any:
    return [{"meta": {"k": [1, 2]}}], "meta.other"


def with_a_path() -> Any:
    return [({"meta": {"k": [5, 6]}}, 7)], "0.meta.k"


def with_a_function() -> Any:
    return [[(1, 2), (3, 4)]], f"{__file__}:first_of_each"


def first_of_each(batch: Any) -> Any:
    return [row[0] for row in batch]


def test_ids_and_errors_with_undecodable_file_names_are_recorded_with_escapes() -> None:
    assert [line.ids for line in said_of("halves_of_characters") if isinstance(line, Step)] == [[r"img\udc80.jpg"]]
    raised = said_of("raises_halves")[-1]
    assert isinstance(raised, RunFailure)
    assert raised.detail == r"FileNotFoundError: img\udc80.jpg"


def test_an_id_path_that_is_not_found_is_reported_with_the_existing_path_and_no_traceback() -> None:
    raised = said_of("with_a_wrong_path")[-1]
    assert isinstance(raised, RunFailure)
    assert (raised.phase, raised.output) == ("reading the ids", [])
    assert "'meta.other'" in raised.detail
    assert "meta.k" in raised.detail


def test_the_key_of_ids_may_be_a_path_into_the_batch_or_a_function() -> None:
    assert [line.ids for line in said_of("with_a_path") if isinstance(line, Step)] == [[5, 6]]
    assert [line.ids for line in said_of("with_a_function") if isinstance(line, Step)] == [[1, 3]]


def test_memory_of_modules_that_a_factory_imports_is_not_counted_as_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_library.py").write_text("held = b'x' * (48 << 20)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    original = builtins.__import__
    with ImportMeter() as meter:
        before = meter.bytes()
        import large_library  # type: ignore[import-not-found]

        assert len(large_library.held) == 48 << 20
        assert meter.bytes() - before < 16 << 20
        data = b"x" * (48 << 20)
        assert meter.bytes() - before > len(data) // 2
    assert builtins.__import__ is original


class Sentences:
    """Sentences of different lengths, padded with zeros, without ids."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {"tokens": torch.tensor([*range(index + 1, 2 * index + 2)] + [0] * (12 - index))}


def with_padding_rows() -> Any:
    return rf.Loader(rf.from_dataset(Sentences()), 4, tail="pad", topology=rf.Topology())  # type: ignore[arg-type]


def test_padding_rows_of_a_batch_are_left_out_of_the_recorded_rows_and_hashes() -> None:
    steps = [line for line in said_of("with_padding_rows") if isinstance(line, Step)]
    assert [step.rows for step in steps] == [4, 4, 2]
    for step in steps:
        assert len(step.ends["tokens"]) == len(step.fields["tokens"]) == step.rows
    remove_padding(steps)
    assert len({key for step in steps for key in step.fields["tokens"]}) == 10


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *of, **named: function(*of, **named))


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": float("inf")},
        {"max_seconds": float("nan")},
        {"step_seconds": -1},
        {"step_seconds": float("inf")},
        {"resume_ranks": 0},
        {"key": len},
        {"universe": 0},
        {"allow": ["everything"]},
    ],
)
def test_examine_raises_argument_error_for_invalid_option_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        examine("a:b", **wrong)


def test_a_factory_that_other_processes_cannot_import_raises_argument_error() -> None:
    from rankfeed.diagnostics.doctor.examination import _name_of

    assert _name_of(wrapped(of_torch.no_sampler)) == f"{Path(of_torch.__file__).resolve()}:no_sampler"
    of_a_notebook = types.FunctionType(compile("0", "/tmp/ipykernel_1/2.py", "eval"), {}, "train")
    for wrong in (of_a_notebook, Counting(3).state_dict, functools.partial(len), lambda: None):
        with pytest.raises(ArgumentError, match="cannot import this factory"):
            _name_of(wrong)


@pytest.mark.parametrize(
    ("severity", "verdict", "fails", "allowed"),
    [
        ("error", "diseased", True, ["never-ends"]),
        ("unproven", "not proven", True, ["not proven"]),
        ("unproven", "not proven", True, ["never-ends"]),
        ("warning", "sound", False, []),
    ],
)
def test_the_pytest_fixture_fails_unless_soundness_is_proven_or_the_finding_is_allowed(
    severity: Any, verdict: str, fails: bool, allowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    examination = Examination("a:b", (Finding("never-ends", severity, "n"),), ())
    monkeypatch.setattr(Rankfeed, "examine", lambda self, factory, **options: examination)
    assert examination.verdict == verdict
    if fails:
        with pytest.raises(AssertionError, match="never-ends"):
            Rankfeed().assert_exactly_once("a:b")
    assert Rankfeed().assert_exactly_once("a:b", allow=allowed) is examination


def indexed(dataset: Any, **options: Any) -> list[tagged.Tagged]:
    loader = DataLoader(dataset, **options)
    tagged.record(loader)
    return list(loader)


@pytest.mark.parametrize("context", [None, "fork", slow("spawn")])
def test_the_dataset_indices_of_each_batch_are_recorded_inline_and_in_workers(context: str | None) -> None:
    workers = {"num_workers": 2, "multiprocessing_context": context} if context else {}
    steps = indexed(DATA, batch_size=4, sampler=range(20, 0, -1), **workers)
    assert [index for step in steps for index in step.indices or ()] == [*range(20, 0, -1)]
    assert [int(row) for step in steps for row in step.batch["sample_id"]] == [*range(20, 0, -1)]
    assert {step.worker for step in steps} == ({0, 1} if context else {None})


class Noisy(Rows):
    """Draws from a generator of its own, which may be seeded for each sample."""

    def __init__(self, *, seeded: bool) -> None:
        super().__init__()
        self.seeded, self.generator = seeded, random.Random(0)

    def __getitem__(self, index: int) -> Any:
        if self.seeded:
            self.generator.seed(index)
        return self.generator.random()


@pytest.mark.parametrize("seeded", [True, False])
def test_random_streams_of_workers_differ_only_if_the_dataset_seeds_them_for_each_sample(seeded: bool) -> None:
    steps = indexed(Noisy(seeded=seeded), batch_size=4, num_workers=2, multiprocessing_context="fork")
    digests = {step.streams["dataset.generator"] for step in steps}
    assert len(digests) == (2 if seeded else 1)


class Many(Rows):
    """Fetches several at once, and looks at what it is."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [None if index % 3 == 0 else index for index in indices]


def test_samples_that_are_none_are_counted_as_dropped() -> None:
    steps = indexed(Many(), batch_size=6, collate_fn=lambda samples: [row for row in samples if row is not None])
    assert steps[0].indices == [*range(6)]
    assert steps[0].dropped == 2
    assert steps[0].batch == [1, 2, 4, 5]


class Named(Rows):
    def __getitem__(self, index: int) -> Any:
        return {"name": f"n{index % 4}", "x": torch.full((3,), float(index % 4)), "tokens": [index] * 30}


def one_of_each(samples: list[Any]) -> Any:
    table = {sample["name"]: sample["x"] for sample in samples}
    return {"names": [*table], "x": torch.stack([*table.values()])}


def packed(samples: list[Any]) -> Any:
    tokens = [token for sample in samples for token in sample["tokens"]]
    return {"tokens": torch.tensor(tokens).reshape(-1, 60)}


@pytest.mark.parametrize(("collate", "dropped"), [(one_of_each, 2), (packed, 0), (None, 0)])
def test_samples_that_collate_drops_are_counted_and_packed_samples_are_not(collate: Any, dropped: int) -> None:
    steps = indexed(Named(), batch_size=6, collate_fn=collate)
    assert [step.dropped for step in steps[:3]] == [dropped] * 3


def test_a_recorded_dataset_keeps_its_class_attributes_len_and_pickling() -> None:
    loader: Any = DataLoader(Many())
    tagged.record(loader)
    assert isinstance(loader.dataset, Many)
    loader.dataset.rows = 5
    assert len(loader.dataset) == 5
    assert type(pickle.loads(pickle.dumps(loader.dataset))) is type(loader.dataset)
