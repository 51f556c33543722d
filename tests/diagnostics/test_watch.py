"""`rf.watch` shows the figures of a loader in any state of the loader, and never ends the training."""

import gc
import io
import os
import queue
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.diagnostics.fake_loader import FIGURES, FakeLoader, fake_loader

import rankfeed as rf
from rankfeed.diagnostics.watch.watching import RecentRates, line_of
from rankfeed.errors import ArgumentError

LIMIT = 30
#: Seconds between readings: only the last one, at the end, is taken.
AT_END = 3600.0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rankfeed-watch"]


def small_loader(count: int = 8) -> rf.Loader:
    return rf.Loader(rf.from_dataset([{"x": float(i)} for i in range(count)]), batch_size=2)


def test_watch_reports_the_final_figures_when_its_block_ends() -> None:
    readings: list[Any] = []
    loader = small_loader()
    with rf.watch(loader, to=readings.append, every=AT_END, name="train"):
        for _ in range(2):
            assert len(list(loader)) == 4
    (last,) = readings
    assert (last["rankfeed/train/epoch"], last["rankfeed/train/epoch_step"], last["rankfeed/train/steps"]) == (
        1,
        4,
        8,
    )
    assert last["rankfeed/train/samples_per_second"] > 0
    assert last.keys() == {f"rankfeed/train/{figure}" for figure in loader.stats()}
    assert threads() == []


def test_watch_reports_figures_repeatedly_while_its_block_runs() -> None:
    readings = threading.Semaphore(0)
    with rf.watch(fake_loader(), to=lambda _: readings.release(), every=0.01):
        for _ in range(3):
            assert readings.acquire(timeout=LIMIT)


def test_figures_of_two_watched_loaders_are_prefixed_with_their_names() -> None:
    readings: list[Any] = []
    train = rf.watch(fake_loader(), to=readings.append, every=AT_END, name="train")
    with rf.watch(fake_loader(epoch=5), to=readings.append, every=AT_END, name="test"):
        pass
    train.close()
    assert [reading.get("rankfeed/train/epoch") for reading in readings] == [None, 2]
    assert [reading.get("rankfeed/test/epoch") for reading in readings] == [5, None]


def test_watch_reports_a_growing_wait_while_a_batch_is_blocked_and_counters_never_decrease() -> None:
    is_released, readings = threading.Event(), queue.Queue[dict[str, Any]]()

    def block(sample: Any) -> Any:
        assert is_released.wait(LIMIT)
        return sample

    loader = rf.Loader(rf.from_dataset([{"x": 1.0}] * 4), batch_size=2, transform=block, topology=rf.Topology())
    consumer = threading.Thread(target=lambda: list(loader))
    with rf.watch(loader, to=readings.put, every=0.01):
        consumer.start()
        values = [readings.get(timeout=LIMIT) for _ in range(3)]
        is_released.set()
        consumer.join(LIMIT)
    values += readings.queue
    waits = [value["rankfeed/waiting_seconds"] for value in values]
    assert 0 < waits[0] < waits[1] < waits[2]
    assert waits[-1] == 0
    for name in ("rankfeed/seconds", "rankfeed/steps", "rankfeed/samples"):
        counts = [value[name] for value in values]
        assert counts == sorted(counts)


def test_close_in_a_forked_child_returns_at_once_and_the_parent_is_still_watched() -> None:
    readings = threading.Semaphore(0)
    watching = rf.watch(fake_loader(), to=lambda _: readings.release(), every=0.01)
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)
        watching.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    while readings.acquire(blocking=False):
        pass
    assert readings.acquire(timeout=LIMIT)
    watching.close()
    assert threads() == []


def test_watch_reports_nothing_for_a_loader_that_is_never_iterated() -> None:
    readings: list[Any] = []
    with rf.watch(small_loader(), to=readings.append, every=AT_END):
        pass
    assert readings == []


def test_an_error_in_the_training_loop_ends_the_watch_and_is_raised() -> None:
    readings: list[Any] = []
    loader = small_loader()

    def train() -> None:
        with rf.watch(loader, to=readings.append, every=AT_END):
            for _ in loader:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert [reading["rankfeed/epoch_step"] for reading in readings] == [1]
    assert threads() == []


