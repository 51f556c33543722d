"""One rank of a job that writes: rank_job.py SOURCE DEST OUT FAULT STALL_TIMEOUT. The outcome goes into OUT."""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rankfeed as rf


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait, but for no longer than that."""
    for _ in range(int(seconds * 20)):
        if condition():
            return
        time.sleep(0.05)


class Mapped:
    """Makes none, one or two samples of one, until the fault that it was given."""

    def __init__(self, fault: str, awaited: Callable[[], bool] | None, happened: Path, others: int) -> None:
        self.fault = fault
        self.others = others
        self.awaited = awaited
        self.happened = happened
        self.calls = 0

    def __call__(self, sample: dict[str, object], rng: np.random.Generator) -> list[dict[str, object]]:
        self.calls += 1
        time.sleep(0.001)
        if self.calls == 60 and self.awaited is not None:
            # Else this rank might do all of the work before the other has come to its fault.
            self.happened.with_name(f"at-work-{os.getpid()}").touch()
            until(self.awaited)
        if self.fault == "same" and sample["id"] == 1100:
            time.sleep(1000)
        at_fault = self.fault in ("kill", "raise", "hang", "stop")
        if self.calls == 100 and at_fault:
            # Else the others might not have come yet, and have nothing to go on with. Some steps before the fault,
            # so that a rank that is stopped has just got on.
            until(lambda: len(list(self.happened.parent.glob("at-work-*"))) == self.others)
        if self.calls == 150 and at_fault:
            self.happened.touch()
            if self.fault == "hang":
                time.sleep(1000)
            if self.fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "raise":
                raise ValueError("the user's own")
        return [{"id": sample["id"], "noise": rng.random()}] * int(rng.integers(3))


def write(opened: rf.Source, dest: str, mapped: Mapped, options: dict[str, Any]) -> dict[str, object]:
    """What came of it."""
    try:
        key = os.environ.get("WRITE_KEY", "1")
        packed = rf.write(opened, dest, map=mapped, seed=4, shard_bytes=1000, key=key, **options)
    except rf.errors.RankfeedError as error:
        return {"error": str(error), "calls": mapped.calls}
    return {"fingerprint": packed.fingerprint, "calls": mapped.calls}


def append_more(opened: rf.Source, dest: str, told: Path, rank: int, options: dict[str, Any]) -> dict[str, object]:
    """What came of a second write into the folder, as soon as this rank was done with the first."""

    def changed(sample: dict[str, object]) -> dict[str, object]:
        return {"id": sample["id"], "noise": 0.5}

    packed = rf.write(opened.select(range(100)), dest, append=True, map=changed, key="more", **options)
    (told / f"second-{rank}").touch()
    return {"fingerprint": packed.fingerprint}


def main(source: str, dest: str, told: str, fault: str, stall_timeout: str) -> None:
    here = rf.Topology.detect()
    kind, _, rank = fault.partition(":")
    mine = kind if kind == "same" or (kind and here.rank == int(rank)) else ""
    if mine in ("late", "late-other"):
        held = Path(os.environ.get("HELD_UNTIL", "/"))
        time.sleep(3)
        for _ in range(1600):
            if held.exists():
                break
            time.sleep(0.05)
    opened = rf.open(source)
    if mine in ("other", "late-other"):
        opened = opened.select(range(100))
    happened = Path(told, "happened")
    awaited = None
    if kind in ("kill", "raise", "hang", "stop") and not mine:
        awaited = happened.exists
    if kind == "other" and not mine:
        awaited = Path(told, f"{rank}.json").exists  # the other rank has told what is wrong

    mapped = Mapped(mine, awaited, happened, here.world_size - 1)
    options = {"runner": "ranks", "stall_timeout": float(stall_timeout), "progress": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = write(opened, dest, mapped, options)
    if "WRITE_AGAIN" in os.environ:
        outcome = {**append_more(opened, dest, Path(told), here.rank, options), "first": outcome}
    outcome["warnings"] = [str(warning.message) for warning in caught]
    Path(told, f"{here.rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
