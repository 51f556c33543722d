"""Ranks whose streams end at different positions take the same number of steps.

Each rank prepares a few batches. Then all ranks exchange how many they have, whether their stream has ended after
them, and whether it failed; from these reports every rank computes the same decision. The exchange depends on the
streams alone, not on timing, and happens at the same steps on every rank: an iteration that all ranks leave early
leaves none waiting.
"""

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, TypeVar

from rankfeed.errors import RankfeedError, StreamError, TopologyError, safe_str
from rankfeed.loading.rank_group import TorchRankGroup, process_count
from rankfeed.loading.streams.sharding import empty_stream
from rankfeed.topology import Topology

_T = TypeVar("_T")


@dataclass(frozen=True)
class RankReport:
    """What a rank reports about the next steps."""

    rank: int
    steps: int  # batches that it has prepared
    ended: bool  # whether its stream has ended after them
    num_read: int = 0  # samples of the stream in them and before
    fingerprint: str = ""  # of the last sample of each of them (see `sample_fingerprint`)
    error: str = ""  # why it cannot continue after them, the last lines of a traceback
    has_filler: bool = True  # whether it has a sample for padding rows


@dataclass(frozen=True)
class StepDecision:
    """All ranks deliver ``steps``, and then continue, or stop, or raise because of ``failed``."""

    steps: int
    over: bool
    failed: RankReport | None = None


def decide(reports: Sequence[RankReport], *, pads: bool) -> StepDecision:
    """The decision that follows from the reports of all ranks, the same on every rank."""
    # Under "drop" the rank with the fewest steps decides, under "pad" the one with the most; none gets past an
    # error.
    steps = min(each.steps for each in reports)
    if pads:
        steps = min((each.steps for each in reports if each.error), default=max(each.steps for each in reports))
    stopping = [each for each in reports if each.ended and each.steps <= steps]
    over = len(stopping) == len(reports) if pads else any(each.steps == steps for each in stopping)
    failed = next((each for each in reports if each.error and each.steps == steps), None)
    if failed is not None and over and not pads:
        failed = None  # the job stops before the error
    return StepDecision(steps, over or failed is not None, failed)


def check_same_stream(reports: Sequence[RankReport]) -> None:
    """Raise StreamError if ranks that take their samples of one stream by counting read different streams."""
    first = reports[0]
    for other in reports[1:]:
        same_place = (first.num_read, first.steps) == (other.num_read, other.steps)
        if same_place and first.fingerprint != other.fingerprint:
            found = f"ranks {first.rank} and {other.rank} read different samples at {first.num_read - 1} or before"
        elif not same_place or first.ended != other.ended:
            found = "; ".join(
                f"rank {each.rank} read {each.num_read} samples up to this step" + (", then the end" * each.ended)
                for each in (first, other)
            )
        else:
            continue
        raise StreamError(
            "the ranks read different streams, and by counting would lose samples and repeat others",
            expected="the same samples in the same order on every rank",
            found=found,
            remedy="let the factory yield the same on every rank (a shuffle with one seed), or give it a "
            "parameter named shard and yield that share only",
        )


def stream_group(topology: Topology, *, sharded: bool) -> TorchRankGroup | None:
    """The group in which the ranks agree; None for one rank, or where every rank reads the whole stream."""
    if topology.world_size == 1:
        return None
    processes = process_count()
    if processes % topology.world_size == 0:
        return TorchRankGroup(f"rank {topology.rank} of {topology.world_size}")
    if sharded:
        raise TopologyError(
            "ranks that each have their own stream must agree on its end",
            expected=f"torch.distributed, initialised with {topology.world_size} processes",
            found="not initialised" if processes == 1 else f"{processes} processes",
            remedy="call torch.distributed.init_process_group('gloo') first, or leave out the factory's parameter "
            "shard and yield the whole stream on every rank",
        )
    return None