def test_a_watch_callback_that_raises_is_called_once_with_a_warning_and_training_continues() -> None:
    calls = []

    def full(figures: Any) -> None:
        calls.append(figures)
        raise OSError(28, "No space left on device")

    loader = small_loader()

    def train() -> None:
        with rf.watch(loader, to=full, every=0.01):
            batches = iter(loader)
            next(batches)
            for ticker in threads():  # which may have ended already
                ticker.join(LIMIT)
            assert len(list(batches)) == 3

    with pytest.warns(RuntimeWarning, match=r"no longer watched: OSError: .*No space left") as said:
        train()
    assert len(said) == len(calls) == 1


def test_a_loader_can_be_watched_again_and_a_watch_can_be_closed_twice() -> None:
    readings: list[Any] = []
    loader = FakeLoader()
    for _ in range(2):
        watching = rf.watch(loader, to=readings.append, every=AT_END)
        watching.close()
        watching.close()
    assert len(readings) == 2


def test_the_watch_thread_ends_when_its_loader_is_garbage_collected() -> None:
    loader = FakeLoader()
    rf.watch(loader, to=lambda _: None, every=0.01)
    (ticker,) = threads()
    del loader
    gc.collect()
    ticker.join(LIMIT)
    assert not ticker.is_alive()


@pytest.mark.parametrize(
    ("rank", "all_ranks", "shown"), [(0, False, 1), (1, False, 0), (1, True, 1), (0, True, 1)]
)
def test_watch_reports_only_rank_0_unless_all_ranks_is_true(rank: int, all_ranks: bool, shown: int) -> None:
    readings: list[Any] = []
    with rf.watch(fake_loader(rank), to=readings.append, every=AT_END, all_ranks=all_ranks):
        pass
    assert len(readings) == shown


def test_watch_writes_a_line_to_a_log_only_when_figures_change() -> None:
    loader = FakeLoader()
    # capsys would lose what is written while it is emptied.
    with redirect_stderr(io.StringIO()) as log, rf.watch(loader, every=0.01, name="train"):
        (ticker,) = threads()
        while not log.getvalue():
            time.sleep(0.01)
        loader.figures |= {"steps": 22, "epoch_step": 4, "waiting_seconds": 0.5}
    first, second = log.getvalue().splitlines()
    assert not ticker.is_alive()
    said = r"\] train, rank 0, epoch 2, step {} of 9, .* samples/s, waited [^,]+, cache hits 50%, 1.0 GB"
    assert re.search(said.format(3) + "$", first)
    assert re.search(said.format(4) + "$", second)


def test_watch_logs_a_long_wait_for_data_repeatedly() -> None:
    with redirect_stderr(io.StringIO()) as log, rf.watch(fake_loader(waiting_seconds=34.0), every=0.01):
        while log.getvalue().count("waiting for data for 34 s") < 3:
            time.sleep(0.01)


