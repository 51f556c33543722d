"""Runners execute the tasks of a write: processes of this machine, a Ray cluster, or the ranks of a job."""

import pickle
from collections.abc import Callable, Iterable

from rankfeed.errors import WriteError, describe_error
from rankfeed.writer.staging import Part
from rankfeed.writer.tasks import WriteJob, WriteTask

#: Has tasks of a job run; yields them, in any order, with the shards that were written.
RunTasks = Callable[[WriteJob, list[WriteTask]], Iterable[tuple[WriteTask, list[Part]]]]


def picklable_error(error: Exception) -> Exception:
    """An error that another process can unpickle and print, which not all can."""
    try:
        str(pickle.loads(pickle.dumps(error)))  # noqa: S301
    except Exception:
        return WriteError("writing failed", found=describe_error(error))
    return error