def check_same_start(
    group: TorchRankGroup, rank: int, start: Mapping[str, Any], world_size: int, window: int
) -> int:
    """Check that all ranks begin an iteration at the same position. Returns the smallest window."""
    reports: list[tuple[int, dict[str, Any], int]] = group.gather((rank, dict(start), window))
    first, expected, _ = reports[0]
    for other, its_start, _ in reports[1:]:
        differing = [name for name in expected if expected[name] != its_start.get(name)]
        if differing:
            raise StreamError(
                "the ranks begin the stream at different positions",
                found="; ".join(
                    f"{name}: {expected[name]} on rank {first}, {its_start.get(name)} on rank {other}"
                    for name in differing
                ),
                remedy="create the loader equally on every rank, and load the same state",
            )
    ranks = sorted(each for each, *_ in reports)
    if ranks != sorted([*range(world_size)] * (len(ranks) // world_size)):
        raise StreamError(
            "the ranks of the processes are inconsistent",
            expected=f"ranks 0 to {world_size - 1}, each equally often",
            found=ranks,
            remedy="leave topology out, so that it is detected",
        )
    return min(window for *_, window in reports)


class BatchProducer(Protocol[_T]):
    """The batches that a rank can prepare."""

    filler: list[Any]  # a sample for padding rows; empty where there is none yet

    def __next__(self) -> _T: ...

    def __iter__(self) -> Iterator[_T]: ...

    def report(self, ready: Sequence[_T], ended: bool, error: str) -> RankReport: ...

    def padding_batch(self) -> _T: ...


def synchronize_end(
    producer: BatchProducer[_T], group: TorchRankGroup, *, window: int, pads: bool, shared: bool
) -> Iterator[_T]:
    """The batches of this rank, as many as all ranks agree on, at most ``window`` of them at once."""
    size, over = 1, False  # the first batch waits for few others
    while not over:
        ready, error = _prepare(producer, size)
        is_full = len(ready) == size
        report = producer.report(ready, not is_full and error is None, _text(error))
        # What must be equal on all ranks in the middle of one stream.
        word = int(report.fingerprint[:15] or "0", 16) ^ report.num_read if shared else 0
        if group.all_equal(is_full, word):
            yield from ready
        else:
            reports: list[RankReport] = group.gather(report)
            if shared and not any(each.error for each in reports):
                check_same_stream(reports)
            decision = decide(reports, pads=pads)
            if (
                decision.over
                and decision.failed is None
                and not any(each.num_read or each.has_filler for each in reports)
            ):
                raise empty_stream("the streams of all ranks are empty")
            behind = [each for each in reports if each.steps < decision.steps]
            if not all(each.has_filler for each in behind):
                fillers = group.gather(producer.filler)
                producer.filler = producer.filler or next(each for each in fillers if each)
            if behind:
                missing = decision.steps - len(ready)
                padding, failure = _prepare((producer.padding_batch() for _ in range(missing)), missing)
                ready, error = ready + padding, error or failure
                # Building these can fail too, which all ranks must know before they deliver them.
                reports = group.gather(replace(report, steps=len(ready), error=_text(error)))
                decision = decide(reports, pads=pads)
            over = decision.over
            yield from ready[: decision.steps]
            if decision.failed is not None:
                raise error or StreamError(
                    f"the stream of rank {decision.failed.rank} failed, so all ranks stop",
                    found=decision.failed.error,
                    where=f"rank {report.rank}",
                )
        size = min(2 * size, window)


def _prepare(batches: Iterable[_T], size: int) -> tuple[list[_T], Exception | None]:
    """Up to ``size`` batches, and the error if they fail."""
    ready: list[_T] = []
    try:
        ready.extend(islice(batches, max(0, size)))
    except Exception as error:
        return ready, error
    return ready, None


def _text(error: Exception | None, most: int = 8) -> str:
    """The end of a traceback, as another rank reports it; empty without an error."""
    if isinstance(error, RankfeedError):
        cause = error.__cause__
        lines = "" if cause is None else "\n" + "".join(traceback.format_exception(cause)[-most:]).rstrip()
        return f"{type(error).__name__}: {safe_str(error)}{lines}"
    return "" if error is None else "".join(traceback.format_exception(error)[-most:]).rstrip()
