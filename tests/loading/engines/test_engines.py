"""Every engine delivers the same batches and raises the same errors of the user's code, and none hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.loading.feeds import (
    ENGINES,
    NAMES,
    Memory,
    assert_once,
    bad_at_13,
    batch_noise,
    delivered,
    every_kind,
    feed,
    not_picklable,
    plain,
    same,
    slowly,
    take,
    to_none,
)
from tests.support.marks import slow

from rankfeed import errors
from rankfeed.columns.columns import Columns
from rankfeed.loading import Loader, from_iterable
from rankfeed.sources import from_dataset
from rankfeed.topology import Topology

every_engine = pytest.mark.parametrize("engine", ENGINES, ids=NAMES)


def place_of(sample_id: int, world_size: int) -> tuple[int, int]:
    """Rank and step that read a sample."""
    for rank in range(world_size):
        for step, batch in enumerate(feed(rank, world_size)):
            if sample_id in batch["id"]:
                return rank, step
    raise AssertionError


@every_engine
def test_a_transform_that_raises_gives_a_transform_error_naming_sample_rank_and_step(
    engine: dict[str, Any],
) -> None:
    rank, step = place_of(13, 2)
    loader = feed(rank, 2, transform=bad_at_13, **engine)
    iterator = iter(loader)
    take(iterator, step)
    with pytest.raises(errors.TransformError, match="the transform raised") as caught:
        next(iterator)
    text = str(caught.value)
    assert f"sample 13, rank {rank}, epoch 0, step {step}" in text
    assert "no thirteenth" in text
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError) or "bad_at_13" in str(cause)
    # What was delivered before it is where the loader stands.
    assert loader.state_dict()["steps"] == step


def exits_at_13(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["y"] == 130:
        sys.exit(0)
    return sample


class Exits:
    """A Dataset whose 14th sample ends the process."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, int]:
        return exits_at_13({"y": 10 * index})


class Interrupted(BaseException):
    """As a library of the user's may raise, and not caught by ``except Exception``."""


