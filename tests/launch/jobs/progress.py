"""What a rank was given, written down where a kill cannot reach it, and the checkpoints to go on from."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankfeed as rf

#: Neither 2 nor 3 ranks divide what is left of an epoch, here and after a kill; and each has one of the last step.
SAMPLES, ROWS, EPOCHS = 50, 3, 2
#: Steps from one checkpoint to the next.
EVERY = 2
#: The run that is the only one, and leaves no checkpoints.
WHOLE = "whole"
#: Launches that go on from each other's checkpoints: name, ranks, and the step in which the victim is killed: in
#: the first epoch; in the second, on more ranks; not at all, on fewer.
RUNS = [("first", 2, 6), ("more", 3, 12), ("fewer", 2, 0)]
#: The rank that is killed.
VICTIM = 1


class Job:
    """One rank's part of a cell, in one of the launches that go on from each other's checkpoints.

    ``FOLDER/RUN/RANK-of-SIZE.jsonl`` is its ledger: first ``{"step": steps before}``, then a line
    ``[step, epoch, ids]`` for each batch, steps counted from 1 over all runs.

    Args:
        folder: of the cell.
        run: name of the launch.
        here: the rank.
        workers: of each loader.
        every: steps from one checkpoint to the next; 0 for none.
        kill: the step in which the victim kills itself; 0 for none.
        store: a file through which ranks meet; None for what the environment says.
    """

    def __init__(
        self, folder: Path, run: str, here: rf.Topology, workers: int, every: int, kill: int, store: Path | None
    ) -> None:
        self.here, self.workers, self.every, self.kill, self._store = here, workers, every, kill, store
        self.checkpoints, self._folder = folder / "checkpoints", folder / run
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(exist_ok=True)
        #: The checkpoint to go on from.
        self.latest = max(self.checkpoints.iterdir(), key=_step_of, default=None)
        self.step = 0 if self.latest is None else _step_of(self.latest)
        #: Of a checkpoint of our own, which is a file: where the loader stood, and in which epoch.
        self.epoch, self.state = 0, None
        if self.latest is not None and self.latest.suffix == ".pt":
            self.epoch, self.state = torch.load(self.latest, weights_only=False)
        self._ledger = self._folder / f"{here.rank}-of-{here.world_size}.jsonl"
        self._ledger.write_text("")
        self._tell({"step": self.step})

    def meet(self) -> None:
        """Make the process group, unless there is one."""
        if dist.is_initialized():
            return
        # What torchrun would have set: frameworks that know neither Slurm nor MPI read it.
        for name, value in {
            "RANK": self.here.rank,
            "WORLD_SIZE": self.here.world_size,
            "LOCAL_RANK": self.here.local_rank,
            "LOCAL_WORLD_SIZE": self.here.local_world_size,
        }.items():
            os.environ.setdefault(name, str(value))
        place = {"rank": self.here.rank, "world_size": self.here.world_size}
        dist.init_process_group("gloo", f"file://{self._store}" if self._store else "env://", **place)

    def found(self, launcher: str) -> None:
        """How a loader found its rank."""
        self._tell({"launcher": launcher})

    def given(self, epoch: int, ids: list[int]) -> None:
        """A batch that this rank was given counts, whatever becomes of it: the victim may end here."""
        self.step, self.epoch = self.step + 1, epoch
        self._tell([self.step, epoch, ids])
        if self.step == self.kill and self.here.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)

    def taken(self, save: Callable[[], Any]) -> None:
        """A step is over on all ranks; ``save`` gives where the loader stands, asked on each of them."""
        if not self.every:
            return
        # No rank is more than a step ahead, as with a model: the checkpoint before the last one is complete.
        dist.all_reduce(torch.ones(1))
        if self.step % self.every == 0:
            state = save()
            if self.here.rank == 0:
                new = self._folder / "new"
                torch.save((self.epoch, state), new)
                new.replace(self.checkpoints / f"{self.step}.pt")

    def _tell(self, line: Any) -> None:
        with self._ledger.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def in_child(self, work: Callable[[], None]) -> None:
        """Do it in a fork of this rank, which may be killed: the launch continues with its next cell.

        When the victim is gone the other ranks' forks are killed, as a launcher does.
        """
        child = os.fork()
        if child == 0:
            work()
            sys.exit()
        gone, ended = self._folder / "gone", 0
        while not ended:
            time.sleep(0.02)
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended and gone.exists():
                os.kill(child, signal.SIGKILL)
        if not self.kill:
            assert status == 0, status
        elif self.here.rank == VICTIM:
            assert status == signal.SIGKILL, status
            gone.touch()
        else:
            assert status != 0, "it came to its end without the rank that was killed"


def _step_of(checkpoint: Path) -> int:
    return int(re.findall(r"\d+", checkpoint.name)[-1])
