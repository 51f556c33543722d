"""The small files by which the ranks of a job hear of each other without a network.

Rank 0 reads those of all others and writes what follows from them into its own, which all others read. A file left
by a job that was killed is told from one of this job by an answer: each rank makes up a name for itself, and
follows only a rank 0 whose file has that name in it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from rankfeed.errors import PackError, RankfeedError, safe_str
from rankfeed.storage.commit import temporary_name
from rankfeed.storage.decodable import decodable
from rankfeed.topology.job import ONE_HOST

#: The folder of these files, inside the staging folder.
FOLDER = "ranks"
RUN, PLAN = "run.json", "plan.json"
#: What a file begins with that says that a stretch was begun.
CLAIM = "claim-"
#: What rank 0 says where another pack is at work in the folder: files of this form instead of the first.
REFUSALS = "refused-*.json"
_T = TypeVar("_T")


@decodable
class Failure(msgspec.Struct, frozen=True):
    """An error on its way to other ranks, as text: nothing is unpickled."""

    rank: int
    summary: str
    expected: str | None = None
    found: str | None = None
    where: str | None = None
    remedy: str | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """An error as text."""
        if isinstance(error, RankfeedError):
            facts = (error.expected, error.found, error.where, error.remedy)
            return cls(rank, error.summary, *(None if fact is None else str(fact) for fact in facts))
        return cls(rank, f"{type(error).__name__}: {safe_str(error)}")

    def error(self) -> PackError:
        """What the other ranks raise."""
        return PackError(
            f"rank {self.rank} failed: {self.summary}",
            expected=self.expected,
            found=self.found,
            where=self.where,
            remedy=self.remedy,
        )


@decodable
class Member(msgspec.Struct, frozen=True):
    """What a rank says.

    Args:
        rank: which it is.
        name: that it made up for itself.
        job: whose rank it is, as `job_id`.
        world_size: of that job.
        call: which call of its process it is that packs into this folder: the n-th of each rank is one pack.
        beat: counts on while it lives.
        steps: counts on while it gets on with its work: one that hangs may well live.
        doing: the stretch that it packs now.
        failure: why it can't go on.
        told: whether it has heard that the data set is there.
    """

    rank: int
    name: str
    job: str
    world_size: int
    call: int
    beat: int = 0
    steps: int = 0
    doing: int | None = None
    failure: Failure | None = None
    told: bool = False


@decodable
class Run(msgspec.Struct, frozen=True):
    """What rank 0 says.

    Args:
        beat: counts on while it lives.
        steps: counts on while it gets on with its work.
        digest: of what it was asked to pack; all ranks must have been asked the same.
        call: which call of rank 0 it is. Ranks that are at an earlier one hear of it, too.
        members: names of the ranks that it has heard of.
        busy: stretches that ranks get on with now.
        planned: whether the list of stretches is there.
        state: "working", "done" or "failed".
        result: fingerprint of the data set, when done.
        failure: why it failed.
    """

    beat: int
    digest: str
    call: int
    steps: int = 0
    members: list[str] = []
    busy: list[int] = []
    planned: bool = False
    state: str = "working"
    result: str = ""
    failure: Failure | None = None


@decodable
class Plan(msgspec.Struct, frozen=True):
    """The stretches: which call of rank 0, name of the job, rows to read in one go, start and stop of each."""

    call: int
    job: str
    batch: int
    ranges: list[tuple[int, int]]


def put(path: Path, content: msgspec.Struct) -> None:
    """Write a small file at once. It need not survive a power cut: who wrote it would not either.

    Raises:
        OSError: it cannot be written.
    """
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(msgspec.json.encode(content))
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def get(path: Path, kind: type[_T]) -> _T | None:
    """Read one; None if it is not there or not of this kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def same_job(one: str, other: str) -> bool | None:
    """Whether two marks are of one job; None where they don't tell.

    Examples:
        >>> same_job("a:1", "a:1"), same_job("a:1", "a:2"), same_job("a:1", "")
        (True, False, None)
        >>> same_job("on host1 parent 5", "on host2 parent 5") is None  # a parent process on each host
        True
    """
    if not one or not other:
        return None
    hosts = [mark.split(" ")[1] for mark in (one, other) if mark.startswith(ONE_HOST)]
    return None if len(set(hosts)) > 1 else one == other
