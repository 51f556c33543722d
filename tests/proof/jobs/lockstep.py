"""Ranks that train under a watch, until something happens to one of them.

They are forked from a process that has imported torch, so that a round takes seconds, and nobody ends the
survivors: what each of them raised goes into FOLDER/RANK.json.
"""

import atexit
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once here, instead of on each rank
import torch.distributed as dist

import rankfeed as rf
import rankfeed.proof.lockstep.watch  # likewise
from rankfeed.proof.lockstep.link import Link

#: What can happen to a rank, and the words that the others are told of it.
CASES = {
    "raise": r"rank {bad} \(host \S+, process \d+\) failed in step {step} of pass 1: ValueError: the user's own",
    "loader": r"rank {bad} .* failed waiting for the data of step {step} of pass 1: OSError: no such shard",
    # Rank 0 has the store: the others' collectives may fail before they hear why.
    "return": r"rank {bad} .*(left its loop after {step} steps of pass 1, and a collective of rank \d failed"
    r"|has been out of its loop, which it left in step {step} of pass 1|is gone, and the store)",
    "short": r"rank {bad} .* ran out of data after {before} steps of pass 1, and rank \d has begun step {step}",
    "kill": r"rank {bad} .*is gone",
    "stop": r"rank {bad} .* has not been heard of for \d+ s: its process is stopped",
    "sleep": r"rank {bad} .* has been in step {step} of pass 1 for \d+ s, and rank \d has waited for",
    # It cannot raise, and ends by itself.
    "deaf": r"rank {bad} .* has been in step {step} of pass 1 for \d+ s, and rank \d has waited for",
    "slow": r"rank {bad} .* has been waiting for the data of step {step} of pass 1 for \d+ s, and rank \d has",
}
STEPS = 40


class Loader:
    """Batches, and what may happen while one is waited for."""

    def __init__(self, case: str, at: int) -> None:
        self.case, self.at = case, at

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(1, STEPS + 1):
            time.sleep(0.05)
            if step == self.at:
                happened(self.case)
                if self.case == "loader":
                    raise OSError("no such shard")
                if self.case == "short":
                    return
                if self.case == "slow":
                    time.sleep(3600)
            yield torch.ones(2, 4) * step


def happened(case: str) -> None:
    if case in CASES:
        Path("happened").write_text(str(time.monotonic()))


def train(lockstep: Any, model: Any, case: str, at: int) -> None:
    for step, batch in enumerate(lockstep, 1):
        if step == at:
            happened(case if case not in ("loader", "short", "slow") else "")
            if case == "raise":
                raise ValueError("the user's own")
            if case == "return":
                return
            if case == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if case == "sleep":
                time.sleep(3600)
            if case == "deaf":
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
                time.sleep(3600)
        model(batch).sum().backward()


def work(rank: int, ranks: int, port: int, case: str, at: int, limit: float, how: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    log = os.open(f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    told: dict[str, Any] = {}
    watched = rf.Lockstep(Loader(case, at), limit=limit, grace=2)
    try:
        if how == "healthy":
            told = healthy(rank, at, limit)
        elif how == "slow store":
            told = slow_store(rank, at, limit)
        elif how == "with":
            with watched as batches:
                train(batches, model, case, at)
        else:
            train(watched, model, case, at)
        told.setdefault("kind", "returned")
    except Exception as error:
        told = {"kind": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None)}
        if how == "bare":
            sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
    told["at"] = time.monotonic()
    Path(f"{rank}.part").write_text(json.dumps(told))
    os.replace(f"{rank}.part", f"{rank}.json")
    atexit._run_exitfuncs()  # as at the end of a script: multiprocessing leaves them out


def healthy(rank: int, steps: int, limit: float) -> dict[str, Any]:
    """Passes over data with random delays, and what a step of the watch costs."""
    chance = random.Random(rank)
    passes = 4
    trained = 0
    workers: Any = torch.utils.data.DataLoader(
        range(4), num_workers=1
    )  # they are forked, without the watch's threads
    for _number in rf.Lockstep(workers, limit=limit, name="workers"):
        dist.all_reduce(torch.ones(1))
    with rf.Lockstep(range(steps // passes), limit=limit) as lockstep:
        for _ in range(passes):
            for _batch in lockstep:
                trained += 1
                dist.all_reduce(torch.ones(1))
                time.sleep(chance.random() * (limit / 3 if chance.random() < 0.001 else 0.001))
        dist.barrier()
        bare = _seconds(range(200_000))
        watched = _seconds(rf.Lockstep(range(200_000), limit=limit))
    time.sleep(rank)  # rank 0 ends first, and its store with it
    return {"kind": "returned", "trained": trained, "cost": (watched - bare) / 200_000}


def slow_store(rank: int, steps: int, limit: float) -> dict[str, Any]:
    """A pass, at the end of which rank 1 is in the middle of its exchange with the others for most of the time."""
    if rank == 1:
        read = Link._read

        def later(link: Link) -> Any:
            time.sleep(2)
            return read(link)

        Link._read = later  # type: ignore[method-assign]
    with rf.Lockstep(range(steps), limit=limit) as lockstep:
        return {"kind": "returned", "trained": sum(1 for _ in lockstep)}


def _seconds(batches: Any) -> float:
    begun = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - begun


def play(folder: Path, case: str, bad: int, at: int, ranks: int, limit: float, how: str, patience: float) -> None:
    """A round: one rank has something happen to it in one step; whoever is left when patience ends is killed."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    jobs = [
        fork.Process(target=work, args=(rank, ranks, port, case if rank == bad else "", at, limit, how))
        for rank in range(ranks)
    ]
    for job in jobs:
        job.start()
    deadline = time.monotonic() + patience
    expected = [job for rank, job in enumerate(jobs) if rank != bad or case not in ("kill", "stop")]
    while time.monotonic() < deadline and any(job.is_alive() for job in expected):
        time.sleep(0.05)
    for job in jobs:
        job.kill()
        job.join()
    Path("codes.json").write_text(json.dumps([job.exitcode for job in jobs]))


def launched(folder: Path, case: str, at: int, limit: float) -> None:
    """The same as one rank of a launcher, which ends all when one fails; the last rank is the one."""
    os.chdir(folder)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    case = case if dist.get_rank() == dist.get_world_size() - 1 else ""
    with rf.Lockstep(Loader(case, at), limit=limit) as batches:
        train(batches, model, case, at)


if __name__ == "__main__" and "RANK" in os.environ:
    launched(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
elif __name__ == "__main__":
    top, patience, *rounds = sys.argv[1:]
    for each in rounds:
        case, bad, at, ranks, limit, how = each.split(",")
        play(Path(top, each), case, int(bad), int(at), int(ranks), float(limit), how, float(patience))
