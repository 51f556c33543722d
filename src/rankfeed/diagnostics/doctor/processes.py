"""Runs the ranks of a job in real processes, and ends every process that they start."""

import os
import pickle
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from rankfeed._util.workers import Payload, PeerGoneError, WorkerPool
from rankfeed._util.workers.channel import poll_descriptors
from rankfeed._util.workers.pool import Worker
from rankfeed.diagnostics.doctor.rank import run_rank
from rankfeed.diagnostics.doctor.records import Job, Phase, RankLog, RunFailure, RunLog
from rankfeed.errors import WorkerError

#: What is imported once, before ranks are forked.
_PRELOAD = (
    "torch.distributed",
    "torch.multiprocessing",
    "torch.utils.data",
    "psutil",
    "rankfeed._util.workers.orphans",
    "rankfeed.diagnostics.doctor.rank",
)
#: Runs are one after another, so that all descendants of the servers belong to one run.
_one_run = threading.Lock()
#: Seconds that imports of torch may take, and that ranks may take to find each other on a busy machine.
_IMPORT, _CONNECT = 900.0, 300.0
#: Seconds that ranks may take to end once all is read, and that others are waited for after a failure.
_LEAVE, _AFTER_A_FAILURE = 5.0, 5.0
#: Lines of output that are kept, bytes that are looked at, and bytes on disk, above which the file is emptied.
_LINES, _TAIL, _OUTPUT = 20, 64 << 10, 32 << 20


@dataclass(eq=False)
class RankProcess:
    """The process of a rank, and what was received from it."""

    log: RankLog
    worker: Worker
    output: Path
    heard: float = field(default_factory=time.monotonic)

    @property
    def is_awaited(self) -> bool:
        return not self.log.done and self.log.failure is None

    def receive(self) -> None:
        """Take in what it reports, or how it ended."""
        channel = self.worker.channel
        try:
            while self.is_awaited and channel.poll(0):
                self.log.add(pickle.loads(channel.receive()))  # noqa: S301  (from our own code)
                self.heard = time.monotonic()
        except PeerGoneError:
            detail = f"the process ended: {self.worker.end()}"
            self.log.failure = RunFailure("died", self.log.phase, detail, self.lines()[-_LINES:])

    def lines(self) -> list[str]:
        """The last lines that the rank printed."""
        with suppress(OSError), self.output.open("rb") as file:
            file.seek(max(0, self.output.stat().st_size - _TAIL))
            return [line[:500] for line in file.read().decode(errors="replace").splitlines()]
        return []

    def current_stack(self) -> list[str]:
        """The stack that it prints on request; its last lines if it prints none."""
        with suppress(ProcessLookupError):
            os.kill(self.worker.pid, signal.SIGUSR1)
        time.sleep(0.3)
        lines = self.lines()
        starts = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
        return lines[starts[-1] :][:9] if starts else lines[-_LINES:]


def run_job(job: Job, preload: Sequence[str] = ()) -> RunLog:
    """Run a job to its end, or until a rank takes too long; `preload` is imported before ranks are forked."""
    log = RunLog(job, [RankLog(rank) for rank in range(job.ranks)])
    with (
        _one_run,
        tempfile.TemporaryDirectory(prefix="rankfeed-doctor-", ignore_cleanup_errors=True) as folder,
        _started(log, Path(folder), preload) as running,
    ):
        while awaited := [process for process in running if process.is_awaited]:
            poll_descriptors({process.worker.channel.socket.fileno(): select.POLLIN for process in awaited}, 0.1)
            for process in awaited:
                process.receive()
            failed = any(process.log.failure is not None for process in running)
            for process in (process for process in running if process.is_awaited):
                with suppress(OSError):
                    if process.output.stat().st_size > _OUTPUT:
                        os.truncate(process.output, 0)  # it is opened to append
                limit = _CONNECT if process.log.phase == Phase.START else job.timeout + job.step_seconds
                limit = min(limit, _AFTER_A_FAILURE) if failed else limit
                if (silent := time.monotonic() - process.heard) > limit:
                    detail, stack = f"nothing came for {silent:.0f} s", process.current_stack()
                    process.log.failure = RunFailure("hangs", process.log.phase, detail, stack, root=not failed)
    return log


@contextmanager
def _started(log: RunLog, folder: Path, preload: Sequence[str]) -> Iterator[list[RankProcess]]:
    """Processes for the ranks; afterwards they and all processes that they started are ended.

    Odd ranks are forked from another server than even ones, so that hashes of text differ as between machines.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]  # which is free
    payload = Payload(partial(run_rank, log.job))
    pools = [WorkerPool(payload, (*_PRELOAD, *preload, *also)) for also in ([], ["numpy"])[: log.job.ranks]]
    running: list[RankProcess] = []
    try:
        for number, pool in enumerate(pools):
            pool.start(len(log.ranks[number::2]), 0.0)  # so that both servers import at the same time
        for number, pool in enumerate(pools):
            if not pool.start(len(log.ranks[number::2]), _IMPORT):
                raise WorkerError("the doctor could not start ranks", found=f"not ready after {_IMPORT:.0f} s")
        for rank in log.ranks:
            worker = pools[rank.rank % 2].workers[rank.rank // 2]
            running.append(RankProcess(rank, worker, folder / f"{rank.rank}.txt"))
            environ = _environ(rank.rank, log.job, port)
            worker.channel.send(pickle.dumps((rank.rank, environ, str(running[-1].output))))
        yield running
        # Ranks clean up, unless one hangs.
        failures = {peer: peer.log.failure and peer.log.failure.kind for peer in running}
        deadline = time.monotonic() + _LEAVE
        alive = [] if "hangs" in failures.values() else [peer for peer in running if failures[peer] != "died"]
        for peer in alive:
            with suppress(PeerGoneError):
                peer.worker.channel.send(b"")
        for peer in alive:
            peer.worker.channel.poll(max(0.0, deadline - time.monotonic()))
    finally:
        for pool in pools:
            _end_descendants(pool.server_pid)
            pool.close()


def _end_descendants(server: int) -> None:
    """Kill the ranks and what they started; Python's resource trackers get time to remove what those left."""
    for pause in (0.0, 0.05, 0.2, 1.0):
        time.sleep(pause)
        processes, are_alive = [], False
        with suppress(psutil.NoSuchProcess):
            processes = psutil.Process(server).children(recursive=True)
        for process in processes:
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    are_alive = True
                    if pause >= 1 or not any("resource_tracker" in part for part in process.cmdline()):
                        process.kill()
        if not are_alive:
            return


def _environ(rank: int, job: Job, port: int) -> dict[str, str]:
    """The variables that torchrun sets, and those that keep libraries small."""
    node, local_rank = divmod(rank, job.ranks // job.nodes)
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "GROUP_WORLD_SIZE": str(job.nodes),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.ranks // job.nodes),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"rankfeed-doctor-{port}",
        **dict.fromkeys(("RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(job.ranks)),
        **dict.fromkeys(("GROUP_RANK", "NODE_RANK"), str(node)),
        **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
    }
