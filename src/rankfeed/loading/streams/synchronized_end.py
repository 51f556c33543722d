"""Lets ranks whose streams end at different positions take the same number of steps.

Each rank prepares a few batches. Then all ranks exchange how many they have, whether their stream has ended after
them, and whether it failed; from these reports every rank computes the same decision. The exchange depends on the
streams alone, not on timing, and happens at the same steps on every rank: an iteration that all ranks leave early
leaves none waiting.
"""

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from rankfeed.errors import RankfeedError, StreamError, TopologyError, safe_str
from rankfeed.loading.rank_group import TorchRankGroup, process_count
from rankfeed.loading.streams.sharding import empty_stream
from rankfeed.loading.streams.stream_batches import PositionedBatch, RankReport, StreamBatches
from rankfeed.topology import Topology


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
    prepared = [report.steps for report in reports]
    steps = min(prepared)
    if pads:
        steps = min((report.steps for report in reports if report.error), default=max(prepared))
    stopping = [report for report in reports if report.ended and report.steps <= steps]
    over = len(stopping) == len(reports) if pads else any(report.steps == steps for report in stopping)
    failed = next((report for report in reports if report.error and report.steps == steps), None)
    if failed is not None and over and not pads:
        failed = None  # the job stops before the error
    return StepDecision(steps, over or failed is not None, failed)


def check_same_stream(reports: Sequence[RankReport]) -> None:
    """Raise StreamError if ranks that take their samples of one stream by counting read different streams."""
    first = reports[0]
    for other in reports[1:]:
        same_place = (first.num_read, first.steps) == (other.num_read, other.steps)
        if same_place and first.fingerprint != other.fingerprint:
            text = f"ranks {first.rank} and {other.rank} read different samples at {first.num_read - 1} or before"
        elif not same_place or first.ended != other.ended:
            text = "; ".join(
                f"rank {report.rank} read {report.num_read} samples up to this step"
                + (", then the end" * report.ended)
                for report in (first, other)
            )
        else:
            continue
        raise StreamError(
            "the ranks read different streams, and by counting would lose samples and repeat others",
            expected="the same samples in the same order on every rank",
            found=text,
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
    first_rank, expected, _ = reports[0]
    for other_rank, its_start, _ in reports[1:]:
        differing = [name for name in expected if expected[name] != its_start.get(name)]
        if differing:
            raise StreamError(
                "the ranks begin the stream at different positions",
                found="; ".join(
                    f"{name}: {expected[name]} on rank {first_rank}, {its_start.get(name)} on rank {other_rank}"
                    for name in differing
                ),
                remedy="create the loader equally on every rank, and load the same state",
            )
    ranks = sorted(rank for rank, *_ in reports)
    if ranks != sorted([*range(world_size)] * (len(ranks) // world_size)):
        raise StreamError(
            "the ranks of the processes are inconsistent",
            expected=f"ranks 0 to {world_size - 1}, each equally often",
            found=ranks,
            remedy="leave topology out, so that it is detected",
        )
    return min(window for *_, window in reports)


def synchronize_end(
    batches: StreamBatches, group: TorchRankGroup, *, window: int, pads: bool, shared: bool
) -> Iterator[PositionedBatch]:
    """The batches of this rank, as many as all ranks agree on, at most ``window`` of them at once."""
    size, over = 1, False  # the first batch waits for few others
    while not over:
        ready, error = _prepare(batches, size)
        is_full = len(ready) == size
        own_report = batches.report(ready, not is_full and error is None, _text(error))
        # What must be equal on all ranks in the middle of one stream.
        word = int(own_report.fingerprint[:15] or "0", 16) ^ own_report.num_read if shared else 0
        if group.all_equal(is_full, word):
            yield from ready
        else:
            reports: list[RankReport] = group.gather(own_report)
            if shared and not any(report.error for report in reports):
                check_same_stream(reports)
            decision = decide(reports, pads=pads)
            if (
                decision.over
                and decision.failed is None
                and not any(report.num_read or report.has_filler for report in reports)
            ):
                raise empty_stream("the streams of all ranks are empty")
            behind = [report for report in reports if report.steps < decision.steps]
            if not all(report.has_filler for report in behind):
                fillers = group.gather(batches.filler)
                batches.filler = batches.filler or next(filler for filler in fillers if filler)
            if behind:
                missing = decision.steps - len(ready)
                padding, failure = _prepare((batches.padding_batch() for _ in range(missing)), missing)
                ready, error = ready + padding, error or failure
                # Building these can fail too, which all ranks must know before they deliver them.
                reports = group.gather(replace(own_report, steps=len(ready), error=_text(error)))
                decision = decide(reports, pads=pads)
            over = decision.over
            yield from ready[: decision.steps]
            if decision.failed is not None:
                raise error or StreamError(
                    f"the stream of rank {decision.failed.rank} failed, so all ranks stop",
                    found=decision.failed.error,
                    where=f"rank {own_report.rank}",
                )
        size = min(2 * size, window)


def _prepare(batches: Iterable[PositionedBatch], size: int) -> tuple[list[PositionedBatch], Exception | None]:
    """Up to ``size`` batches, and the error if they fail."""
    ready: list[PositionedBatch] = []
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
