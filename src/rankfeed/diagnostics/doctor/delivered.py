"""What is wrong with the samples that the ranks of a probe were given, epoch by epoch."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rankfeed.diagnostics.doctor.findings import Finding
from rankfeed.diagnostics.doctor.observed import SampleKey
from rankfeed.diagnostics.doctor.seen import EpochSeen, ProbeSeen
from rankfeed.errors import listed

#: A part of the data that comes may differ from 1/ranks or 1/workers by so much and be called that.
_ABOUT = 0.15
#: Fewer samples than this may come in one order by chance.
_ENOUGH = 8


@dataclass(frozen=True)
class Known:
    """What all probes together say of the data.

    Attributes:
        due: how often each sample should come; what is not in it, once.
        certain: whether a sample is known by one key wherever it comes: if not, none can be said to be missing.
        alone: the part of all samples that came to one rank without workers; 1 where there was none.
        drawn: whether samples are drawn with replacement.
    """

    due: Mapping[SampleKey, int]
    certain: bool = True
    alone: float = 1.0
    drawn: bool = False


@dataclass
class Dealt:
    """Deliveries of an epoch of a probe, counted.

    Args:
        probe: which.
        epochs: what each rank was given.
        known: of the data.
    """

    probe: ProbeSeen
    epochs: Sequence[EpochSeen]
    known: Known
    by_rank: list[Counter[SampleKey]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_rank = [Counter(epoch.keys) for epoch in self.epochs]

    @cached_property
    def total(self) -> Counter[SampleKey]:
        total: Counter[SampleKey] = Counter()
        for each in self.by_rank:
            total.update(each)
        return total

    @property
    def where(self) -> str:
        return f"{self.probe.job.name}, epoch {self.epochs[0].epoch}"

    @cached_property
    def repeats(self) -> int:
        """Deliveries too many."""
        return sum(max(0, times - self.often(key)) for key, times in self.total.items())

    @cached_property
    def missing(self) -> list[SampleKey]:
        if not self.known.certain:
            return []
        return [key for key, times in self.known.due.items() if self.total[key] < times]

    @cached_property
    def within_ranks(self) -> list[SampleKey]:
        """Samples that came too often to one rank."""
        return [key for key, most in self._most_to_one.items() if most > self.often(key)]

    @cached_property
    def across_ranks(self) -> list[SampleKey]:
        """Samples that came to several ranks, and too often."""
        ranks = Counter(key for each in self.by_rank for key in each)
        return [key for key, times in ranks.items() if times > 1 and self.total[key] > self.often(key)]

    @cached_property
    def across_workers(self) -> list[SampleKey] | None:
        """Samples that came too often to one rank, from several workers; None where workers are not known."""
        made: dict[tuple[int, SampleKey], set[int]] = {}
        for rank, epoch in enumerate(self.epochs):
            for step in epoch.steps:
                if step.worker is None:
                    return None
                for key in step.keys:
                    made.setdefault((rank, key), set()).add(step.worker)
        several = {key for (_, key), workers in made.items() if len(workers) > 1}
        return [key for key in self.within_ranks if key in several]

    @cached_property
    def within_workers(self) -> list[SampleKey]:
        """Samples that came too often from one worker, or to a rank without; none if workers are not known."""
        made: dict[tuple[int, int | None], Counter[SampleKey]] = {}
        for rank, epoch in enumerate(self.epochs):
            for step in epoch.steps:
                if step.worker is not None or not self.probe.job.workers:
                    made.setdefault((rank, step.worker), Counter()).update(step.keys)
        return [*{key for each in made.values() for key, times in each.items() if times > self.often(key)}]

    @property
    def is_drawn(self) -> bool:
        """Whether one worker repeats more than fills a batch, while other samples do not come."""
        return bool(self.missing) and len(self.within_workers) > self.often_by_chance

    @cached_property
    def _most_to_one(self) -> dict[SampleKey, int]:
        most: dict[SampleKey, int] = {}
        for each in self.by_rank:
            for key, times in each.items():
                most[key] = max(times, most.get(key, 0))
        return most

    @property
    def padding(self) -> int:
        """So many repeats at most make ranks equal."""
        largest = max((len(step.keys) for epoch in self.epochs for step in epoch.steps), default=0)
        return len(self.epochs) * largest * max(1, self.probe.job.workers)

    @property
    def often_by_chance(self) -> float:
        """More samples than this that come twice to one rank are no padding."""
        return max(2, 0.05 * len(self.total))

    def often(self, key: SampleKey) -> int:
        return self.known.due.get(key, 1)


def delivered(dealt: Dealt, without_workers: Dealt | None) -> Iterator[Finding]:
    """What is wrong with an epoch, or with its beginning.

    Args:
        dealt: the epoch.
        without_workers: the same of the probe that has no workers, if there is one.
    """
    whole = all(epoch.whole for epoch in dealt.epochs)
    if whole:
        yield from _steps(dealt)
    if dealt.known.drawn:
        yield from _drawn(dealt, whole=whole)
        return
    if not whole and len(dealt.within_workers) > dealt.often_by_chance:
        return  # ids are not one for each sample, or drawn: how often they should come is not known
    by_workers = _by_workers(dealt, without_workers)
    if by_workers:
        yield by_workers
    if not whole and len(dealt.across_ranks) <= 0.1 * len(dealt.total):
        return  # nothing else is known of a beginning
    if twice := _cut_twice(dealt, without_workers):
        yield twice
        return
    shared = dealt.across_ranks
    share = len(shared) / max(1, len(dealt.total))
    sizes = {sum(each.values()) for each in dealt.by_rank}
    even = max(sizes) - min(sizes) <= max(sizes) // 20
    small = dealt.repeats <= dealt.padding and share < 0.5
    if shared and (not (small and even and not dealt.missing) if dealt.known.certain else share > 0.5):
        alike = "every rank reads all of it" if share > 0.99 else f"{len(shared)} of {len(dealt.total)}"
        yield Finding(
            "not-sharded-by-rank",
            "error",
            "several ranks are given the same samples",
            (f"{dealt.where}: {alike}; {_example(dealt, shared[0])}", *_lacking(dealt)),
        )
        return
    if dealt.repeats and not by_workers and dealt.known.certain:
        if small and even and not dealt.missing:
            yield Finding(
                "padded-with-repeats",
                "warning",
                "a few samples come twice, so that all ranks have as many",
                (
                    f"{dealt.where}: {dealt.repeats} of {sum(dealt.total.values())} deliveries; "
                    + _example(dealt, next(key for key in dealt.total if dealt.total[key] > dealt.often(key))),
                ),
            )
        elif not dealt.missing:
            yield Finding(
                "padded-with-repeats",
                "error",
                "samples come several times in an epoch",
                (f"{dealt.where}: {dealt.repeats} of {sum(dealt.total.values())} deliveries",),
            )
    if dealt.missing and all(dealt.by_rank):  # what a rank without batches lacks is said of it
        yield _missing(dealt)


def _drawn(dealt: Dealt, *, whole: bool) -> Iterator[Finding]:
    """Of samples that are drawn with replacement: ranks have some in common by chance, but not one order."""
    orders = [epoch.keys for epoch in dealt.epochs]
    least = min(map(len, orders))
    if len(orders) > 1 and least >= _ENOUGH and all(order[:least] == orders[0][:least] for order in orders):
        where = f"{dealt.where}: all begin with {listed([str(key) for key in orders[0]], 8)}"
        yield Finding("not-sharded-by-rank", "error", "all ranks draw the same samples", (where,))
        return
    if not whole:
        return
    if dealt.repeats and not _replaces(dealt):
        evidence = (f"{dealt.where}: {dealt.repeats} of {sum(dealt.total.values())} deliveries",)
        yield Finding("padded-with-repeats", "error", "samples come several times in an epoch", evidence)
    if dealt.missing:
        yield _missing(dealt)


def _replaces(dealt: Dealt) -> bool:
    return any(rank.built is not None and rank.built.replaces for rank in dealt.probe.ranks)


def _by_workers(dealt: Dealt, without: Dealt | None) -> Finding | None:
    if not dealt.probe.job.workers or not dealt.within_ranks:
        return None
    if without is not None and len(without.within_ranks) > without.often_by_chance:
        return None  # they repeat without workers, too
    found = dealt.across_workers
    if found is None:  # it is not known who made what
        found = dealt.within_ranks if without is not None and not without.within_ranks else []
        if without is None and len(dealt.within_ranks) > 0.9 * len(dealt.total):
            found = dealt.within_ranks
    if not found or (len(found) <= dealt.padding and len(found) < 0.1 * len(dealt.total)):
        return None
    return Finding(
        "duplicated-by-workers",
        "error",
        "workers of one rank deliver the same samples",
        (f"{dealt.where}: {len(found)} of {len(dealt.total)} samples; {_example(dealt, found[0])}",),
    )


def _cut_twice(dealt: Dealt, without: Dealt | None) -> Finding | None:
    """Whether about one sample in so many comes as there are ranks or workers, to all ranks alike."""
    few = 0.1 * sum(dealt.total.values())
    if not dealt.missing or dealt.repeats > few or not all(dealt.by_rank):
        return None
    if dealt.known.alone < 1 - _ABOUT:
        return None  # nobody is given all of it
    came = 1 - len(dealt.missing) / max(1, len(dealt.known.due))
    ranks, workers = dealt.probe.job.ranks, dealt.probe.job.workers
    for parts, who, fits in (
        (ranks, "ranks", without is None or bool(without.missing)),
        (workers, "workers", without is None or not without.missing),
        (ranks * workers, "ranks and workers", True),
    ):
        if parts > 1 and fits and abs(came * parts - 1) < _ABOUT:
            what = f"only one sample in {parts} comes: the data are cut twice by {who}"
            return Finding("sharded-twice", "error", what, _lacking(dealt))
    return None


def _missing(dealt: Dealt) -> Finding:
    built = [rank.built for rank in dealt.probe.ranks if rank.built is not None]
    lacking = _lacking(dealt)
    came = 1 - len(dealt.missing) / max(1, len(dealt.known.due))
    if _replaces(dealt):
        return Finding(
            "missing-samples", "note", "samples are drawn with replacement, so that not all come", lacking
        )
    if any(each.drops for each in built) and len(dealt.missing) <= dealt.padding:
        return Finding("missing-samples", "note", "the rest of an epoch is left out, as drop_last says", lacking)
    if dealt.known.drawn:
        what = "samples are drawn with replacement: some come several times, and some not"
        return Finding("missing-samples", "error", what, lacking)
    small = len(dealt.missing) <= dealt.padding and came > 0.5
    return Finding(
        "missing-samples",
        "warning" if small and not dealt.repeats else "error",
        "some samples do not come",
        lacking,
    )


def _lacking(dealt: Dealt) -> tuple[str, ...]:
    if not dealt.missing:
        return ()
    repeated = f", and {dealt.repeats} deliveries repeat others" if dealt.repeats else ""
    return (
        f"{dealt.where}: {len(dealt.missing)} of {len(dealt.known.due)} samples do not come{repeated}: "
        + listed([str(key) for key in dealt.missing]),
    )


def _steps(dealt: Dealt) -> Iterator[Finding]:
    steps = [len(epoch.steps) for epoch in dealt.epochs]
    if len({*steps}) > 1 and min(steps):
        least = min(steps)
        first = [str(rank) for rank, each in enumerate(steps) if each == least]
        yield Finding(
            "uneven-steps",
            "error",
            "ranks take different numbers of steps: a collective would hang",
            (
                f"{dealt.where}: {', '.join(f'rank {rank} takes {each}' for rank, each in enumerate(steps[:16]))}",
                f"{dealt.where}: a collective in step {least} (from 0) waits for ever for rank {listed(first)}",
            ),
        )


def _example(dealt: Dealt, key: SampleKey) -> str:
    """Where a sample came, the first so many times."""
    places = [
        f"rank {rank}{'' if step.worker is None else f' worker {step.worker}'} step {number}"
        for rank, epoch in enumerate(dealt.epochs)
        for number, step in enumerate(epoch.steps)
        for each in step.keys
        if each == key
    ]
    return f"sample {key} at {listed(places)}"
