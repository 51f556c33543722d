"""Jobs as their ranks would write them down, without any process: what is written, and what is true."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rankfeed as rf
from rankfeed.plan import PositionOrder
from rankfeed.storage import ledger

SECOND = 10**9


def topology(rank: int, ranks: int) -> rf.Topology:
    return rf.Topology(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)


@dataclass
class Job:
    """Launches of a job, simulated: each rank writes its ledger, and what counts is kept as positions."""

    folder: Path
    plan: rf.Plan
    tail: str = "even"
    launches: int = 0
    name: str = ""
    launcher: str = "torchrun"
    now: int = 10**18
    #: (epoch, position) -> how often it was delivered, on the timeline that counts.
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)
    again: Counter[int] = field(default_factory=Counter)

    def launch(
        self,
        ranks: int,
        batch_size: int,
        passes: Sequence[tuple[int, int, Sequence[int]]],
        absent: Sequence[int] = (),
        host: str = "here",
    ) -> None:
        """Each pass is an epoch, a start, and the steps that each rank delivered (-1: it did not begin)."""
        self.launches += 1
        shape = PositionOrder.of(self.plan.describe())
        files = {rank: bytearray() for rank in range(ranks)}
        for index, (epoch, start, steps) in enumerate(passes):
            taken = [place for place in self.counts if place >= (epoch, start)]
            for place in taken:
                self.again[place[0]] += self.counts.pop(place)
            self.now += SECOND
            for rank in range(ranks):
                if steps[rank] < 0:
                    continue
                schedule = rf.Schedule(
                    shape,  # type: ignore[arg-type]
                    batch_size=batch_size,
                    topology=topology(rank, ranks),
                    epoch=epoch,
                    start=start,
                    tail=self.tail,  # type: ignore[arg-type]
                )
                head, seed = ledger.encode_header(index, self._pass(rank, ranks, epoch, start, batch_size, host))
                files[rank] += head
                for step in range(min(steps[rank], len(schedule))):
                    if rank not in absent:
                        rows = schedule.batch(step)[schedule.valid(step)].tolist()
                        self.counts.update((epoch, position) for position in rows)
                    position = schedule.position_after(step)
                    files[rank] += ledger.encode_step(index, seed, step, position, self.now + step)
            self.now += SECOND
        self.folder.mkdir(exist_ok=True)
        for rank, content in files.items():
            if rank not in absent and content:
                name = f"rank-{rank:05}-of-{ranks:05}-{self.launches}{ledger.SUFFIX}"
                (self.folder / name).write_bytes(content)

    def _pass(self, rank: int, ranks: int, epoch: int, start: int, batch_size: int, host: str) -> ledger.PassInfo:
        return ledger.PassInfo(
            launch=self.name or f"launch-{self.launches}",
            process=f"{self.launches}-{rank}",
            host=host,
            pid=rank,
            rank=rank,
            world_size=ranks,
            launcher=self.launcher,
            loader=0,
            plan=self.plan.describe(),
            plan_fingerprint=self.plan.fingerprint,
            source="5eed",
            data="numbers",
            epoch=epoch,
            start=start,
            batch_size=batch_size,
            tail=self.tail,
            time_ns=self.now,
        )

    def steps(self, ranks: int, batch_size: int, start: int) -> int:
        """Of a whole pass."""
        schedule = rf.Schedule(
            self.plan,
            batch_size=batch_size,
            topology=topology(0, ranks),
            start=start,
            tail=self.tail,  # type: ignore[arg-type]
        )
        return len(schedule)

    def position(self, ranks: int, batch_size: int, start: int, steps: int) -> int:
        schedule = rf.Schedule(
            self.plan,
            batch_size=batch_size,
            topology=topology(0, ranks),
            start=start,
            tail=self.tail,  # type: ignore[arg-type]
        )
        return schedule.position_after(steps - 1) if steps else start


def random_job(folder: Path, seed: int) -> Job:
    """Launches that are killed anywhere and resume from checkpoints some steps old, on other ranks."""
    chance = random.Random(seed)
    samples, lanes = chance.randint(20, 300), chance.choice([1, 1, 3, 8])
    plan = rf.Plan(samples, seed=seed, lanes=lanes)
    if lanes > 1:
        plan = rf.Plan(samples, shuffle="window", seed=seed, lanes=lanes, window=5).with_order(
            chance.choice([1, 2])
        )
    job = Job(folder, plan, chance.choice(["even", "even", "pad", "drop"]))
    epoch = start = 0
    for _ in range(chance.randint(1, 6)):
        ranks, batch_size = chance.randint(1, 5), chance.randint(1, 7)
        passes: list[tuple[int, int, list[int]]] = []
        for _ in range(chance.randint(0, 2)):
            passes.append((epoch, start, [job.steps(ranks, batch_size, start)] * ranks))
            epoch, start = epoch + 1, 0
        whole = job.steps(ranks, batch_size, start)
        steps = chance.randint(0, whole)
        ends = [min(whole, steps + chance.randint(0, 1)) for _ in range(ranks)]
        if whole in ends:  # who comes to the end while others do not is an error, and tested by itself
            ends = [whole] * ranks
        passes.append((epoch, start, ends))
        job.launch(ranks, batch_size, passes)
        # A checkpoint some steps old, of this pass or of one before it.
        if chance.random() < 0.2 and len(passes) > 1:
            epoch, start, (steps, *_) = passes[-2]
        start = job.position(ranks, batch_size, start, max(0, min(steps, min(ends)) - chance.randint(0, 4)))
    return job
