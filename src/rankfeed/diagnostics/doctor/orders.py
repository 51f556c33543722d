"""What is wrong with the order of samples, with random numbers, and with what a resumed run delivers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from rankfeed.diagnostics.doctor.kinds import Kind
from rankfeed.diagnostics.doctor.records import EpochLog, RowKey, RunLog, Step
from rankfeed.diagnostics.doctor.rules import ENOUGH
from rankfeed.diagnostics.findings import Finding, Severity
from rankfeed.diagnostics.remedies import finding
from rankfeed.errors import listed

_Place = tuple[int, int, int]  # rank, worker, epoch
_PLACE = "rank {} worker {} epoch {}"

#: Number of ordered streams that may be interleaved.
_LANES = 16


def same_order(run: RunLog) -> Iterator[Finding]:
    """Epochs that have the same order on a rank, although the loader shuffles."""
    for rank in run.ranks:
        for one, other in pairwise(rank.whole):
            keys = one.keys
            if len({*keys}) < ENOUGH or keys != other.keys:
                continue
            shuffles = None if rank.built is None else rank.built.shuffles
            if shuffles is False or (shuffles is None and in_order(one.steps)):
                return
            numbers = [key for key in keys if isinstance(key, int)]
            dense = len(numbers) == len(keys) and max(numbers) - min(numbers) < 2 * run.job.ranks * len({*numbers})
            sure = shuffles or dense  # sample numbers in another order than theirs; names may have any
            first = listed([str(key) for key in keys], 8)
            where = f"{run.job.name}, rank {rank.rank}"
            text = f"{where}: epochs {one.epoch} and {other.epoch} both begin with {first}"
            what = "epochs have the same order" + ("" if sure else " (harmless if the loader does not shuffle)")
            yield finding("same-order-every-epoch", "warning" if sure else "note", what, text)
            return


def in_order(steps: Sequence[Step]) -> bool:
    """Whether batches come in the order of their keys, or are interleaved from a few streams that do."""
    batches = [step.keys for step in steps if step.keys]
    if len({type(key) for batch in batches for key in batch}) > 1:
        return False
    inside = [_precedes(earlier, later) for batch in batches for earlier, later in pairwise(batch)]
    if sum(inside) < 0.95 * len(inside):
        return False
    first = [batch[0] for batch in batches]
    for lanes in range(1, min(_LANES, max(1, len(first) // 2)) + 1):
        pairs = list(zip(first, first[lanes:], strict=False))
        if sum(_precedes(*pair) for pair in pairs) >= 0.95 * len(pairs):
            return True
    return False


def _precedes(one: RowKey, other: RowKey) -> bool:
    return one <= other if isinstance(one, int) and isinstance(other, int) else str(one) <= str(other)


def same_randomness(run: RunLog) -> Iterator[Finding]:
    """Workers, ranks or epochs whose generators began in the same state and were drawn from in several batches.

    An error for workers of a rank, if the draws belong to samples: a stream may use them to shuffle only. Ranks
    and epochs may draw the same because a training script seeds them so.
    """
    drawn: dict[str, dict[_Place, str]] = {}
    for rank in run.ranks:
        for epoch in rank.epochs:
            for (name, worker), digest in _streams_of(epoch).items():
                drawn.setdefault(name, {})[rank.rank, worker, epoch.epoch] = digest
    of_samples = all(step.indices is not None for step in run.steps)
    for name, places in sorted(drawn.items()):
        found = set()
        for one, other in combinations(places, 2):
            parties = "ranks" if one[0] != other[0] else "epochs" if one[2] != other[2] else "workers"
            if places[one] != places[other] or parties in found:
                continue
            found.add(parties)
            severity: Severity = "error" if parties == "workers" and of_samples else "warning"
            both = f"{_PLACE.format(*one)} and {_PLACE.format(*other)}"
            text = f"{run.job.name}: {parties} draw the same numbers from {name}: {both}"
            what = "the same random numbers are drawn for different samples"
            yield finding("same-randomness-in-workers", severity, what, text)


def _streams_of(epoch: EpochLog) -> dict[tuple[str, int], str]:
    """State of each generator that a worker draws from in more batches than its first, by name and worker.

    Draws before the first batch only shuffle, and must be the same in all workers.
    """
    times: Counter[tuple[str, int]] = Counter()
    begun: set[int] = set()
    digests: dict[tuple[str, int], str] = {}
    for step in epoch.steps:
        if step.worker is None:
            continue
        for name, digest in step.streams.items():
            times[name, step.worker] += step.worker in begun
            digests[name, step.worker] = digest
        begun.add(step.worker)
    return {place: digest for place, digest in digests.items() if times[place] >= 2}


def resumed(whole: RunLog, after: RunLog, kind: Kind) -> Iterator[Finding]:
    """What a run delivers that resumed from the middle of the first epoch of `whole`."""
    if not whole.epochs or not after.epochs or any(rank.state_after is None for rank in whole.ranks):
        return
    expected = kind.total(whole.epochs[0])
    before: Counter[RowKey] = Counter()
    for rank, epoch in zip(whole.ranks, whole.epochs[0], strict=True):
        before.update(key for step in epoch.steps[: rank.state_after] for key in kind.of(step))
    rest = kind.total(after.epochs[0])
    if (whole.job.ranks, whole.job.workers) != (after.job.ranks, after.job.workers):
        expected = Counter({*expected})  # padding differs
    steps = " or ".join(str(each) for each in sorted({rank.state_after or 0 for rank in whole.ranks}))
    taken = f"the state was taken after {steps} steps ({before.total()} samples), {after.job.name}"
    for code, found, what in (
        ("resume-repeats", before + rest - expected, "a resumed run repeats samples of before the checkpoint"),
        ("resume-skips", expected - before - rest, "a resumed run skips samples"),
    ):
        if found:
            text = f"{taken}: {found.total()} samples: {listed([str(key) for key in found], 8)}"
            yield finding(code, "error", what, text)
