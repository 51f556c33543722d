"""Ranks that train under Lockstep, until something happens to one of them.

They are forked from a process that has imported torch, so that a round takes seconds, and no launcher ends the
survivors: what each of them raised is written to FOLDER/RANK.json.
"""

import atexit
import ctypes
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it: once here, instead of on each rank
import torch.distributed as dist

import rankfeed as rf
import rankfeed.diagnostics.lockstep.rank_monitor  # likewise
from rankfeed.diagnostics.lockstep.exchange import JobStore

MISMATCH = r"collective \d+ of process group 0, which is all_reduce on rank \d, in step {step} of pass 1"
LEFT = (
    r"rank {bad} .* out of its loop, which it left in step {step} of pass 1 for \d+ s, in barrier as " + MISMATCH
)
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
    "evaluation": r"rank {bad} .* has been in step {step} of pass 1 for \d+ s, and rank \d has waited for",
    "after": r"rank {bad} .* has been at the end of its data after 40 steps of pass 1 for \d+ s, and rank \d has",
    "leave": LEFT,
    "return to barrier": LEFT,
    "gather": r"rank {bad} .* has been in step {step} of pass 1 for \d+ s, in all_gather as " + MISMATCH,
    "pipeline": r"rank {bad} .* has been in step {step} of pass 1 for \d+ s, and rank \d has waited for",
    "gil": r"rank {bad} .* has published nothing for \d+ s: its process is alive, and code that holds",
    "never": r"rank {bad} has not reached its first step after \d+ s, and rank \d has waited for",
    "sys.exit": r"rank {bad} .* failed in step {step} of pass 1: SystemExit: 3",
    "os._exit": r"rank {bad} .*is gone",
}
#: Cases in which the rank at fault cannot end itself, or is not watched.
ENDLESS = ("kill", "stop", "gil", "never")
#: Cases in which it ends itself with an exit code.
HANGING = ("sleep", "subgroup", "slow", "evaluation", "after", "leave", "gather", "pipeline")
#: Cases that are seen at the limit, or before.
AT_LIMIT = ("return", "return to barrier", "stop", "gil", "never", *HANGING)
STEPS = 40
BACKEND = os.environ.get("LOCKSTEP_BACKEND", "gloo")


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


def train(lockstep: Any, model: Any, case: str, at: int, pair: Any = None, evaluate: bool = False) -> None:
    for step, batch in enumerate(lockstep, 1):
        if step == at:
            happened(case if case not in ("loader", "short", "slow", "evaluation", "after", "never") else "")
            if case == "raise":
                raise ValueError("the user's own")
            if case in ("return", "return to barrier"):
                return
            if case == "leave":
                break
            if case == "gather":
                dist.all_gather_object([None] * dist.get_world_size(), step)
            if case == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if case in ("sleep", "subgroup"):
                time.sleep(3600)
            if case == "gil":
                hold_gil(3600)
            if case == "sys.exit":
                sys.exit(3)
            if case == "os._exit":
                os._exit(0)
        if step == at and evaluate:
            for index in range(4):
                if case == "evaluation" and index == 2:
                    happened(case)
                    time.sleep(3600)
                dist.all_reduce(torch.ones(1))
        if pair is not None:
            dist.all_reduce(torch.ones(1), group=pair)
        loss = model(batch).sum()
        loss.backward()
        loss.item()  # on a GPU this waits for what the steps before have enqueued


def send_on(rank: int, batch: torch.Tensor) -> None:
    """What a stage of a pipeline sends to the next one."""
    if rank:
        dist.recv(batch, rank - 1)
    if rank < dist.get_world_size() - 1:
        dist.send(batch, rank + 1)


def hold_gil(seconds: int) -> None:
    """Native code that stops all Python threads of this process."""
    ctypes.PyDLL(None).sleep(seconds)


def barrier(rank: int, ranks: int, step: int) -> None:
    """Ranks that wait for each other without torch."""
    Path(f"{rank}.{step}").touch()
    while not all(Path(f"{peer}.{step}").exists() for peer in range(ranks)):
        time.sleep(0.01)


