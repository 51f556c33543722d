"""Runners execute the tasks of a write: processes of this machine, a Ray cluster, or the ranks of a job."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rankfeed.writer.staging import Part
from rankfeed.writer.tasks import WriteJob, WriteTask


class Runner(Protocol):
    """Executes tasks."""

    @property
    def is_remote(self) -> bool:
        """Whether other machines write shards, so that they are read again before the commit."""

    def session(self, staging: Path) -> AbstractContextManager[Any]:
        """Entered around the whole write, by the process that holds the lease of the staging directory."""

    def step(self) -> None:
        """Called by the coordinator whenever it has made progress."""

    def run(self, job: WriteJob, tasks: list[WriteTask]) -> Iterable[tuple[WriteTask, list[Part]]]:
        """Have each task run; yields the tasks, in any order, with the shards that were written."""
