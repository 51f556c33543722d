"""Runners execute the tasks of a write: processes of this machine, a Ray cluster, or the ranks of a job."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rankfeed.errors import WriteError, describe_error
from rankfeed.writer.staging import Part
from rankfeed.writer.tasks import WriteJob, WriteTask


class Runner(ABC):
    """Executes tasks."""

    #: Whether other machines write shards, so that they are read again before the commit.
    is_remote = False

    def session(self) -> AbstractContextManager[Any]:
        """Entered around the whole write."""
        return nullcontext()

    @abstractmethod
    def run(self, job: WriteJob, tasks: list[WriteTask]) -> Iterable[tuple[WriteTask, list[Part]]]:
        """Have each task run; yields the tasks, in any order, with the shards that were written."""


def picklable_error(error: Exception) -> Exception:
    """An error that another process can unpickle and print, which not all can."""
    try:
        str(pickle.loads(pickle.dumps(error)))  # noqa: S301
    except Exception:
        return WriteError("writing failed", found=describe_error(error))
    return error