def work(rank: int, ranks: int, port: int, case: str, at: int, limit: float, how: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ["NCCL_HOSTID"] = str(rank)  # NCCL refuses two ranks on one GPU, unless they are on two hosts
    log = os.open(f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND)
    if BACKEND == "nccl":
        torch.set_default_device("cuda")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    told: dict[str, Any] = {}
    watched = rf.Lockstep(Loader(case, at), limit=limit)
    try:
        if how == "healthy":
            told = healthy(rank, at, limit)
        elif how in HEALTHY:
            told = {"kind": "returned", "trained": HEALTHY[how](rank, at, limit)}
        elif how in ("with", "evaluation", "after"):
            if case == "never":
                happened(case)
                time.sleep(3600)
            with watched as batches:
                train(batches, model, case, at, evaluate=how == "evaluation")
                if case == "after":
                    happened(case)
                    time.sleep(3600)
                if how == "after" or case == "leave":
                    dist.barrier()
            if case == "return to barrier":
                dist.barrier()
        elif how == "subgroups":
            # Ranks 0 and 1 wait for each other only, and so do the others.
            pairs = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(ranks // 2)]
            with watched as batches:
                train(batches, torch.nn.Linear(4, 4), case, at, pairs[rank // 2])
                dist.barrier()
        elif how == "stages":
            with watched as batches:
                for step, batch in enumerate(batches, 1):
                    send_on(rank, batch)
                    if step == at and case:
                        happened(case)
                        time.sleep(3600)
                    dist.all_reduce(batch)
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


#: A step of a healthy job: of the rank, the number of the step from 0, the steps, the limit and a model.
HealthyStep = Callable[[int, int, int, float, Any], None]


def common_pauses(rank: int, step: int, steps: int, limit: float, model: Any) -> None:
    """Every fourth step all ranks are busy for longer than the limit, and none of them waits."""
    model(torch.ones(2, 4)).sum().backward()
    if step % 4 == 3:
        time.sleep(1.5 * limit + 0.1 * rank)


def long_evaluation(rank: int, step: int, steps: int, limit: float, model: Any) -> None:
    """A step contains an evaluation of several limits, with a collective for each batch and a slower rank."""
    dist.all_reduce(torch.ones(1))
    for _ in range(6 if step == 2 else 0):
        time.sleep(limit * 0.6 if rank else 0.0)
        dist.all_reduce(torch.ones(1))


def pipeline(rank: int, step: int, steps: int, limit: float, model: Any) -> None:
    """Stages send to the next one, so that the numbers of the group differ, and all pause beyond the limit."""
    send_on(rank, torch.ones(1))
    dist.all_reduce(torch.ones(1))
    time.sleep(0.4)
    if step == steps - 2:
        time.sleep(2 * limit)


def native_pauses(rank: int, step: int, steps: int, limit: float, model: Any) -> None:
    """In a common pause one rank, then each, is in native code that stops its Python threads beyond the limit."""
    dist.all_reduce(torch.ones(1))
    if step in (2, 4):
        seconds = int(limit) + 3
        hold_gil(seconds) if rank == 0 or step == 4 else time.sleep(seconds)


def accumulation(rank: int, step: int, steps: int, limit: float, model: Any) -> None:
    """Gradients are accumulated: ranks of different speed wait in every fourth step only."""
    with nullcontext() if step % 4 == 3 else model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    time.sleep(limit / 6 if rank else 0.0)


def stopped(rank: int, step: int, steps: int, limit: float, model: Any) -> None:
    """All ranks are stopped for longer than the limit, as a scheduler does that suspends a job."""
    dist.all_reduce(torch.ones(1))
    if step == 2:
        seconds = 1.5 * limit
        code = f"import os, signal, time; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-S", "-c", code])
        os.kill(os.getpid(), signal.SIGSTOP)


def one_pass(take_step: HealthyStep) -> Callable[[int, int, float], int]:
    """A healthy job that takes such steps in one pass; it returns how many."""

    def job(rank: int, steps: int, limit: float) -> int:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        trained = 0
        with rf.Lockstep(range(steps), limit=limit) as lockstep:
            for step in lockstep:
                take_step(rank, step, steps, limit, model)
                trained += 1
        return trained

    return job


def slow_store(rank: int, steps: int, limit: float) -> int:
    """A pass, at the end of which rank 1 is in the middle of its exchange with the others for most of the time."""
    if rank == 1:
        read = JobStore.read

        def later(store: JobStore, key: str, *options: Any) -> Any:
            time.sleep(2.0 * (key == "judgement"))
            return read(store, key, *options)

        JobStore.read = later  # type: ignore[method-assign]
    with rf.Lockstep(range(steps), limit=limit) as lockstep:
        return sum(1 for _ in lockstep)


def checkpoints(rank: int, steps: int, limit: float) -> int:
    """Rank 0 writes while the others wait, and after an epoch all evaluate for longer than the limit."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    trained = 0
    with rf.Lockstep(range(steps // 2), limit=limit) as lockstep:
        for _epoch in range(2):
            for _step in lockstep:
                model(torch.ones(2, 4)).sum().backward()
                trained += 1
            time.sleep(0.0 if rank else 0.5 * limit)
            dist.barrier()
            time.sleep(1.4 * limit)
    return trained


def messages(rank: int, steps: int, limit: float) -> int:
    """Ranks send to rank 0 once an epoch, so that numbers differ for good, and pause in the next one."""
    dist.monitored_barrier()
    trained = 0
    with rf.Lockstep(range(steps // 2), limit=limit) as lockstep:
        for epoch in range(2):
            for step in lockstep:
                dist.all_reduce(torch.ones(1))
                dist.all_gather_object([None] * dist.get_world_size(), rank)
                trained += 1
                if step == 1:
                    time.sleep(1.4 * limit)
            for other in range(1, dist.get_world_size()) if epoch == 0 else ():
                if rank == other:
                    dist.send(torch.ones(1), 0)
                if rank == 0:
                    dist.recv(torch.ones(1), other)
    return trained


def groups(rank: int, steps: int, limit: float) -> int:
    """Two of the ranks evaluate together for long, with collectives of their own group, and the others wait."""
    pair = dist.new_group([0, 1])
    trained = 0
    with rf.Lockstep(range(steps), limit=limit) as lockstep:
        for step in lockstep:
            dist.all_reduce(torch.ones(1))
            trained += 1
            for _ in range(5 if step == 2 and rank < 2 else 0):
                time.sleep(limit * 0.5)
                dist.all_reduce(torch.ones(1), group=pair)
    return trained


def background(rank: int, steps: int, limit: float) -> int:
    """A thread writes checkpoints with a group of its own, at its own pace, during a common pause."""
    group = dist.new_group()

    def write() -> None:
        for _ in range(3):
            time.sleep(0.2 * limit * (rank + 1))
            dist.all_reduce(torch.ones(1), group=group)

    trained = 0
    with rf.Lockstep(range(steps // 2), limit=limit) as lockstep:
        for _epoch in range(2):
            for _step in lockstep:
                dist.all_reduce(torch.ones(1))
                trained += 1
            thread = threading.Thread(target=write)
            thread.start()
            time.sleep(1.5 * limit)
            thread.join()
    return trained


def early_end(rank: int, steps: int, limit: float) -> int:
    """All ranks leave their loops early, pause, and iterate again; one pass has no step for some."""
    trained = 0
    for _ in range(2):
        with rf.Lockstep(range(steps), limit=limit, uneven=True) as lockstep:
            for step in lockstep:
                trained += 1
                if step == steps // 2 - 1:
                    break
                time.sleep(0.02 * rank)
        time.sleep(1.2 * limit)
    return trained


HEALTHY = {
    "slow store": slow_store,
    "common pauses": one_pass(common_pauses),
    "long evaluation": one_pass(long_evaluation),
    "pipeline": one_pass(pipeline),
    "checkpoints": checkpoints,
    "native pauses": one_pass(native_pauses),
    "accumulation": one_pass(accumulation),
    "messages": messages,
    "groups": groups,
    "background": background,
    "early end": early_end,
    "stopped": one_pass(stopped),
}


def _seconds(batches: Any) -> float:
    begun = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - begun


def play(folder: Path, case: str, bad: int, at: int, ranks: int, limit: float, how: str, patience: float) -> None:
    """A round: something happens to one rank in one step; ranks that are left when patience ends are killed."""
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
    expected = [job for rank, job in enumerate(jobs) if rank != bad or case not in ENDLESS]
    ended: dict[int, float] = {}
    delays: list[tuple[float, float]] = []  # when this process was scheduled late, and by how many seconds
    while time.monotonic() < deadline and any(job.is_alive() for job in expected):
        begun = time.monotonic()
        time.sleep(0.05)
        delays.append((begun, time.monotonic() - begun - 0.05))
        for rank, job in enumerate(jobs):
            if not job.is_alive():
                ended.setdefault(rank, time.monotonic())
    for job in jobs:
        job.kill()
        job.join()
    codes = [(job.exitcode, ended.get(rank, time.monotonic())) for rank, job in enumerate(jobs)]
    Path("codes.json").write_text(json.dumps(codes))
    Path("delays.json").write_text(json.dumps([delay for delay in delays if delay[1] > 0.01]))


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
    top, at_once, patience, *rounds = sys.argv[1:]

    def play_some(rounds: list[str]) -> None:
        for spec in rounds:
            case, bad, at, ranks, limit, how = spec.split(",")
            play(
                Path(top, spec).absolute(), case, int(bad), int(at), int(ranks), float(limit), how, float(patience)
            )

    players = [
        multiprocessing.get_context("fork").Process(target=play_some, args=(rounds[first :: int(at_once)],))
        for first in range(int(at_once))
    ]
    for player in players:
        player.start()
    for player in players:
        player.join()
