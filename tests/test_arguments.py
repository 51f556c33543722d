"""Wrong and unusual arguments of every public function end in a RankfeedError, or in a right result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.arguments import LIMIT, Unprintable, cases, failure, rows, targets
from tests.support.environ import of_no_launcher

import rankfeed as rf
from rankfeed.errors import ArgumentError, RankfeedError, StateError

ROOT = Path(__file__).parent.parent
TARGETS = targets()
#: Cases of each target in the plain tests, spread evenly over all parameters and values.
FEW = 20


@pytest.mark.parametrize(
    "options",
    [
        *({"topology": 1}, {"topology": rf.Topology}, {"plan": 1}, {"plan": {}}, {"plan": rf.Plan}),
        *({"shuffle": [True]}, {"shuffle": 1}, {"columns": 1}, {"columns": "x"}, {"num_workers": "2"}),
        *({"num_workers": 2**70}, {"num_workers": True}, {"batch_size": 2.0}, {"batch_size": 2**70}),
        *({"prefetch_factor": 2**70}, {"transform": 1}, {"batch_transform": "x"}, {"collate_fn": 1}),
        *({"audit": 1}, {"device": 1.5}, {"id_column": 1}, {"id_column": ""}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True], ids=["source", "stream"])
def test_loader_raises_argument_error_for_an_invalid_argument_when_it_is_made(
    options: dict[str, Any], stream: bool
) -> None:
    source: Any = rf.from_iterable(lambda: [{"x": 1}]) if stream else rows()
    with pytest.raises(ArgumentError, match=next(iter(options))):
        rf.Loader(source, **options)


def test_numpy_scalars_are_accepted_as_arguments_like_python_numbers_and_bools() -> None:
    plain = [batch["x"].tolist() for batch in rf.Loader(rows(300), 100, shuffle=True)]
    source = rows(300)
    loader = rf.Loader(source, np.uint8(100), shuffle=np.True_, seed=np.int8(0), num_workers=np.uint8(0))  # type: ignore[arg-type]
    assert [batch["x"].tolist() for batch in loader] == plain
    schedule = rf.Schedule(rf.Plan(1000), batch_size=np.uint8(200), topology=rf.Topology(np.uint8(1), np.uint8(2)))  # type: ignore[arg-type]
    assert schedule.global_batch_size == 400


@pytest.mark.parametrize("index", [1.9, "1", None, True, np.float64(1), [1], slice("a")], ids=repr)
def test_indexing_a_source_with_anything_but_an_integer_raises_argument_error(index: Any) -> None:
    with pytest.raises(ArgumentError):
        rows()[index]


def test_slicing_a_source_raises_an_error_that_names_select_and_fetch() -> None:
    source = rows()
    with pytest.raises(ArgumentError, match=r"(?s)source\.select\(.*source\.fetch\("):
        source[0:2]
    assert [source[index]["x"] for index in (np.uint8(3), -1)] == [3, 9]
    assert [sample["x"] for sample in source.select(slice(0, 2))] == [0, 1]


@pytest.mark.parametrize("plan", [np.int64(3), 3, None, "x", [], {"samples": np.int64(3)}], ids=repr)
def test_loading_a_state_with_an_invalid_plan_raises_state_error(plan: Any) -> None:
    for source in (rows(), rf.from_iterable(lambda: [{"x": 1}])):
        loader = rf.Loader(source)
        with pytest.raises(StateError):
            loader.load_state_dict({**loader.state_dict(), "plan": plan})


def test_prepare_once_raises_argument_error_for_an_invalid_argument_before_it_builds(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = [{"retries": -1}, {"retries": "1"}, {"timeout": "1"}, {"key": 1}, {"build": 1}]
    for options in calls:
        with pytest.raises(ArgumentError, match=next(iter(options))):
            rf.prepare_once(tmp_path / "once", **{"build": lambda staging: None, **options})
    assert not list(tmp_path.iterdir())


class Runs:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("allow", ["False", "no", "", 1, 0, None, [], "yes", np.int64(1)], ids=repr)
def test_allow_pickle_other_than_a_bool_raises_argument_error_and_unpickles_nothing(
    allow: Any, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    np.save(tmp_path / "rows.npy", np.array([Runs(marker)], object), allow_pickle=True)
    with pytest.raises(ArgumentError, match=r"invalid allow_pickle"):
        rf.open(tmp_path / "rows.npy", allow_pickle=allow)
    for refused in (False, np.False_):
        with pytest.raises(RankfeedError):
            rf.open(tmp_path / "rows.npy", allow_pickle=refused)[0]  # type: ignore[arg-type]
    assert not marker.exists()


class Failing:
    """A Dataset whose sample 3 fails with an exception that has no text."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == 3:
            raise Unprintable
        return {"x": index}