def test_watch_writes_no_escape_codes_to_a_file_even_if_color_is_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with rf.watch(fake_loader(), every=AT_END):
        pass
    written = capsys.readouterr().err
    assert written.startswith("[rankfeed ")
    assert "\x1b" not in written


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rf.watch([1, 2]), "invalid loader"),
        (lambda: rf.watch(fake_loader(), to="tensorboard"), r"invalid to\n.*a function"),
        (lambda: rf.watch(fake_loader(), to=3), "invalid to"),
        (lambda: rf.watch(fake_loader(), name=3), "invalid name"),
        (lambda: rf.watch(fake_loader(), all_ranks=None), "invalid all_ranks"),
        (lambda: rf.watch(fake_loader(), every=0), "invalid every"),
        (lambda: rf.watch(fake_loader(), every=float("nan")), "invalid every"),
        (lambda: rf.watch(fake_loader(), every=float("inf")), "invalid every"),
    ],
)
def test_watch_raises_argument_error_for_invalid_arguments(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        call()
    assert threads() == []


def test_a_failing_watch_callback_with_warnings_as_errors_fails_only_the_watch_thread() -> None:
    said: list[Any] = []
    hook, threading.excepthook = threading.excepthook, said.append
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with rf.watch(fake_loader(), to=lambda _: 1 / 0, every=0.01):
                for ticker in threads():  # none if it has failed already
                    ticker.join(LIMIT)
    finally:
        threading.excepthook = hook
    assert len(said) == 1


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=100), st.floats(0.1, 1e6), st.floats(0, 1))
def test_recent_rates_equal_a_constant_speed_for_any_intervals_between_readings(
    pauses: list[float], speed: float, waited: float
) -> None:
    recent, now = RecentRates(), 0.0
    for pause in pauses:
        now += pause
        steady = {"steps": int(now), "samples": now * speed, "waited_seconds": now * waited}
        rates = recent.update(steady | {"samples_per_second": speed, "waited_share": waited}, now)
        assert rates["samples_per_second"] == pytest.approx(speed)
        assert rates["waited_share"] == pytest.approx(waited, abs=1e-6)


def test_recent_rates_fall_within_seconds_of_a_stall_and_are_steady_over_slow_steps() -> None:
    def speed(recent: RecentRates, second: int, **figures: float) -> float:
        return recent.update(FIGURES | figures, second)["samples_per_second"]

    recent = RecentRates()
    for second in range(100):
        speed(recent, second, steps=second, samples=10 * second)
    stalled = [speed(recent, second, steps=99, samples=990) for second in range(100, 120)]
    assert stalled == sorted(stalled, reverse=True)
    assert stalled[-1] < 5
    recent = RecentRates()
    for second in range(1000):  # a step of 1,000 samples in 60 seconds
        rate = speed(recent, second, steps=second // 60, samples=second // 60 * 1000)
        if second > 480:
            assert 1000 / 60 * 0.8 < rate < 1000 / 60 * 1.2


def test_watch_reports_zero_epoch_steps_for_a_stream_of_unknown_length() -> None:
    loader = rf.Loader(rf.from_iterable(lambda: ({"x": float(i)} for i in range(12))), batch_size=4)
    readings: list[dict[str, Any]] = []
    with rf.watch(loader, to=readings.append):
        for _ in range(2):
            assert len([*loader]) == 3
    last = {name.removeprefix("rankfeed/"): value for name, value in readings[-1].items()}
    assert (last["epoch"], last["epoch_step"], last["epoch_steps"]) == (1, 3, 0)
    assert loader.stats()["steps"] == 6


def test_recent_rates_are_computed_since_the_first_reading() -> None:
    recent = RecentRates()
    figures = {"steps": 4, "samples": 40, "waited_seconds": 1.0}
    first = recent.update(figures | {"samples_per_second": 8.0, "waited_share": 0.2}, now=5.0)
    second = recent.update(figures | {"steps": 9, "samples": 90, "waited_seconds": 1.5}, now=7.0)
    rates = [(reading["samples_per_second"], reading["waited_share"]) for reading in (first, second)]
    assert rates == [(8.0, 0.2), (25.0, 0.25)]


def test_line_of_formats_the_figures_of_a_rank() -> None:
    figures = FIGURES | {"epoch": 3, "epoch_step": 1204, "epoch_steps": 15625, "private_bytes": 1.25e9}
    figures |= {"waiting_seconds": 0.1, "cache_lookups": 100, "cache_hit_share": 0.984}
    figures |= {"samples_per_second": 8230.4, "waited_share": 0.021}
    line = "epoch 3, step 1,204 of 15,625, {} samples/s, waited 2%"
    assert line_of(figures, name="", rank=0) == f"rank 0, {line.format('8,230')}, cache hits 98%, 1.2 GB"
    stalled = {"waiting_seconds": 34.2, "cache_lookups": 0, "samples_per_second": 0.0}
    expected = f"train, rank 1, {line.format(0)}, 1.2 GB, waiting for data for 34 s"
    assert line_of(figures | stalled, name="train", rank=1) == expected
