"""Packing on a Ray cluster: one task a stretch, and all of them into one folder that every node sees.

Ray starts a task again where its worker or node died. The first may still be at work then, cut off from the
cluster, so nothing depends on there being one: whoever packs a stretch writes the same bytes under the same names.
No rows go through Ray, only numbers of stretches and records of shards.
"""

from __future__ import annotations

import pickle
import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from rankfeed.building.job import Job, Task, pack_stretch
from rankfeed.building.records import Part
from rankfeed.building.workers import portable
from rankfeed.errors import PackError, RankfeedError, listed, safe_str
from rankfeed.sources.extras import need
from rankfeed.storage import write_atomic

#: How often Ray starts a task again whose process or node died.
_RETRIES = 5
#: Seconds in which a file written here is seen on another node, and in which a node answers.
_SEEN, _ANSWERED = 10.0, 60.0
_TOKEN = "ray-token"
#: So many times `patience` a cluster may be without any core: one that grows by itself takes its time.
_NO_CORES = 5


@dataclass
class OnRay:
    """The workers of a Ray cluster.

    Args:
        workers: stretches at once; as many as the cluster has cores if None.
        patience: seconds without a finished stretch after which the user is told.
    """

    workers: int | None = None
    checks: bool = True
    patience: float = 60.0
    _token: str = field(default_factory=lambda: secrets.token_hex(16))

    @contextmanager
    def session(self, staging: Path) -> Iterator[None]:
        """Connected to a cluster all of whose nodes see the folder.

        Raises:
            PackError: there is no cluster, or a node does not see the folder.
            MissingExtraError: Ray is not installed.
        """
        ray = need("ray", extra="ray")
        connected = ray.is_initialized()
        if not connected:
            try:
                ray.init(log_to_driver=False, logging_level="error")
            except Exception as error:
                raise PackError(
                    "no Ray cluster can be reached or started",
                    found=f"{type(error).__name__}: {safe_str(error)}",
                    remedy="look at RAY_ADDRESS and `ray status`, or call ray.init(...) before rankfeed.pack",
                ) from error
        try:
            with lost_cluster(ray):
                yield
        finally:
            if not connected:
                ray.shutdown()

    def step(self) -> None:
        """Nobody waits for this process alone."""

    def each(self, job: Job, tasks: list[Task]) -> Iterator[tuple[int, list[Part]]]:
        """Have the stretches packed, a bounded number at a time.

        Raises:
            PackError: a stretch cannot be packed, or whoever packs it dies again and again.
        """
        ray = need("ray", extra="ray")
        write_atomic(job.staging / _TOKEN, self._token.encode())
        self._check_nodes(job.staging)
        try:
            work = ray.put(ray.cloudpickle.dumps(job))
        except Exception as error:
            raise PackError(
                "the source or the function cannot be sent to other processes",
                found=f"{type(error).__name__}: {safe_str(error)}",
                remedy="open files and models where they are used, or define them in a module",
            ) from error
        stretch = ray.remote(num_cpus=1, max_retries=_RETRIES)(_pack_there)
        waiting = iter(tasks)
        running: dict[Any, Task] = {}
        quiet, told = time.monotonic(), False
        try:
            while True:
                cores = self.workers or int(ray.cluster_resources().get("CPU", 1))
                for task in islice(waiting, max(0, max(1, cores) - len(running))):
                    running[stretch.remote(work, str(job.staging), self._token, task)] = task
                if not running:
                    return
                # A pause now and then, to see whether the cluster has grown.
                finished = ray.wait(list(running), timeout=min(10.0, self.patience))[0]
                if finished:
                    quiet, told = time.monotonic(), False
                elif time.monotonic() - quiet > self.patience:
                    told = self._tell(ray, job.staging, list(running.values()), time.monotonic() - quiet, told)
                for done in finished:
                    task = running.pop(done)
                    good, result = _result(ray, done, f"stretch {task[0]} (positions {task[1]} to {task[2] - 1})")
                    if not good:
                        raise result
                    yield result
        finally:
            for left in running:
                with suppress(Exception):  # of a cluster that is lost: what is on its way says more
                    ray.cancel(left, force=True)

    def _tell(self, ray: Any, staging: Path, running: list[Task], seconds: float, told: bool) -> bool:
        """Say whom this process waits for.

        Raises:
            PackError: for nobody: the cluster has no cores.
        """
        cores = ray.cluster_resources().get("CPU", 0)
        if cores < 1 and seconds > _NO_CORES * self.patience:
            raise PackError(
                f"the Ray cluster has had no core to pack with for {seconds:.0f} seconds",
                expected="a node with one core or more",
                found=f"{cores:g} cores on {len(ray.nodes())} nodes",
                remedy="add a node, or start the cluster with cores (num_cpus=...)",
            )
        if not told:
            begun = (staging / _begun(self._token)).exists()
            numbers = listed([str(task[0]) for task in running])
            problem = "were not finished" if begun else f"were not begun: none of {cores:g} cores has been free"
            warnings.warn(
                f"stretches {numbers} {problem} for {seconds:.0f} seconds on the Ray cluster; still waiting (do "
                "tasks, actors or placement groups hold the cores, or does map hang?)",
                RuntimeWarning,
                stacklevel=2,
            )
        return True

    def _check_nodes(self, staging: Path) -> None:
        ray = need("ray", extra="ray")
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ask = ray.remote(num_cpus=0, max_retries=0)(_sees)
        asked = {}
        for node in ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU", 0) >= 1:
                where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
                answer = ask.options(scheduling_strategy=where).remote(str(staging), self._token)
                asked[answer] = node["NodeManagerAddress"]
        # A node that does not answer in time is not waited for: each stretch asks again.
        for answer in ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWERED)[0] if asked else ():
            try:
                sees = ray.get(answer)
            except ray.exceptions.RayTaskError as error:
                raise PackError(
                    "a node of the Ray cluster cannot run rankfeed",
                    found=error.cause or error,
                    where=asked[answer],
                    remedy="install the same rankfeed on all nodes, or name it in ray.init's runtime_env",
                ) from error
            except ray.exceptions.RayError:
                continue  # it died meanwhile
            if not sees:
                raise _unseen(staging, asked[answer])


