"""Runs a user's loader in real processes, and ends all of them whatever it does."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from rankfeed.diagnostics.doctor.logs import Failure, LogReader, RankLog, RunLog
from rankfeed.diagnostics.doctor.rank_server import MARK, Exited, Order, Started, end_all
from rankfeed.diagnostics.doctor.records import Job
from rankfeed.errors import AuditError

#: What the process that ranks are forked from runs: it has no main module for their children to import.
_RANK_SERVER = "from rankfeed.diagnostics.doctor.rank_server import main; main()"
#: Seconds that ranks may take to find each other: on a busy machine it takes long.
_START = 300.0
#: Seconds that importing torch may take.
_IMPORT = 900.0
#: Seconds that the ranks of a run may take to end once all is read.
_LEAVE = 5.0
#: After one rank has failed, others are waited for no longer than this.
_AFTER_A_FAILURE = 5.0
#: Lines of output that are kept, and bytes on disk, above which the file is emptied.
_LINES, _OUTPUT = 20, 32 << 20


class JobRunner:
    """Runs jobs one after the other; a context manager, after which no process of them is left.

    Args:
        modules: what is imported before ranks are forked, besides torch: for many examinations that need the same.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._mark, self._modules = uuid.uuid4().hex, modules

    def __enter__(self) -> JobRunner:
        self.scratch = Path(tempfile.mkdtemp(prefix="rankfeed-doctor-"))
        self._log = (self.scratch / "server.txt").open("wb")
        self._server = subprocess.Popen(
            [sys.executable, "-c", _RANK_SERVER, str(self.scratch), *self._modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environ(self._mark),
            start_new_session=True,
        )
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        self._heard = b""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._server.kill()
        self._server.wait()
        for stream in (self._server.stdin, self._server.stdout, self._log):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        end_all(self._mark, self._server.pid, trackers=True)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def run(self, job: Job) -> RunLog:
        """Run a job to its end, or until a rank takes too long."""
        folder = self.new_folder()
        seen = RunLog(job, [RankLog(rank) for rank in range(job.ranks)])
        watched = self._start(job, seen, folder)
        try:
            while any(each.is_awaited for each in watched):
                if not self._listen(watched):
                    time.sleep(0.03)
                self._watch(watched)
            (folder / "over").touch()
            deadline = time.monotonic() + _LEAVE
            while not all(each.gone for each in watched) and time.monotonic() < deadline:
                self._listen(watched)
                if any(each.seen.failure and each.seen.failure.kind == "hangs" for each in watched):
                    break
                time.sleep(0.01)
        finally:
            end_all(self._mark, self._server.pid)
        return seen

    def new_folder(self) -> Path:
        """An empty folder, which lasts as long as this."""
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def _start(self, job: Job, seen: RunLog, folder: Path) -> list[_Watched]:
        port = _free_port()
        watched = []
        for rank in seen.ranks:
            each = _Watched(rank, folder / f"log-{rank.rank}.jsonl", folder / f"output-{rank.rank}.txt")
            order = Order(
                job,
                rank.rank,
                str(each.log),
                str(each.output),
                str(folder / "over"),
                _torchrun(job, rank.rank, port),
            )
            assert self._server.stdin is not None
            try:
                self._server.stdin.write(msgspec.json.encode(order) + b"\n")
                self._server.stdin.flush()
            except BrokenPipeError:
                raise self._server_failed() from None
            each.limit = job.timeout + job.step_seconds
            watched.append(each)
        return watched

    def _listen(self, watched: list[_Watched]) -> bool:
        """Take in what the rank server and the ranks say; whether there was anything."""
        assert self._server.stdout is not None
        heard = self._server.stdout.read() or b""
        *lines, self._heard = (self._heard + heard).split(b"\n")
        for line in lines:
            match msgspec.json.decode(line, type=Started | Exited):
                case Started(pid=pid):
                    each = next(each for each in watched if each.pid is None)
                    each.pid, each.heard = pid, time.monotonic()
                case Exited(pid=pid, code=code):
                    for each in watched:
                        if each.pid == pid:
                            each.code = code
        if self._server.poll() is not None:
            raise self._server_failed()
        came = [each.follow() for each in watched]
        return any(came) or bool(lines)

    def _watch(self, watched: list[_Watched]) -> None:
        now = time.monotonic()
        failed = [each for each in watched if each.seen.failure is not None]
        for each in watched:
            if not each.is_awaited:
                continue
            each.keep_output_small()
            if each.gone:
                each.follow()
                if each.is_awaited:
                    each.seen.failure = Failure("died", each.seen.phase, _death(each.code or 0), each.last_lines())
                continue
            limit = _START if each.seen.phase == "starting" else each.limit
            if failed:
                limit = min(limit, _AFTER_A_FAILURE)
            if each.pid is None and now > each.heard + _IMPORT:
                raise self._server_failed()
            if each.pid is not None and now > each.heard + limit:
                stack = each.current_stack()
                detail = f"nothing came for {now - each.heard:.0f} s"
                each.seen.failure = Failure("hangs", each.seen.phase, detail, stack, root=not failed)

    def _server_failed(self) -> AuditError:
        printed = (self.scratch / "server.txt").read_text(errors="replace").splitlines()
        return AuditError(
            "the doctor's own process ended, or never began",
            found="\n".join(printed[-_LINES:]) or f"exit status {self._server.poll()}",
        )


class _Watched:
    """A rank that is under way."""

    def __init__(self, seen: RankLog, log: Path, output: Path) -> None:
        self.seen, self.log, self.output = seen, log, output
        self.pid: int | None = None
        self.code: int | None = None
        self.heard = time.monotonic()
        self.limit = _START
        self._reader = LogReader(log, seen)

    @property
    def gone(self) -> bool:
        return self.code is not None

    @property
    def is_awaited(self) -> bool:
        return not self.seen.done and self.seen.failure is None

    def follow(self) -> bool:
        came = self._reader.read()
        if came:
            self.heard = time.monotonic()
        return came

    def keep_output_small(self) -> None:
        with suppress(OSError):
            if self.output.stat().st_size > _OUTPUT:
                os.truncate(self.output, 0)  # it is appended to, so that what comes next comes at the front

    def last_lines(self) -> list[str]:
        """The last lines that the rank printed."""
        with suppress(OSError), self.output.open("rb") as file:
            file.seek(max(0, self.output.stat().st_size - (64 << 10)))
            lines = file.read().decode(errors="replace").splitlines()
            return [line[:500] for line in lines[-_LINES:]]
        return []

    def current_stack(self) -> list[str]:
        """The stacks of its threads, which it is asked to print; the last lines of its output if it does not."""
        before = self.output.stat().st_size if self.output.exists() else 0
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.3)
        with suppress(OSError), self.output.open("rb") as file:
            file.seek(before)
            stack = [line for line in file.read(64 << 10).decode(errors="replace").splitlines() if line.strip()]
            current = [number for number, line in enumerate(stack) if line.startswith("Current thread")]
            if current:
                return [line[:500] for line in stack[current[0] : current[0] + 9]]
        return self.last_lines()


def _environ(mark: str) -> dict[str, str]:
    """That of this process, without what a launcher may have put there."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    return {
        "OMP_NUM_THREADS": "1",
        **kept,
        MARK: mark,
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }


def _torchrun(job: Job, rank: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(job.ranks),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"rankfeed-doctor-{port}",
    }


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _death(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit status {code}"
    try:
        return f"the process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"the process was ended by signal {-code}"
