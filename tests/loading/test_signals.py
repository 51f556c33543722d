"""Signal handlers in the thread that iterates: what they raise reaches the caller, and what they read is right."""

from __future__ import annotations

import gc
import inspect
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rankfeed as rf
from rankfeed.errors import TransformError
from rankfeed.loading.engines import process

ROWS, BATCH = 24, 4
PACKAGE = str(Path(rf.__file__).parent)


class OutOfTimeError(Exception):
    """What a handler raises."""


#: Also what the package expects of others.
RAISED = (OutOfTimeError, TimeoutError, RuntimeError, ValueError, KeyError)


class Records:
    """A map-style Dataset with rows large enough for shared memory."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(20_000, index)}


def add_field(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "y": 1}


def arrow(folder: Path) -> Any:
    rows = ({"x": np.full(300, i), "r": np.arange(i % 5), "text": "ab"} for i in range(ROWS))
    rf.write(rows, folder / "arrow", progress=False, shard_bytes=12_000)
    return rf.open(folder / "arrow")


def parquet(folder: Path) -> Any:
    pq.write_table(pa.table({"x": list(range(ROWS))}), folder / "data.parquet", row_group_size=6)
    return rf.open(folder / "data.parquet")


def numpy(folder: Path) -> Any:
    np.savez(folder / "data.npz", x=np.arange(ROWS), y=np.arange(ROWS))
    return rf.open(folder / "data.npz")


def dataset(folder: Path) -> Any:
    return rf.from_dataset(Records())


def stream(folder: Path) -> Any:
    return rf.from_iterable(lambda: ({"x": i} for i in range(ROWS)))


PROCESSES = {"num_workers": 2, "worker_kind": "process"}
CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "copies": (arrow, {}),
    "copies in threads": (arrow, {"num_workers": 2}),
    "transform": (arrow, {"transform": add_field}),
    "transform in threads": (arrow, {"transform": add_field, "num_workers": 2}),
    "chunks": (parquet, {}),
    "chunks in threads": (parquet, {"num_workers": 2}),
    "dataset": (dataset, {}),
    "dataset in processes": (dataset, PROCESSES),
    "stream": (stream, {}),
    "stream in threads": (stream, {"num_workers": 2}),
    "stream in processes": (stream, PROCESSES),
}


@contextmanager
def handling(number: int, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def signals_at(is_due: Callable[[int], bool]) -> Iterator[Counter[str]]:
    """SIGUSR1 at some calls of functions of the package in this thread, which are counted.

    Python runs handlers at the beginning of a function, among other places; not where a generator is closed.
    Exceptions in finalizers are only printed, so no garbage of other tests is collected meanwhile.
    """
    counted = Counter[str]()

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            counted["calls"] += 1
            if is_due(counted["calls"]):
                signal.raise_signal(signal.SIGUSR1)

    before = sys.gettrace()
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(before)
        gc.enable()


def loader(source: Any, **options: Any) -> rf.Loader:
    return rf.Loader(source, BATCH, topology=rf.Topology(), **options)


def rows_of(batches: rf.Loader) -> Counter[int]:
    return Counter(int(row) for batch in batches for row in batch["x"].reshape(len(batch["x"]), -1)[:, 0])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case, marks=() if case in ("transform in threads", "dataset", "chunks") else pytest.mark.slow)
        for case in CASES
    ],
)
def test_an_exception_raised_by_a_signal_handler_reaches_the_caller_and_the_loader_stays_usable(
    name: str, tmp_path: Path, thorough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "INLINE_AFTER", 60.0)
    make, options = CASES[name]
    source, counts = make(tmp_path), Counter[str]()
    with signals_at(lambda call: False) as counted:
        list(loader(source, **options))
    interrupted = (4 if "processes" in name else 20) * (5 if thorough else 1)

    def handler(*_: Any) -> None:
        counts["handler"] += 1
        raise RAISED[counts["handler"] % len(RAISED)]("out of time")

    ours = loader(source, **options)
    with handling(signal.SIGUSR1, handler):
        for at in range(1, counted["calls"], 1 + counted["calls"] // interrupted):
            if at % 2:
                ours = loader(source, **options)  # which looks at the first samples
            ours.set_epoch(at)
            before = counts["handler"]
            with suppress(*RAISED), signals_at(at.__eq__):
                for _ in ours:
                    pass
                assert counts["handler"] == before, f"nothing reached the caller after call {at}"
            assert rows_of(ours) == Counter(range(ROWS)), f"after an interruption at call {at}"
    assert counts["handler"] > 1


def test_an_exception_of_a_signal_handler_that_uninstalls_itself_reaches_the_caller() -> None:
    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise OutOfTimeError

    class Interrupted(Records):
        fingerprint = "interrupted"

        def __init__(self, at: int) -> None:
            self._at = at

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == self._at:
                signal.raise_signal(signal.SIGUSR1)
            return super().__getitem__(index)

    for at in (0, 3, ROWS - 1):  # the first while the fields are learned
        ours = loader(rf.from_dataset(Interrupted(at)))
        with handling(signal.SIGUSR1, once), pytest.raises(OutOfTimeError):
            for _ in ours:
                pass


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_exceptions_of_an_interval_timer_handler_reach_the_caller_and_the_loader_stays_usable(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ({"x": np.full(512, i), "r": np.arange(i % 50)} for i in range(3000))
    rf.write(rows, tmp_path / "data", progress=False)
    ours = rf.Loader(rf.open(tmp_path / "data"), 8, shuffle=True, num_workers=workers, topology=rf.Topology())
    chance, counted = random.Random(1), Counter[str]()

    def handler(*_: Any) -> None:
        counted["handler"] += 1
        raise OutOfTimeError

    def ignored(unraisable: Any) -> None:
        """Python ignores what is raised in callbacks of the garbage collector; hypothesis has one."""
        counted["ignored"] += not unraisable.exc_traceback.tb_frame.f_code.co_filename.startswith(PACKAGE)

    monkeypatch.setattr(sys, "unraisablehook", ignored)
    with handling(signal.SIGVTALRM, handler):
        for _ in range(40):
            try:
                try:
                    signal.setitimer(signal.ITIMER_VIRTUAL, chance.uniform(5e-4, 1e-2))
                    for _ in ours:
                        pass
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            except OutOfTimeError:
                counted["caller"] += 1
    assert counted["caller"] + counted["ignored"] == counted["handler"] > 0
    assert rows_of(ours) == Counter(range(3000))


def test_a_transform_that_converts_a_signal_handler_exception_raises_transform_error(tmp_path: Path) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except OutOfTimeError as error:
            raise ValueError("too slow") from error
        return sample

    def handler(*_: Any) -> None:
        raise OutOfTimeError

    with handling(signal.SIGUSR1, handler), pytest.raises(TransformError, match="too slow"):
        list(loader(arrow(tmp_path), transform=fail))


@pytest.mark.parametrize("name", ["copies in threads", "copies", "chunks", "chunks in threads"])
@pytest.mark.parametrize("make", [arrow, parquet, numpy])
def test_a_signal_handler_that_reads_the_source_during_iteration_gets_correct_samples(
    name: str, make: Callable[[Path], Any], tmp_path: Path
) -> None:
    _, options = CASES[name]
    source, wrong, calls = make(tmp_path), Counter[int](), 0

    def handler(*_: Any) -> None:
        nonlocal calls
        calls += 1
        index = calls * 7 % ROWS
        wrong[index] += not (np.asarray(source.fetch([index]).samples()[0]["x"]) == index).all()

    is_reading = False

    def is_due(call: int) -> bool:  # not at the calls of the handler itself
        nonlocal is_reading
        if is_reading or call % 3:
            return False
        is_reading = True
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            is_reading = False
        return False

    with handling(signal.SIGUSR1, handler), signals_at(is_due):
        ours = loader(source, **options)
        counted = [rows_of(ours) for _ in range(3)]
    assert counted == [Counter(range(ROWS))] * 3
    assert calls > 10
    assert not +wrong
