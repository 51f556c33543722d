"""What is wrong with the order of samples, with random numbers, and with what a resumed run delivers."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from rankfeed.diagnostics.doctor.kinds import Kind
from rankfeed.diagnostics.doctor.records import EpochLog, RowKey, RunLog, Step
from rankfeed.diagnostics.doctor.remedies import finding
from rankfeed.diagnostics.doctor.rules import ENOUGH
from rankfeed.diagnostics.findings import Finding, Severity
from rankfeed.errors import listed

_Place = tuple[int, int, int]  # rank, worker (-1 without), epoch

#: Random values that must agree before two streams are called one.
_ALIKE = 4
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
    """Whether batches come in the order of their keys, or are interleaved from a few streams that do.

    Examples:
        >>> def steps(*batches): return [Step(ids=list(keys)) for keys in batches]
        >>> in_order(steps([0, 1], [50, 51], [2, 3], [52, 53], [4, 5]))
        True
        >>> in_order(steps([3, 1], [2, 0], [7, 4], [5, 6], [9, 8]))
        False
    """
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


def same_randomness(run: RunLog, runs: Sequence[RunLog]) -> Iterator[Finding]:
    """Workers, ranks or epochs that draw the same random numbers for different samples.

    An error for workers of a rank, if the draws belong to samples: a stream may use them to shuffle only. Ranks
    and epochs may draw the same because a training script seeds them so.
    """
    for parties, text, of_samples in (*_same_streams(run), *_same_values(run, _random_fields(runs))):
        severity: Severity = "error" if parties == "workers" and of_samples else "warning"
        what = "the same random numbers are drawn for different samples"
        yield finding("same-randomness-in-workers", severity, what, f"{run.job.name}: {parties} {text}")


def _same_streams(run: RunLog) -> Iterator[tuple[str, str, bool]]:
    """Generators of workers that began in the same state and were drawn from in several batches."""
    drawn: dict[str, dict[_Place, str]] = {}
    for rank in run.ranks:
        for epoch in rank.epochs:
            for (name, worker), digest in _streams_of(epoch).items():
                drawn.setdefault(name, {})[rank.rank, worker, epoch.epoch] = digest
    of_samples = all(step.indices is not None for step in run.steps)
    for name, places in sorted(drawn.items()):
        for parties, where in _pairs(places, lambda one, other: one == other):
            yield parties, f"draw the same numbers from {name}: {where}", of_samples


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


def _random_fields(runs: Sequence[RunLog]) -> set[str]:
    """Fields whose value for the same sample changes from delivery to delivery."""
    known: dict[tuple[str, RowKey], int] = {}
    differs: set[str] = set()
    for step in (step for run in runs for step in run.steps if step.ids is not None or step.indices is not None):
        for name, column in step.fields.items():
            for key, value in zip(step.keys, column, strict=False):
                if known.setdefault((name, key), value) != value:
                    differs.add(name)
    return differs


def _same_values(run: RunLog, random: set[str]) -> Iterator[tuple[str, str, bool]]:
    """Random fields that have the same values at the same places of two streams, for different samples."""
    streams: dict[str, dict[_Place, list[tuple[RowKey, int]]]] = {}
    for rank in run.ranks:
        for epoch in rank.epochs:
            for step in epoch.steps:
                for name in random & step.fields.keys():
                    place = (rank.rank, -1 if step.worker is None else step.worker, epoch.epoch)
                    pairs = zip(step.keys, step.fields[name], strict=False)
                    streams.setdefault(name, {}).setdefault(place, []).extend(pairs)

    def alike(one: Sequence[tuple[RowKey, int]], other: Sequence[tuple[RowKey, int]]) -> bool:
        pairs = list(zip(one, other, strict=False))
        equal = {value for (key, value), (another, same) in pairs if value == same and key != another}
        return len(equal) >= max(_ALIKE, 0.9 * len(pairs))

    for name, places in sorted(streams.items()):
        for parties, where in _pairs(places, alike):
            yield parties, f"have the same values in {name!r}: {where}", True


def _pairs(places: Mapping[_Place, Any], same: Callable[[Any, Any], bool]) -> Iterator[tuple[str, str]]:
    """The first pair of workers, ranks and epochs that is the same."""
    found = set()
    for one, other in combinations(places, 2):
        parties = "ranks" if one[0] != other[0] else "epochs" if one[2] != other[2] else "workers"
        if parties not in found and same(places[one], places[other]):
            found.add(parties)
            yield parties, f"{_name(one)} and {_name(other)}"


def _name(place: _Place) -> str:
    rank, worker, epoch = place
    return f"rank {rank}{'' if worker < 0 else f' worker {worker}'} epoch {epoch}"


def resumed(whole: RunLog, after: RunLog, kind: Kind) -> Iterator[Finding]:
    """What a run delivers that resumed from the middle of the first epoch of `whole`."""
    if not whole.epochs or not after.epochs or any(rank.state_after is None for rank in whole.ranks):
        return
    expected = kind.total(whole.epochs[0], whole)
    before: Counter[RowKey] = Counter()
    for number, (rank, epoch) in enumerate(zip(whole.ranks, whole.epochs[0], strict=True)):
        before.update(key for step in epoch.steps[: rank.state_after] for key in kind.of(step, whole, number))
    rest = kind.total(after.epochs[0], after)
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