def interrupted_at_13(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["y"] == 130:
        raise Interrupted("thirteen")
    return sample


def exits(*_: Any) -> Any:
    sys.exit("no licence")


def raises_ours(sample: dict[str, Any]) -> Any:
    raise errors.SourceError("cannot find it")


def with_valid(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "valid": 1}


# options of a loader with a function that fails, parts of the error
FAILING: list[tuple[dict[str, Any], str]] = [
    ({"transform": exits_at_13}, "SystemExit: 0"),
    ({"batch_transform": exits}, "SystemExit: no licence"),
    ({"collate_fn": exits}, "SystemExit: no licence"),
    ({"transform": to_none}, r"returned None.*sample \d+, rank 0.*step 0"),
    ({"transform": raises_ours}, r"SourceError: cannot find.*sample \d+, rank 0"),
    ({"batch_transform": lambda batch: 1 // 0}, "ZeroDivisionError.*rank 0, epoch 0, step 0"),
    ({"collate_fn": lambda samples: 1 // 0}, "ZeroDivisionError.*rank 0, epoch 0, step 0"),
    ({"transform": lambda sample: {"y": object()}}, "'y' cannot be collated.*sample 0, .*before the first"),
    ({"transform": lambda row: row if row["y"] % 20 else {"y": 1}}, r"different keys.*sample \d+, .*step \d"),
    ({"collate_fn": len, "id_column": "id"}, "cannot be added to a batch.*rank 0, epoch 0, step 0"),
    ({"collate_fn": len, "id_column": None, "tail": "pad"}, "cannot be added to a batch.*rank 0, epoch 0, step 0"),
    ({"transform": lambda sample: {"tokens_lengths": 1, **sample}}, "name.*step 0"),
    ({"transform": lambda sample: {**sample, "id": 1}}, "name.*step 0"),
    ({"transform": with_valid, "tail": "pad"}, "name.*step 0"),
]


@every_engine
def test_failing_transform_and_collate_functions_raise_transform_error_with_sample_and_step(
    engine: dict[str, Any],
) -> None:
    for options, parts in FAILING:
        with pytest.raises(errors.TransformError, match=f"(?s){parts}"):
            list(feed(**options, **engine))
    assert "valid" in next(iter(feed(transform=with_valid, **engine))), "only with padding rows is it taken"


@every_engine
def test_a_dataset_or_stream_that_calls_sys_exit_raises_source_or_stream_error(engine: dict[str, Any]) -> None:
    with pytest.raises(errors.SourceError, match=r"(?s)SystemExit: 0.*sample 13"):
        list(Loader(from_dataset(Exits()), 5, **engine))
    with pytest.raises(errors.StreamError, match="SystemExit: 0"):
        list(Loader(from_iterable(lambda: (exits_at_13({"y": 10 * index}) for index in range(20))), 5, **engine))


@every_engine
def test_a_base_exception_of_the_transform_ends_the_iteration(engine: dict[str, Any]) -> None:
    processes = engine.get("worker_kind") == "process"
    with pytest.raises(errors.WorkerError if processes else Interrupted, match="thirteen"):
        list(feed(transform=interrupted_at_13, **engine))


@every_engine
def test_a_loader_can_be_iterated_again_after_a_transform_error(engine: dict[str, Any]) -> None:
    loader = feed(transform=bad_at_13, **engine)
    for _ in range(2):
        with pytest.raises(errors.TransformError):
            list(loader)
        assert loader.epoch == 0
    assert_once(delivered(list(feed(**engine))), 50)


@every_engine
def test_a_corrupt_source_raises_its_own_error_in_every_engine(engine: dict[str, Any]) -> None:
    iterator = iter(Loader(Broken(50), 4, topology=Topology(), **engine))
    take(iterator, 5)
    with pytest.raises(errors.CorruptError, match="shard 3 is damaged"):
        next(iterator)


class Broken(Memory):
    def fetch(self, sample_ids: Any, columns: Any = None) -> Columns:
        if 20 in sample_ids:
            raise errors.CorruptError("shard 3 is damaged", where="offset 12")
        return super().fetch(sample_ids, columns)


SAME: list[dict[str, Any]] = [
    *(
        {"size": 41, "lanes": 3, "window": 10, "tail": tail, "shuffle": shuffle}
        for tail in ("even", "drop", "pad")
        for shuffle in ("none", "global", "window")
    ),
    *({"ragged": "pad", "pad_to": 8}, {"ragged": "nested"}, {"ragged": "list"}, {"prefetch_factor": 5}),
    {"transform": plain, "batch_transform": batch_noise, "tail": "pad"},
    {"collate_fn": every_kind},
]


@every_engine
@pytest.mark.parametrize("options", SAME, ids=lambda options: " ".join(options) or "none")
def test_batches_are_the_same_bytes_in_every_engine(engine: dict[str, Any], options: dict[str, Any]) -> None:
    assert same(list(feed(1, 3, **options, **engine)), list(feed(1, 3, **options)))


def test_a_batch_that_cannot_be_pickled_raises_worker_error_naming_the_step() -> None:
    with pytest.raises(errors.WorkerError, match=r"(?s)cannot be sent.*lock.*rank 0, step 0"):
        list(feed(collate_fn=not_picklable, num_workers=2, worker_kind="process"))
    assert next(iter(feed(collate_fn=not_picklable, num_workers=1)))["lock"].acquire()


def test_a_loader_with_worker_threads_works_in_a_child_forked_during_iteration() -> None:
    loader = feed(num_workers=2)
    iterator = iter(loader)
    expected = delivered([next(iterator)])
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        theirs.send(delivered(list(loader)))

    process = context.Process(target=child)
    process.start()
    assert ours.poll(60)
    ids = ours.recv()
    process.join()
    assert ids[: len(expected)] == expected
    assert_once(ids, 50)
    assert len(delivered(list(iterator))) == 50 - len(expected)


def test_a_loader_can_be_iterated_outside_the_main_thread() -> None:
    for engine in ENGINES:
        loader, out = feed(**engine), []
        thread = threading.Thread(target=lambda loader=loader, out=out: out.extend(loader))
        thread.start()
        thread.join()
        assert_once(delivered(out), 50)


def test_worker_threads_end_after_breaking_out_of_the_loader() -> None:
    before = threading.active_count()
    loader = feed(num_workers=3, size=2000)
    for _ in range(5):
        for _batch in loader:
            break
    leftover = [each for each in threading.enumerate() if each.name.startswith("rankfeed")]
    for thread in leftover:
        thread.join(30)
    assert threading.active_count() <= before


HANGING = """
import sys, threading, time
import rankfeed as rf

held = threading.Event()

def hang(sample):
    if sample["x"] == 10:  # not one that is probed
        held.set()
        time.sleep(3600)
    if sample["x"] == 3 and sys.argv[1] == "error":
        raise KeyError("four")
    return sample

def numbers():
    yield from ({"x": number} for number in range(9))
    held.set()
    time.sleep(3600)

options = dict(num_workers=2, prefetch_factor=8)
stream = iter(rf.Loader(rf.from_iterable(numbers), 1, **options))
next(stream)
held.wait()
held.clear()
iterator = iter(rf.Loader(rf.from_dataset([{"x": number} for number in range(40)]), 1, transform=hang, **options))
print(next(iterator)["x"].item(), flush=True)
held.wait()
del stream
if sys.argv[1] == "exit":
    sys.exit(5)
list(iterator)
"""


@pytest.mark.parametrize(("ending", "status"), [("error", 1), slow("exit", 5)])
def test_a_hanging_transform_or_stream_does_not_keep_the_process_from_exiting(ending: str, status: int) -> None:
    script = [sys.executable, "-c", HANGING, ending]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (status, "0\n"), done.stderr
    assert ("KeyError: 'four'" in done.stderr) == (ending == "error")
    assert "Exception ignored" not in done.stderr


def test_a_stream_is_not_reopened_while_the_thread_of_an_abandoned_iteration_still_reads_it() -> None:
    reading, free = threading.Event(), threading.Event()
    order: list[str] = []

    def numbers() -> Iterator[dict[str, int]]:
        order.append("begun")
        yield {"x": 0}
        yield {"x": 1}
        reading.set()
        free.wait(60)
        order.append("read")
        yield {"x": 2}

    loader = Loader(from_iterable(numbers), 1, num_workers=1)
    for _ in loader:
        reading.wait(60)
        break  # waits a second at most for the read
    threading.Timer(0.1, free.set).start()
    assert [batch["x"].item() for batch in loader] == [0, 1, 2]
    assert order == ["begun", "read", "begun", "read"]


def test_a_child_forked_while_worker_threads_build_batches_can_iterate_without_deadlock() -> None:
    loader = feed(size=4000, batch_size=2, num_workers=3)
    take(iter(loader), 200)  # by now batches are made a few at a time
    iterator = iter(loader)
    for _ in range(20):
        take(iterator, 3)
        pid = os.fork()
        if pid == 0:
            code = 1
            with suppress(BaseException):
                signal.alarm(30)
                code = 0 if len(take(iter(loader), 20)) == 20 else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_two_concurrent_iterators_during_engine_tuning_give_equal_batches() -> None:
    loader = feed(size=64, batch_size=1, transform=slowly, num_workers=1)
    assert all(same(one, other) for one, other in zip(loader, loader, strict=True))
