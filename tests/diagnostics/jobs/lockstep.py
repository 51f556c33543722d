"""Ranks that train under Lockstep, until something happens to one of them.

They are forked from a process that has imported torch, so that a round takes seconds, and no launcher ends the
survivors: what each of them raised is written to FOLDER/RANK.json.
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
import rankfeed.diagnostics.lockstep.rank_monitor  # likewise
from rankfeed.diagnostics.lockstep.exchange import Exchange

#: What can happen to a rank, and what all ranks report of it.
CASES = {
    "raise": r"rank {bad} \(host \S+, process \d+\) failed in step {step} of pass 1: ValueError: the user's own",
    "loader": r"rank {bad} .* failed waiting for the data of step {step} of pass 1: OSError: no such shard",
    # Rank 0 has the store: the others' collectives may fail before they read why.
    "return": r"rank {bad} .*(left its loop after {step} steps of pass 1, and a collective of rank \d failed"
    r"|has been out of its loop, which it left in step {step} of pass 1|is gone, and the store)",
    "short": r"rank {bad} .* ran out of data after {before} steps of pass 1, and rank \d has begun step {step}",
    "kill": r"rank {bad} .*is gone",
    "stop": r"rank {bad} .* has published nothing for \d+ s: its process is stopped",
    "sleep": r"rank {bad} .* has been in step {step} of pass 1 for \d+ s, and rank \d has waited for",
    "subgroup": r"rank {bad} .* has been in step {step} of pass 1 for \d+ s, and rank \d has waited for",
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


def train(lockstep: Any, model: Any, case: str, at: int, pair: Any = None) -> None:
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
            if case == "subgroup":
                time.sleep(3600)
        if pair is not None:
            dist.all_reduce(torch.ones(1), group=pair)
        model(batch).sum().backward()


def barrier(rank: int, ranks: int, step: int) -> None:
    """Ranks that wait for each other without torch."""
    Path(f"{rank}.{step}").touch()
    while not all(Path(f"{each}.{step}").exists() for each in range(ranks)):
        time.sleep(0.01)


def work(rank: int, ranks: int, port: int, case: str, at: int, limit: float, how: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    log = os.open(f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    told: dict[str, Any] = {}
    watched = rf.Lockstep(Loader(case, at), limit=limit)
    try:
        if how == "healthy":
            told = healthy(rank, at, limit)
        elif how in HEALTHY:
            told = {"kind": "returned", "trained": HEALTHY[how](rank, at, limit)}
        elif how == "with":
            with watched as batches:
                train(batches, model, case, at)
        elif how == "subgroups":
            # Ranks 0 and 1 wait for each other only, and so do the others.
            pairs = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(ranks // 2)]
            with watched as batches:
                train(batches, torch.nn.Linear(4, 4), case, at, pairs[rank // 2])
                dist.barrier()
        elif how == "no collectives":
            with watched as batches:
                for step, _ in enumerate(batches, 1):
                    barrier(rank, ranks, step)
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


def common_pauses(rank: int, steps: int, limit: float) -> int:
    """Every fourth step all ranks are busy for longer than the limit, and none of them waits."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    trained = 0
    with rf.Lockstep(range(steps), limit=limit) as lockstep:
        for step in lockstep:
            model(torch.ones(2, 4)).sum().backward()
            trained += 1
            if step % 4 == 3:
                time.sleep(1.5 * limit + 0.1 * rank)
    return trained


def long_evaluation(rank: int, steps: int, limit: float) -> int:
    """A step contains an evaluation of several limits, with a collective for each batch and a slower rank."""
    trained = 0
    with rf.Lockstep(range(steps), limit=limit) as lockstep:
        for step in lockstep:
            dist.all_reduce(torch.ones(1))
            trained += 1
            if step == 2:
                for _ in range(6):
                    time.sleep(limit * 0.6 if rank else 0.0)
                    dist.all_reduce(torch.ones(1))
    return trained


def pipeline(rank: int, steps: int, limit: float) -> int:
    """Stages send to the next one, so that the numbers of the group differ, and all pause beyond the limit."""
    trained, last = 0, dist.get_world_size() - 1
    with rf.Lockstep(range(steps), limit=limit) as lockstep:
        for step in lockstep:
            if rank:
                dist.recv(torch.ones(1), rank - 1)
            if rank < last:
                dist.send(torch.ones(1), rank + 1)
            dist.all_reduce(torch.ones(1))
            trained += 1
            time.sleep(0.4)
            if step == steps - 2:
                time.sleep(2 * limit)
    return trained


def slow_store(rank: int, steps: int, limit: float) -> int:
    """A pass, at the end of which rank 1 is in the middle of its exchange with the others for most of the time."""
    if rank == 1:
        read = Exchange._read_reply

        def later(exchange: Exchange) -> Any:
            time.sleep(2)
            return read(exchange)

        Exchange._read_reply = later  # type: ignore[method-assign]
    with rf.Lockstep(range(steps), limit=limit) as lockstep:
        return sum(1 for _ in lockstep)


HEALTHY = {
    "slow store": slow_store,
    "common pauses": common_pauses,
    "long evaluation": long_evaluation,
    "pipeline": pipeline,
}


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
    ended: dict[int, float] = {}
    while time.monotonic() < deadline and any(job.is_alive() for job in expected):
        time.sleep(0.05)
        for rank, job in enumerate(jobs):
            if not job.is_alive():
                ended.setdefault(rank, time.monotonic())
    for job in jobs:
        job.kill()
        job.join()
    codes = [(job.exitcode, ended.get(rank, time.monotonic())) for rank, job in enumerate(jobs)]
    Path("codes.json").write_text(json.dumps(codes))


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
