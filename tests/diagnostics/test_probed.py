"""What a rank does and sees, without a process of its own."""

from __future__ import annotations

import functools
import gc
import io
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.diagnostics.jobs import pipelines
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from rankfeed.diagnostics.doctor import Examination, Finding, examine
from rankfeed.diagnostics.doctor.observed import Built, Job, Line, Raised, Stated, Step
from rankfeed.diagnostics.doctor.outside import Growth, described
from rankfeed.diagnostics.doctor.probed import _Rank, found, probed
from rankfeed.errors import ArgumentError
from rankfeed.integrations.pytest_plugin import Rankfeed

DATA = pipelines.Numbers()


def built(loader: Any) -> Built:
    return described(loader, seconds=0, grown=0, start_method="fork", once=False, seed=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shuffle": True}, True),
        ({"shuffle": False}, False),
        ({"sampler": DistributedSampler(DATA, 2, 0, shuffle=True)}, True),
        ({"sampler": DistributedSampler(DATA, 2, 0, shuffle=False)}, False),
        ({"batch_sampler": BatchSampler(RandomSampler(DATA), 4, drop_last=False)}, True),
        ({"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, drop_last=False)}, False),
        ({"batch_sampler": [[1, 0], [3, 2]]}, None),  # torch makes a SequentialSampler, which nobody asks
    ],
)
def test_who_says_that_it_shuffles(options: dict[str, Any], expected: bool | None) -> None:
    assert built(DataLoader(DATA, **options)).shuffles is expected


@pytest.mark.parametrize("says", [True, False])
def test_a_stream_says_that_it_shuffles(says: bool) -> None:
    class Streaming(IterableDataset[Any]):
        shuffle = says

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    assert built(DataLoader(Streaming())).shuffles is says


def test_a_sampler_of_one_rank_cuts_nothing() -> None:
    """A rank's own files, and a sampler that is told so."""
    assert not built(DataLoader(DATA, sampler=DistributedSampler(DATA, 1, 0))).cuts_one_data_set
    assert built(DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))).cuts_one_data_set


def test_what_a_cache_knows_data_by_is_nothing_to_compare() -> None:
    """datasets makes one up in each process where it cannot hash a function."""

    class Mapped(pipelines.Numbers):
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
def test_the_state_is_of_the_middle_of_an_epoch(
    steps: int, length: int | None, after: int | None, tmp_path: Path
) -> None:
    """Never of its end, after which there is nothing to resume."""
    job = Job("", "a:b", [], ranks=1, workers=0, start_method="spawn", epochs=1, states=str(tmp_path))
    said = io.BytesIO()
    assert _Rank(job, 0, said)._epoch(Counting(steps), 0, length=length, resumes=True)
    lines = [msgspec.json.decode(line, type=Line) for line in said.getvalue().splitlines()]
    taken = [line.step for line in lines if isinstance(line, Stated)]
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
def test_a_factory_returns_one_loader(returned: Any, said: str) -> None:
    job = Job("", "a:b", [], ranks=1, workers=0, start_method="spawn", epochs=1)
    with pytest.raises(TypeError, match=said):
        _Rank(job, 0, io.BytesIO())._build(lambda: returned, 0)


def said_of(factory: str) -> list[Line]:
    job = Job("", f"{__file__}:{factory}", [], ranks=1, workers=0, start_method="spawn", epochs=1)
    said = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Rank, "stand", lambda self: None)
        patch.setattr(gc, "freeze", lambda: None)
        probed(job, 0, said)
    return [msgspec.json.decode(line, type=Line) for line in said.getvalue().splitlines()]


def halves_of_characters() -> Any:
    return [{"sample_id": ["img\udc80.jpg"]}]


def raises_halves() -> Any:
    raise FileNotFoundError("img\udc80.jpg")


def without_ids() -> Any:
    return [[Counting(1)]]


def test_names_of_files_that_are_no_text_can_be_said() -> None:
    assert [line.keys for line in said_of("halves_of_characters") if isinstance(line, Step)] == [
        [r"img\udc80.jpg"]
    ]
    raised = said_of("raises_halves")[-1]
    assert isinstance(raised, Raised)
    assert raised.error == r"FileNotFoundError: img\udc80.jpg"


def test_ids_that_are_not_found_are_told_without_a_traceback_of_ours() -> None:
    raised = said_of("without_ids")[-1]
    assert isinstance(raised, Raised)
    assert (raised.phase, raised.traceback) == ("looking for ids", "")
    assert "found: Counting" in raised.error


def test_a_file_with_the_name_of_another_module_is_not_mistaken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # a rank of a probe ends with its path; this process does not
    (tmp_path / "functools.py").write_text("def train(): return []\n")
    with pytest.raises(ImportError, match="another name"):
        found(f"{tmp_path}/functools.py:train", [])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        found(f"{tmp_path}/nowhere.py:train", [])


def test_what_a_factory_imports_is_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large_library.py").write_text("held = b'x' * (48 << 20)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Growth() as growth:
        import large_library  # type: ignore[import-not-found]
    assert len(large_library.held) == 48 << 20
    assert growth.bytes < 16 << 20
    with Growth() as growth:
        data = b"x" * (48 << 20)
    assert growth.bytes > len(data) // 2


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
    ],
)
def test_what_no_rank_could_be_told_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        examine("a:b", **wrong)


def test_only_what_other_processes_can_import_is_taken() -> None:
    from rankfeed.diagnostics.doctor.examining import _name_of

    assert _name_of(wrapped(pipelines.sound)) == f"{Path(pipelines.__file__).resolve()}:sound"
    of_a_notebook = types.FunctionType(compile("0", "/tmp/ipykernel_1/2.py", "eval"), {}, "train")
    for wrong in (of_a_notebook, Counting(3).state_dict, functools.partial(len), lambda: None):
        with pytest.raises(ArgumentError, match="cannot import this factory"):
            _name_of(wrong)


@pytest.mark.parametrize("code", ["not-counted", "never-ends"])
def test_what_was_not_counted_is_not_said_to_come_once(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Examination("a:b", (Finding(code, "note", "n"),), ())
    monkeypatch.setattr(Rankfeed, "examine", lambda self, factory, **options: told)
    assert told.sound
    assert "once" not in told.summary
    with pytest.raises(AssertionError, match=code):
        Rankfeed().assert_exactly_once("a:b")
    assert Rankfeed().assert_exactly_once("a:b", allow=[code]) is told


def test_a_machine_with_few_cpus_fails_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    few = (Finding("too-many-workers", "warning", "w"), Finding("slow-first-batch", "warning", "s"))
    grave = Finding("uneven-steps", "error", "u")
    for findings in (few, (*few, grave)):
        told = Examination("a:b", findings, ())
        monkeypatch.setattr(Rankfeed, "examine", lambda self, factory, told=told, **options: told)
        if grave not in findings:
            assert Rankfeed().assert_exactly_once("a:b") is told
            continue
        with pytest.raises(AssertionError, match="uneven-steps") as raised:
            Rankfeed().assert_exactly_once("a:b")
        assert "too-many-workers" not in str(raised.value)
