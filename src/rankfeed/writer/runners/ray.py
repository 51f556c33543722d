"""Runs tasks on a Ray cluster, all of whose nodes write into one shared directory.

Ray restarts a task whose worker or node died. The first one may still be running then, cut off from the cluster:
it does no harm, since a task always writes the same bytes under the same names. No rows travel through Ray.
"""

import os
import pickle
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from rankfeed._util.imports import need
from rankfeed.errors import WriteError, describe_error, listed
from rankfeed.writer.staging import Part
from rankfeed.writer.tasks import WriteJob, WriteTask, WrittenTask, picklable_error, run_task

#: How often Ray restarts a task whose process or node died.
_RETRIES = 5
#: Seconds until a directory of the driver is visible on another node.
_VISIBLE = 10.0
#: A cluster may have no cores for this many times the stall timeout: it may be starting nodes.
_NO_CORES_FACTOR = 5


@dataclass
class RayCluster:
    """The workers of a Ray cluster."""

    workers: int | None  # tasks at once; None: one per core of the cluster
    stall_timeout: float  # seconds without a finished task after which it warns

    @contextmanager
    def session(self) -> Iterator[None]:
        """Connected to a cluster, started if there is none; raises WriteError or MissingExtraError."""
        ray = need("ray", extra="ray")
        is_connected = ray.is_initialized()
        if not is_connected:
            try:
                ray.init(log_to_driver=False, logging_level="error")
            except Exception as error:
                raise WriteError(
                    "cannot connect to a Ray cluster or start one",
                    found=describe_error(error),
                    remedy="check RAY_ADDRESS and `ray status`, or call ray.init(...) before rankfeed.write",
                ) from error
        try:
            yield
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise WriteError(
                "lost the Ray cluster",
                found=describe_error(error),
                remedy="start it and call write again, which continues where it stopped",
            ) from error
        finally:
            if not is_connected:
                ray.shutdown()

    def run(self, job: WriteJob, tasks: list[WriteTask]) -> Iterator[WrittenTask]:
        """Have the workers run tasks."""
        ray = need("ray", extra="ray")
        try:
            pickled = ray.put(ray.cloudpickle.dumps(job))
        except Exception as error:
            raise WriteError(
                "cannot pickle the source or the map function",
                found=describe_error(error),
                remedy="open files and models inside the function, or define them in a module",
            ) from error
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_run_on_worker)
        waiting = iter(tasks)
        running: dict[Any, WriteTask] = {}
        progress, warned = time.monotonic(), False
        try:
            while True:
                cores = self.workers or int(ray.cluster_resources().get("CPU", 1))
                for task in islice(waiting, max(0, max(1, cores) - len(running))):
                    running[remote.remote(pickled, str(job.staging), task)] = task
                if not running:
                    return
                # With a timeout, to see whether the cluster has grown.
                finished = ray.wait(list(running), timeout=min(10.0, self.stall_timeout))[0]
                if finished:
                    progress, warned = time.monotonic(), False
                elif (seconds := time.monotonic() - progress) > self.stall_timeout:
                    self._report_stall(ray, list(running.values()), seconds, silent=warned)
                    warned = True
                for reference in finished:
                    task = running.pop(reference)
                    yield task, _result(ray, reference, task)
        finally:
            for reference in running:
                with suppress(Exception):  # of a lost cluster; the error under way says more
                    ray.cancel(reference, force=True)

    def _report_stall(self, ray: Any, running: list[WriteTask], seconds: float, silent: bool) -> None:
        """Warn which tasks are awaited; raise WriteError if the cluster has no cores."""
        cores, free = ray.cluster_resources().get("CPU", 0), ray.available_resources().get("CPU", 0)
        if cores < 1 and seconds > _NO_CORES_FACTOR * self.stall_timeout:
            raise WriteError(
                f"the Ray cluster has had no cores for {seconds:.0f} s",
                expected="a node with at least one core",
                found=f"{cores:g} cores on {len(ray.nodes())} nodes",
                remedy="add a node, or start the cluster with cores (num_cpus=...)",
            )
        if not silent:
            numbers = listed([str(task.number) for task in running])
            warnings.warn(
                f"write tasks {numbers} made no progress for {seconds:.0f} s on the Ray cluster, of whose "
                f"{cores:g} cores {free:g} are free; still waiting (do other tasks, actors or placement groups "
                "hold the cores, or does map hang?)",
                RuntimeWarning,
                stacklevel=2,
            )


def _result(ray: Any, done: Any, task: WriteTask) -> list[Part]:
    try:
        result = ray.get(done)
    except ray.exceptions.RayTaskError as error:  # the worker returns errors of a task: rankfeed is missing there
        raise WriteError(
            "a node of the Ray cluster cannot run rankfeed",
            found=error.cause or error,
            where=task,
            remedy="install the same rankfeed on all nodes, or name it in ray.init's runtime_env",
        ) from error
    except ray.exceptions.RayError as error:
        raise WriteError(
            "a write task failed repeatedly: its workers crashed",
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            where=task,
            remedy="if they were killed for their memory, use fewer workers or smaller shards; called again, "
            "write continues",
        ) from error
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _unpickled(job: bytes) -> WriteJob:
    """The job, with the open files of its source, for all tasks of this process."""
    return pickle.loads(job)  # type: ignore[no-any-return]  # noqa: S301  (of the driver)


def _run_on_worker(job: bytes, staging: str, task: WriteTask) -> list[Part] | Exception:
    """Run a task on a worker of the cluster; errors are returned, so that they arrive unchanged."""
    import socket

    try:
        deadline = time.monotonic() + _VISIBLE
        while not os.path.isdir(staging):
            if time.monotonic() > deadline:
                return WriteError(
                    "a node of the Ray cluster does not see the destination",
                    expected="a file system that all nodes share, under the same path",
                    where=f"{os.path.dirname(staging)} on {socket.gethostname()}",
                    remedy='choose a shared directory, or use runner="local"',
                )
            time.sleep(0.1)
        return run_task(_unpickled(job), task)
    except Exception as error:
        return picklable_error(error)
