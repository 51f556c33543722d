"""Factories with faults of a program: they raise, hang, print, leave processes, or return no loader."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

SAMPLES = 8
#: File that lists the processes that `leaves_processes` starts.
PIDS = "BAD_FACTORIES_PIDS"


def batches() -> list[Any]:
    return [{"sample_id": [index]} for index in range(SAMPLES)]


def fail() -> Any:
    raise KeyError("the user's own")


def hang() -> Any:
    time.sleep(1000)


class Stateful:
    """A loader with a state, whose methods can be replaced."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.start = 0
        for name, method in methods.items():
            setattr(self, name, method)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for self.step in range(start, SAMPLES):
            yield {"sample_id": [self.step]}

    def __len__(self) -> int:
        return SAMPLES

    def state_dict(self) -> Any:
        return {"step": self.step + 1}

    def load_state_dict(self, state: Any) -> None:
        self.start = state["step"]


def state_raises() -> Any:
    return Stateful(state_dict=fail)


def state_hangs() -> Any:
    return Stateful(state_dict=hang)


def state_cannot_be_saved() -> Any:
    return Stateful(state_dict=lambda: {"function": lambda: 0})


def load_raises() -> Any:
    return Stateful(load_state_dict=lambda state: fail())


def load_hangs() -> Any:
    return Stateful(load_state_dict=lambda state: hang())


def load_exits() -> Any:
    return Stateful(load_state_dict=lambda state: os._exit(0))


def set_epoch_raises() -> Any:
    return Stateful(set_epoch=lambda epoch: fail())


def set_epoch_hangs() -> Any:
    return Stateful(set_epoch=lambda epoch: hang())


def raises_after_the_last_batch() -> Iterator[Any]:
    yield from batches()
    fail()


def exits_in_an_epoch() -> Iterator[Any]:
    yield from batches()[:3]
    sys.exit(0)


def raises_a_long_message() -> Any:
    raise ValueError("x" * 10_000_000)


def returns_text() -> Any:
    return "a.jsonl"


def returns_a_mapping() -> Any:
    return {"train": batches()}


def contains_itself() -> Any:
    batch: list[Any] = [[1]]
    batch.append(batch)
    return [batch] * 4


class Guarded:
    """Raises for attributes that it does not have, with an error of its own."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no attribute {name}")

    def __iter__(self) -> Iterator[Any]:
        return iter(batches())


def guards_its_attributes() -> Any:
    return Guarded()


def leaves_processes() -> Any:
    """Processes in sessions of their own, without environment, and forked twice."""
    with open(os.environ[PIDS], "a") as pids:
        clean = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
        pids.write(f"{clean.pid}\n")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(os.environ[PIDS], "a") as pids:
                pids.write(f"{os.getpid()}\n")
            time.sleep(1000)
        os._exit(0)
    while Path(os.environ[PIDS]).read_text().count("\n") % 2:
        time.sleep(0.01)
    return batches()


def dies_with_a_process() -> Any:
    leaves_processes()
    os._exit(1)


class Talkative(Dataset[Any]):
    """Prints in all ways, and hangs at one sample if it is told to."""

    def __init__(self, hangs_at: int | None = None) -> None:
        self.hangs_at = hangs_at

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        print("{}", flush=True)
        os.write(1, b"[1]\n")
        subprocess.run(["echo", "null"], check=True)
        if index == self.hangs_at:
            hang()
        return {"sample_id": index, "x": [float(index)]}


def prints(num_workers: int) -> Any:
    print("{}", file=sys.__stdout__)
    return DataLoader(Talkative(), 2, num_workers=num_workers)


def hangs_in_a_worker(num_workers: int) -> Any:
    return DataLoader(Talkative(hangs_at=5), 1, num_workers=num_workers)


class Records(Dataset[Any]):
    """Reads through one handle, which forked workers move for each other, and fails at once."""

    def __init__(self) -> None:
        self.file = open(__file__, "rb", buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        self.file.seek(8 * index + 8)
        raise ValueError("the magic number is wrong")


def reads_wrong_records(num_workers: int) -> Any:
    return DataLoader(Records(), 4, num_workers=num_workers, multiprocessing_context="fork")
