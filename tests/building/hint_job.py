"""What each rank of a job does: have a folder prepared, with so long between looks that a hint alone wakes it.

hint_job.py torch|mpi PATH OUT MODE...: in each mode, each rank writes OUT/MODE/RANK.outcome with a line for each
folder, "there" or the error, and each build OUT/MODE/built-RANK-KEY@TIME. What is built is PATH/MODE.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rankfeed.building import hint, prepare, prepare_once
from rankfeed.errors import PrepareError

HOURS = 3600.0


class Job:
    """One rank: who it is, and what it says by files."""

    def __init__(self, comm: Any, rank: int, size: int, path: Path, out: Path) -> None:
        self.comm, self.rank, self.size, self.path, self.out = comm, rank, size, path, out
        self.outcomes: list[str] = []

    def tell(self, what: str) -> None:
        (self.out / what).touch()

    def until(self, *what: str) -> None:
        """Wait for others; without end, since the test ends a job that hangs."""
        while not all((self.out / each).exists() for each in what):
            time.sleep(0.005)

    def others(self, what: str) -> list[str]:
        return [f"{what}-{rank}" for rank in range(self.size) if rank != self.rank]

    @contextmanager
    def watched_waits(self) -> Iterator[None]:
        """Tell, meanwhile, when this rank begins to wait for somebody."""
        wait = hint.Hint.wait

        def told(asked: hint.Hint, name: str, pause: float) -> bool:
            self.tell(f"waits-{self.rank}")
            self.tell(f"waits-{self.rank}-{name}")
            return wait(asked, name, pause)

        hint.Hint.wait = told  # type: ignore[method-assign]
        yield
        hint.Hint.wait = wait  # type: ignore[method-assign]

    def call(self, build: Callable[[Path], object], key: str = "", path: Path | None = None) -> None:
        def built(staging: Path) -> None:
            self.tell(f"built-{self.rank}-{key}@{time.monotonic_ns()}")
            (staging / "data").write_text(key)
            build(staging)

        try:
            folder = prepare_once(path or self.path, built, key=key, comm=self.comm)
            assert (folder / "data").read_text() == key
            self.outcomes.append("there")
        except PrepareError as error:
            self.outcomes.append(str(error).splitlines()[0])

    def first(self, builder: int, build: Callable[[Path], object], key: str = "") -> None:
        """All call, one of them first; it ends its build when all others wait."""

        def while_all_wait(staging: Path) -> None:
            self.tell(f"builds-{key}")
            self.until(*self.others("waits"))
            build(staging)

        if self.rank != builder:
            self.until(f"builds-{key}")
        self.call(while_all_wait if self.rank == builder else build, key)


def nothing(staging: Path) -> None:
    pass


def done(job: Job) -> None:
    job.first(0, nothing)


def raises(job: Job) -> None:
    def fails(staging: Path) -> None:
        raise KeyError("no such column")

    job.first(job.size - 1, fails)


def interrupted(job: Job) -> None:
    """The first builder is interrupted: those who wait are told, and one of them builds."""

    def stops(staging: Path) -> None:
        if job.rank == 0:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        job.first(0, stops)


def again(job: Job) -> None:
    """Builds one after the other, by different ranks, some of which come late: old hints are nobody's."""
    for number in range(3):
        builder = number % job.size
        if number == 1 and job.rank != builder:  # comes when all is over, and hears nothing of it
            job.until("over")
        job.call(nothing, "late") if number == 1 else job.first(builder, nothing, f"key{number}")
        if number == 1 and job.rank == builder:
            job.tell("over")
        for name in job.out.glob(f"waits-{job.rank}*"):
            name.unlink()
        job.tell(f"round{number}-{job.rank}")
        job.until(f"round{number}-{job.rank}", *job.others(f"round{number}"))


def alone(job: Job) -> None:
    """Rank 0 alone calls; what it says to the others is never heard."""
    if job.rank == 0:
        job.call(nothing)
        job.tell("over")
    job.until("over")


def two(job: Job) -> None:
    """Two threads of two ranks each prepare two folders: a hint for one is not lost with the other."""
    if job.rank > 1:
        return
    paths = [job.path, job.path.with_name("two-other")]

    def one(path: Path) -> None:
        def build(staging: Path) -> None:
            job.tell(f"builds-{path.name}")
            while len(list(job.out.glob(f"waits-{1 - job.rank}-*"))) < 2:
                time.sleep(0.005)

        if job.rank != 0:
            job.until(*(f"builds-{each.name}" for each in paths))
        job.call(build, path=path)

    threads = [threading.Thread(target=one, args=(path,), daemon=True) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def another_job(job: Job) -> None:
    """Somebody builds who does not belong to the job: all ranks find it by looking."""
    prepare._FIRST_LOOK, prepare._LAST_LOOK = 0.01, 0.1
    job.call(nothing)


def host(job: Job, harm: Callable[[], None]) -> None:
    """The host of the store goes while rank 1 builds and rank 2 waits: they do as if there were no hints."""
    prepare._FIRST_LOOK, prepare._LAST_LOOK = 0.01, 0.1
    if job.rank == 0:
        job.until("waits-2")
        time.sleep(0.3)
        job.tell("harmed")
        harm()
        return
    if job.rank == 2:
        job.until("builds-")

    def build(staging: Path) -> None:
        job.tell("builds-")
        job.until("waits-2", "harmed")
        time.sleep(0.5)

    job.call(build)


def forked(job: Job) -> None:
    """A child that rank 1 forks waits for what rank 0 builds: it leaves the parent's connection alone."""
    prepare._FIRST_LOOK, prepare._LAST_LOOK = 0.01, 0.1
    if job.rank == 1:
        job.until("builds-")
        child = os.fork()
        if child == 0:
            assert hint.Hint(job.comm)._store is None
            assert not hint._may_speak(job.comm)
            job.call(nothing)
            os._exit(job.outcomes != ["there"])
        assert os.waitpid(child, 0)[1] == 0
    job.first(0, nothing)


def gone(job: Job) -> None:
    host(job, lambda: os._exit(0))


def stopped(job: Job) -> None:
    host(job, lambda: os.kill(os.getpid(), signal.SIGSTOP))


MODES = (done, raises, interrupted, again, two, forked, alone, another_job, gone, stopped)


def joined(kind: str) -> tuple[Any, int, int]:
    """The communicator for the call, and which rank of how many this is."""
    if kind == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return None, dist.get_rank(), dist.get_world_size()


def main(kind: str, path: Path, out: Path, names: list[str]) -> None:
    comm, rank, size = joined(kind)
    for mode in MODES:
        if mode.__name__ in names:
            print(f"rank {rank}: {mode.__name__}", flush=True)
            job = Job(comm, rank, size, path / mode.__name__, out / mode.__name__)
            job.out.mkdir(exist_ok=True)
            prepare._FIRST_LOOK = prepare._LAST_LOOK = HOURS
            with job.watched_waits():
                mode(job)
            (job.out / f"{rank}.outcome").write_text("".join(f"{each}\n" for each in job.outcomes))
            if mode not in (gone, stopped):
                job.tell(f"over-{rank}")
                job.until(*job.others("over"))
    if kind == "torch" and names[0] not in ("gone", "stopped"):
        import torch.distributed as dist

        dist.barrier()  # the group is whole
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
