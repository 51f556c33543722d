"""The agreed stop: ranks whose streams end at different places take the same number of steps.

Each rank makes a few batches ahead, and then all ranks tell each other how many they have, whether their stream
has ended behind them, and whether it failed. From that every rank works out by itself what all of them deliver.
What is said depends on the streams alone, not on who is quicker, and it is said at steps that are the same on
every rank: so an iteration that all ranks leave early leaves nobody waiting.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from rankfeed.errors import RankfeedError, StreamError, safe_str

_T = TypeVar("_T")


class Council(Protocol):
    """How the ranks of a job talk to each other; every rank calls the same things in the same order."""

    def alike(self, ordinary: bool, word: int) -> bool:
        """Whether all ranks say ``ordinary``, and the same ``word`` (of 62 bits)."""

    def gather(self, value: Any) -> list[Any]:
        """What each process said, in their order."""


@dataclass(frozen=True)
class Report:
    """What a rank says of the steps that come next.

    Args:
        rank: who it is.
        steps: batches that it has made.
        ended: whether its stream has ended behind them.
        read: samples of the stream in them and before.
        mark: of the last sample of each of them (see ``mark_of``).
        error: why it cannot go on behind them, the last lines of a traceback.
        spare: whether it has a sample to fill up with.
    """

    rank: int
    steps: int
    ended: bool
    read: int = 0
    mark: str = ""
    error: str = ""
    spare: bool = True


@dataclass(frozen=True)
class Verdict:
    """What all ranks do: deliver ``steps``, and then go on, or stop, or raise what ``failed`` says."""

    steps: int
    over: bool
    failed: Report | None = None


def verdict(reports: Sequence[Report], *, pads: bool) -> Verdict:
    """What follows from the reports of all ranks, the same wherever it is worked out.

    Args:
        reports: one for each rank, of as many steps to come.
        pads: whether ranks whose stream has ended go on until all have.

    Examples:
        >>> verdict([Report(0, steps=2, ended=False), Report(1, steps=1, ended=True)], pads=False)
        Verdict(steps=1, over=True, failed=None)
        >>> verdict([Report(0, steps=2, ended=False), Report(1, steps=1, ended=True)], pads=True)
        Verdict(steps=2, over=False, failed=None)
    """
    # Under "drop" whoever has fewest decides, under "pad" whoever has most; nobody gets past an error.
    failing = [each.steps for each in reports if each.error]
    steps = min(failing, default=max(each.steps for each in reports))
    if not pads:
        steps = min(each.steps for each in reports)
    stopping = [each for each in reports if each.ended and each.steps <= steps]
    over = len(stopping) == len(reports) if pads else any(each.steps == steps for each in stopping)
    failed = next((each for each in reports if each.error and each.steps == steps), None)
    if failed is not None and over and not pads:
        failed = None  # the job stops here, whatever would have come behind
    return Verdict(steps, over or failed is not None, failed)


def same_stream(reports: Sequence[Report]) -> None:
    """Raise StreamError if ranks that read one stream, and share it out by counting, do not read the same."""
    first = reports[0]
    for other in reports[1:]:
        if (first.read, first.steps) == (other.read, other.steps) and first.mark != other.mark:
            found = f"ranks {first.rank} and {other.rank} have different samples at {first.read - 1} or before"
        elif (first.steps, first.ended, first.read) != (other.steps, other.ended, other.read):
            found = "; ".join(
                f"rank {each.rank} read {each.read} samples up to this step" + (", and no more came" * each.ended)
                for each in (first, other)
            )
        else:
            continue
        raise StreamError(
            "the ranks read different streams, and by counting would lose samples and repeat others",
            expected="the same samples in the same order on every rank",
            found=found,
            remedy="let the factory yield the same everywhere (a shuffle with one seed), or have a parameter "
            "named shard and yield that share alone",
        )


class Feed(Protocol[_T]):
    """The batches that a rank can make, and what it says of them.

    Attributes:
        spare: a sample to fill up with, in a list; an empty list where there is none yet.
    """

    spare: list[Any]

    def __next__(self) -> _T: ...

    def __iter__(self) -> Iterator[_T]: ...

    def report(self, ready: Sequence[_T], ended: bool, error: str) -> Report:
        """How this rank stands behind these batches."""

    def filler(self) -> _T:
        """A batch that only fills, of the spare sample."""


@dataclass
class Stop(Generic[_T]):
    """The batches of this rank, as many as all ranks agree on.

    Args:
        feed: the batches that it can make.
        council: of all ranks.
        window: the most steps that are agreed on at once; the same on every rank.
        pads: whether it goes on with batches that only fill until the streams of all have ended.
        shared: whether all ranks read one stream, and must agree in all.
    """

    feed: Feed[_T]
    council: Council
    window: int
    pads: bool
    shared: bool

    def __iter__(self) -> Iterator[_T]:
        # At first few, so that the first batch need not wait for many.
        size, over = 1, False
        while not over:
            ready, error = _made(self.feed, size)
            ordinary = len(ready) == size
            ended = not ordinary and error is None
            report = self.feed.report(ready, ended, "" if error is None else last_lines(error))
            if self.council.alike(ordinary, _word(report) if self.shared else 0):
                yield from ready
            else:
                reports: list[Report] = self.council.gather(report)
                agreed = self._agreed(reports)
                if any(each.steps < agreed.steps for each in reports):
                    missing = agreed.steps - len(ready)
                    fillers, failed = _made((self.feed.filler() for _ in range(missing)), missing)
                    ready, error = ready + fillers, failed if error is None else error
                    # Making these can fail as well, and that has to be known before they are delivered.
                    told = "" if error is None else last_lines(error)
                    reports = self.council.gather(replace(report, steps=len(ready), error=told))
                    agreed = verdict(reports, pads=self.pads)
                over = agreed.over
                yield from ready[: agreed.steps]
                if agreed.failed is not None:
                    if error is not None:
                        raise error
                    raise StreamError(
                        f"the stream of rank {agreed.failed.rank} failed, so all ranks stop",
                        found=agreed.failed.error,
                        where=f"rank {report.rank}",
                    )
            size = min(2 * size, self.window)

    def _agreed(self, reports: Sequence[Report]) -> Verdict:
        if self.shared and not any(each.error for each in reports):
            same_stream(reports)
        agreed = verdict(reports, pads=self.pads)
        if agreed.over and agreed.failed is None and not any(each.read for each in reports):
            raise StreamError(
                "the streams of all ranks are empty",
                remedy="let the factory open the stream anew each time it is called: an iterator made outside is "
                "used up",
            )
        if any(each.steps < agreed.steps and not each.spare for each in reports):
            lent = self.council.gather(self.feed.spare)  # a sample of each rank that has one
            self.feed.spare = self.feed.spare or next(each for each in lent if each)
        return agreed


def _made(batches: Iterable[_T], size: int) -> tuple[list[_T], Exception | None]:
    """So many batches; fewer where they end or fail, and in that case the error."""
    ready: list[_T] = []
    try:
        ready.extend(islice(batches, max(0, size)))
    except Exception as error:
        return ready, error
    return ready, None


def last_lines(error: Exception, most: int = 8) -> str:
    """The end of a traceback, as another rank tells of it."""
    if isinstance(error, RankfeedError):
        cause = error.__cause__
        behind = "" if cause is None else "\n" + "".join(traceback.format_exception(cause)[-most:]).rstrip()
        return f"{type(error).__name__}: {safe_str(error)}{behind}"
    return "".join(traceback.format_exception(error)[-most:]).rstrip()


def _word(report: Report) -> int:
    """What has to be the same on all ranks that are in the middle of one stream."""
    return int(report.mark[:15] or "0", 16) ^ report.read
