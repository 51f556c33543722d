"""What ranks do about one that does not answer: wait for so long, take over its work, and say whom they miss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankfeed.building.job import Job, pack_stretch
from rankfeed.building.rank_files import CLAIM, PLAN, REFUSALS, RUN, Plan, Run, get
from rankfeed.building.rank_hearts import Heart, MemberHeart, Silence, warn
from rankfeed.building.records import Part
from rankfeed.building.staging import is_whole, read_stretch
from rankfeed.errors import PackError
from rankfeed.topology import Topology

#: Ranks may reach `pack` this many times `patience` apart from each other, since the source is opened before it;
#: and for so long one may be at one sample until the pack is given up.
ARRIVAL = 5


class RankZero:
    """What another rank knows of rank 0."""

    def __init__(self, heart: MemberHeart, here: Topology, patience: float) -> None:
        self.heart = heart
        self.here = here
        self.patience = patience
        self.run = Run(-1, "", 0)
        self.over = False
        self._silence = Silence()
        self._began = time.monotonic()
        self._warned = False

    def look(self) -> Run:
        """What rank 0 says now.

        Raises:
            PackError: it failed, is gone, or hangs.
        """
        self.heart.step()
        now = time.monotonic()
        run = self._said()
        if run is not None:
            self.run, self.heart.answered = run, True
        if self.run.call > self.heart.said.call:
            raise self._gone(
                "this rank came too late: rank 0 is at its next pack into this folder",
                f"all ranks to call pack within {ARRIVAL * self.patience:g} seconds",
                "start the job again: what the others packed is there; patience=... waits longer",
            )
        if self.run.state == "done" and self.run.failure is None:
            return self.run
        heard = self.run.beat >= 0
        silent = self._silence.of("", self.run.beat, now) if heard else now - self._began
        if silent > (self.patience if heard else ARRIVAL * self.patience):
            raise self._gone(
                f"rank 0 has given no sign of life for {silent:.0f} seconds",
                "rank 0 plans and commits the pack" if heard else "rank 0 to call pack as well",
                "did rank 0 end, or does it see another folder? Started again, the job goes on where it stopped; "
                "patience=... waits longer",
            )
        still = self._silence.of("steps", self.run.steps, now) if heard else 0.0
        if still > ARRIVAL * self.patience and self.run.state == "working":
            raise self._gone(
                f"rank 0 lives, but has not got on with its work for {still:.0f} seconds",
                "rank 0 plans and commits the pack",
                "does map, or the reading of a sample, hang? Where it takes so long, patience=... waits longer",
            )
        if still > self.patience and not self._warned:
            self._warned = True
            warn(f"rank 0 lives, but has not got on with its work for {still:.0f} seconds")
        if self.run.failure is not None:
            self.over = True
            raise self.run.failure.error()
        return self.run

    def _said(self) -> Run | None:
        """What rank 0 says, if it is the rank 0 of this job: its answer has this rank's name in it."""
        ranks = self.heart.ranks
        for path in [ranks / RUN, *([] if self.heart.answered else ranks.glob(REFUSALS))]:
            run = get(path, Run)
            if run is not None and self.heart.said.name in run.members:
                later = run.call > self.heart.said.call
                return self.heart.ended or run if later else run
        return self.heart.ended

    def _gone(self, summary: str, expected: str, remedy: str) -> PackError:
        self.over = True
        where = f"rank {self.here.rank} of {self.here.world_size}, at {self.heart.ranks.parent.parent}"
        return PackError(summary, expected=expected, where=where, remedy=remedy)

    def until(self, condition: Callable[[Run], bool]) -> Run:
        """Wait for what rank 0 says.

        Raises:
            PackError: see `look`.
        """
        while not condition(self.look()) or self.run.beat < 0:
            time.sleep(self.heart.every / 2)
        return self.run

    def read_plan(self) -> Plan | None:
        """Wait for the list of stretches; None where the pack is over, and the list may be gone.

        Raises:
            PackError: see `look`.
        """
        while (plan := get(self.heart.ranks / PLAN, Plan)) is None or plan.call != self.heart.said.call:
            if self.look().state != "working":
                return None
            time.sleep(self.heart.every / 2)
        return plan

    def linger(self) -> None:
        """Stay until rank 0 has heard of this rank's failure, so that all hear of it."""
        deadline = time.monotonic() + self.patience
        with suppress(PackError):
            while self.look().failure is None and time.monotonic() < deadline:
                time.sleep(self.heart.every / 2)


def pack_claimed(
    heart: Heart, ranks: Path, patience: float, job: Job, task: int, start: int, stop: int
) -> tuple[int, list[Part]]:
    """`pack_stretch`; where another rank has begun the stretch, in such a way that this one need not hang as well.

    Args:
        heart: of this rank.
        ranks: the folder where it is seen which stretches were begun.
        patience: see `rankfeed.pack`.
        job: the work.
        task: number of the stretch.
        start: its first position.
        stop: the one after its last.

    Raises:
        PackError: it cannot be packed, or this rank does not get on with it either.
    """
    try:
        (ranks / f"{CLAIM}{task:05d}").touch(exist_ok=False)
    except FileExistsError:
        return _pack_too(heart, patience, job, task, start, stop)
    return pack_stretch(job, task, start, stop)


def _pack_too(heart: Heart, patience: float, job: Job, task: int, start: int, stop: int) -> tuple[int, list[Part]]:
    """In a thread of its own, which can be given up."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    outcome: list[tuple[bool, Any]] = []
    watched = replace(job, step=step)

    def work() -> None:
        try:
            outcome.append((True, pack_stretch(watched, task, start, stop)))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=work, name="rankfeed-pack-instead", daemon=True)
    thread.start()
    silence = Silence()
    while thread.is_alive():
        thread.join(heart.every / 2)
        heart.step()
        parts = read_stretch(job.staging, task, job.name)
        if parts is not None and all(is_whole(job.staging, part) for part in parts):  # the other was only slow
            return task, parts
        still = silence.of("", steps, time.monotonic())
        if still > ARRIVAL * patience:
            raise PackError(
                f"a stretch of the input has not got on for {still:.0f} seconds, on two ranks",
                where=f"stretch {task} (positions {start} to {stop - 1})",
                remedy="does map, or the reading of a sample, hang? Where it takes so long, patience=... "
                "waits longer",
            )
    good, result = outcome[0]
    if not good:
        raise result
    return result  # type: ignore[no-any-return]