def fails_at_three(sample: dict[str, int]) -> dict[str, int]:
    """Fails as the Dataset does."""
    if sample["x"] == 3:
        raise Unprintable
    return sample


def never_collates(samples: list[Any]) -> Any:
    """Fails on each batch."""
    raise Unprintable


def ends_unprintably() -> Iterator[dict[str, int]]:
    """A stream that fails after three samples."""
    yield from ({"x": number} for number in range(3))
    raise Unprintable


@pytest.mark.parametrize(
    ("source", "options", "where"),
    [
        (Failing(), {}, r"sample 3"),
        ([{"x": i} for i in range(6)], {"transform": fails_at_three}, r"sample 3, rank 0, epoch 0, step 1"),
        ([{"x": 0}], {"collate_fn": never_collates}, r"rank 0, epoch 0, step 0"),
        ([{"x": 0}], {"batch_transform": never_collates}, r"rank 0, epoch 0, step 0"),
        (rf.from_iterable(ends_unprintably), {}, r"rank 0"),
    ],
    ids=["dataset", "transform", "collate_fn", "batch_transform", "stream"],
)
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}], ids=["inline", "thread"])
def test_an_exception_whose_str_fails_is_reported_with_its_sample_rank_and_step(
    source: Any, options: dict[str, Any], where: str, workers: dict[str, int]
) -> None:
    with pytest.raises(RankfeedError, match=rf"(?s)Unprintable; its __str__ raised UserError.*where: .*{where}"):
        list(rf.Loader(source, 2, **options, **workers))


def test_a_worker_process_reports_an_exception_whose_str_fails_with_its_sample_and_step() -> None:
    loader = rf.Loader(
        [{"x": number} for number in range(6)], 2, transform=fails_at_three, num_workers=1, worker_kind="process"
    )
    with pytest.raises(
        RankfeedError, match=r"(?s)Unprintable; its __str__ raised.*sample 3, rank 0, epoch 0, step 1"
    ):
        list(loader)


def test_every_public_name_is_a_target_of_the_argument_tests() -> None:
    """A new public function is fuzzed, or named here with the reason."""
    no_functions = {"__version__", "errors", "AuditReport", "Source"}  # Source is abstract, AuditReport a result
    named = {name.replace(",", ".").split(".")[0].split(" ")[0] for name in TARGETS}
    assert set(rf.__all__) - no_functions - named == set()


@pytest.mark.parametrize("name", TARGETS)
def test_some_odd_arguments_raise_a_rankfeed_error_or_give_a_right_result(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = TARGETS[name]
    few = FEW // 4 if name.startswith("rankfeed ") else FEW  # a command takes longer than a function
    every = max(1, len(cases(target)) // few)
    failures = {
        (parameter, value): failed
        for parameter, value in cases(target, every, zlib.crc32(name.encode()))
        if (failed := failure(target, parameter, value)) is not None
    }
    assert failures == {}


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_all_odd_arguments_raise_a_rankfeed_error_or_give_a_right_result(name: str, tmp_path: Path) -> None:
    """Each target in a process of its own: a value that crashes the interpreter, or hangs in C, is found too."""
    environ = {**of_no_launcher(), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.support.arguments", name, "1", "0"]
    count = len(cases(TARGETS[name]))
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=60 + LIMIT * count
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    begun = [line[1:] for line in lines if line[0] == "begin"]
    ended = [line[1] for line in lines if line[0] == "end"]
    failures = [(case, failed) for case, failed in zip(begun, ended, strict=False) if failed is not None]
    if len(ended) < count:
        failures.append((begun[-1] if begun else None, f"exit status {done.returncode}: {done.stderr[-2000:]}"))
    print(f"{name}: {len(ended)} cases, {len(failures)} failures")
    assert failures == [], Counter(failed for _, failed in failures)