@contextmanager
def lost_cluster(ray: Any) -> Iterator[None]:
    """Turns what Ray says when the whole cluster is gone into an error of ours."""
    try:
        yield
    except RankfeedError:
        raise
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise PackError(
            "the Ray cluster was lost",
            found=f"{type(error).__name__}: {safe_str(error)}",
            remedy="start it again and call pack again: it goes on where it stopped",
        ) from error


def _result(ray: Any, done: Any, where: str) -> tuple[bool, Any]:
    try:
        return ray.get(done)  # type: ignore[no-any-return]
    except ray.exceptions.RayTaskError as error:  # our own code returns its errors: this one was not found there
        return False, PackError(
            "a node of the Ray cluster cannot run rankfeed",
            found=error.cause or error,
            where=where,
            remedy="install the same rankfeed on all nodes, or name it in ray.init's runtime_env",
        )
    except ray.exceptions.RayError as error:
        return False, PackError(
            "those who packed a stretch died, again and again",
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            where=where,
            remedy="were they killed for their memory? Try fewer workers or smaller shards; a second call goes on",
        )


def _sees(staging: str, token: str) -> bool:
    """Whether this machine sees what the driver wrote."""
    deadline = time.monotonic() + _SEEN
    while True:
        with suppress(OSError):
            if Path(staging, _TOKEN).read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _begun(token: str) -> str:
    """The name of a file that is there when a worker has begun."""
    return f"ray-begun-{token}"


def _unseen(staging: Path | str, node: str) -> PackError:
    return PackError(
        "a node of the Ray cluster does not see the folder that is packed into",
        expected="a file system that all nodes share, under the same path",
        where=f"{Path(staging).parent} on {node}",
        remedy='choose a shared folder, or pack with runner="local"',
    )


@lru_cache(maxsize=1)
def _unpickled(work: bytes) -> Job:
    """The job, and with it the open files of its source, for all stretches that this process packs."""
    return pickle.loads(work)  # type: ignore[no-any-return]  # noqa: S301  (of the driver)


def _pack_there(work: bytes, staging: str, token: str, task: Task) -> tuple[bool, Any]:
    """What a worker of the cluster does: its error is a result, so that it arrives as it is."""
    import socket

    try:
        if not _sees(staging, token):
            return False, _unseen(staging, socket.gethostname())
        Path(staging, _begun(token)).touch()
        return True, pack_stretch(replace(_unpickled(work), staging=Path(staging)), *task)
    except Exception as error:
        return False, portable(error)
