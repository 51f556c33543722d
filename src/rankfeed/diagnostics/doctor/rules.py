"""The rules: from what a control run delivers and what the ranks of a run deliver to one verdict.

With ``R`` ranks, ``W`` workers each and ``b`` rows a batch, padding up to ``R b`` rows and dropping up to
``R max(W, 1) b`` rows are what batches explain. Everything beyond that has another cause, which ratios name.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Literal

from rankfeed.diagnostics.doctor.records import RowKey
from rankfeed.diagnostics.findings import Finding, Severity, finding
from rankfeed.errors import listed

#: Equal sequences of fewer rows than this may be chance.
ENOUGH = 8
#: Two shares this close are equal.
_ABOUT = 0.15
#: Shares of shingles: packing explains less than the first, and more than the second above that is a disease.
_EXPLAINED, _DISEASED = 0.2, 0.2
#: A window with a larger share of repeats is diseased.
_REPEATS = 0.4
#: A control that repeats more than this share of its rows or shingles says nothing about repeats.
REPETITIVE = 0.1


@dataclass(frozen=True)
class Facts:
    """What is known of a run besides its counts."""

    #: The run and epoch, for messages.
    where: str
    #: R, W, and b, the largest number of rows in a batch.
    ranks: int
    workers: int
    batch: int
    #: Whether dropping is declared; drawing with replacement is declared, or seen in the control; and allowed.
    drops: bool = False
    replaces: bool = False
    allows_replacement: bool = False
    #: Whether the order differs between epochs, or shuffling is declared.
    shuffles: bool = False
    #: Whether each of several epochs lacks the same keys; None with one epoch.
    same_lack: bool | None = None
    #: Rows of batches that arrive again as a whole, which samplers of batches do to give ranks equal steps.
    padding: Counter[RowKey] = field(default_factory=Counter)
    #: Whether equal keys mean equal samples (ids, indices, identifying or whole content).
    exact: bool = True
    #: What a key is, in messages.
    noun: str = "sample"


@dataclass(frozen=True)
class Counts:
    """Deliveries of an epoch against the control."""

    #: How often each key must be delivered, and the keys that each rank received, in order.
    control: Counter[RowKey]
    orders: Sequence[Sequence[RowKey]]

    @cached_property
    def by_rank(self) -> list[Counter[RowKey]]:
        return [Counter(order) for order in self.orders]

    @cached_property
    def total(self) -> Counter[RowKey]:
        return sum(self.by_rank, Counter())

    @cached_property
    def excess(self) -> Counter[RowKey]:
        return self.total - self.control

    @cached_property
    def lack(self) -> Counter[RowKey]:
        return self.control - self.total

    @cached_property
    def arrived(self) -> float:
        """Share of the control that was delivered at least once."""
        return (self.total & self.control).total() / max(1, self.control.total())

    @cached_property
    def over_ranks(self) -> float:
        """How many ranks receive a sample, on average."""
        seen = sum((each & self.control).total() for each in self.by_rank)
        return seen / max(1, (self.total & self.control).total())

    @cached_property
    def within_ranks(self) -> float:
        """How often a rank receives a sample, on average."""
        seen = sum((each & self.control).total() for each in self.by_rank)
        return self.total.total() / max(1, seen)

    @property
    def is_multiple(self) -> bool:
        """Whether every sample arrives the same number of times more often than in the control."""
        times = round(self.total.total() / max(1, self.control.total()))
        return all(self.total[key] == times * count for key, count in self.control.items())

    @property
    def same_draws(self) -> bool:
        """Whether two ranks receive the same sequence."""
        return any(same_sequence(one, other) for one, other in combinations(self.orders, 2))

    @property
    def is_even(self) -> bool:
        """Whether ranks receive the same number of rows, as samplers pad them."""
        return len({len(order) for order in self.orders}) == 1

    @property
    def is_alike(self) -> bool:
        """Whether two ranks receive the same rows, or every sample arrives several times."""
        alike = any(one == other for one, other in combinations(self.by_rank, 2))
        return max(map(len, self.orders)) > 1 and (alike or self.is_multiple)


def judge(counts: Counts, facts: Facts) -> list[Finding]:
    """Findings of an epoch (rules 4 to 11); none if it delivers exactly what the control does."""
    excess, lack, size = counts.excess.total(), counts.lack.total(), counts.control.total()
    if not excess and not lack:
        return [] if facts.exact else [_indistinct(facts)]
    is_padding = (counts.is_even or counts.excess == facts.padding) and not counts.is_alike
    pads = not excess or (is_padding and excess < facts.ranks * facts.batch)
    # A stream that delivers a batch drops less than half of its rows.
    rests = lack <= facts.ranks * max(facts.workers, 1) * facts.batch and 2 * lack < size
    if facts.replaces and excess and not counts.is_multiple:
        return [_drawn(counts, facts)]
    if not facts.exact and pads == rests:
        return [_indistinct(facts)]
    if pads and rests and (not excess or not lack or facts.drops):
        return [*_small(counts, facts)]
    if rests or (not pads and counts.over_ranks > 1.02):
        return _repeats(counts, facts)
    return [_missing(counts, facts)]


def _indistinct(facts: Facts) -> Finding:
    text = f"{facts.where}: stable fields have the same values as in the control, but samples share values"
    return finding("not-counted", "unproven", "samples cannot be distinguished", text)


def _drawn(counts: Counts, facts: Facts) -> Finding:
    if counts.same_draws:
        text = f"{facts.where}: several ranks draw {listed([str(key) for key in counts.orders[0]], 8)}"
        return finding("not-sharded-by-rank", "error", "ranks draw the same samples", text)
    excess, lack, size = counts.excess.total(), counts.lack.total(), counts.control.total()
    text = f"{facts.where}: {excess} rows repeat and {lack} of {size} do not arrive"
    severity: Severity = "note" if facts.allows_replacement else "unproven"
    return finding("drawn-with-replacement", severity, "samples are drawn with replacement", text)


def _small(counts: Counts, facts: Facts) -> Iterator[Finding]:
    """Rules 5 and 6: padding, and the remainder of an epoch."""
    if counts.excess:
        text = f"{facts.where}: {counts.excess.total()} of {counts.total.total()} rows repeat as padding"
        example = _example(counts, next(iter(counts.excess)), facts)
        yield finding("padded-with-repeats", "note", "some rows repeat as padding", f"{text}; {example}")
    if counts.lack:
        severity: Severity = "note"
        if facts.drops or facts.same_lack is False:
            what = "the remainder of an epoch is dropped"
        elif facts.shuffles and facts.same_lack:
            severity, what = "error", "the same samples are missing in every epoch"
        else:
            what = "some samples are not delivered"
        yield finding("missing-samples", severity, what, *_lacking(counts, facts))


def _repeats(counts: Counts, facts: Facts) -> list[Finding]:
    """Rules 7 and 10: the ratios name the cause."""
    extra, found = _lacking(counts, facts), []
    key = max(counts.excess, key=lambda each: counts.excess[each])
    example = _example(counts, key, facts)
    if counts.over_ranks > min(1.02, counts.within_ranks) and facts.ranks > 1:
        every = counts.over_ranks > facts.ranks - 0.02
        shared = sum(sum(key in each for each in counts.by_rank) > 1 for key in counts.excess)
        some = f"{shared} of {len(counts.control)} samples go to several ranks"
        how = "every rank reads everything" if every else some
        text = f"{facts.where}: {how}; {example}"
        found.append(finding("not-sharded-by-rank", "error", "ranks receive the same samples", text, *extra))
    if counts.within_ranks > 1.02 or not found:
        text = f"{facts.where}: a rank receives a sample {counts.within_ranks:.2f} times; {example}"
        code = "duplicated-by-workers" if facts.workers > 1 else "padded-with-repeats"
        what = (
            "workers of a rank deliver the same samples" if facts.workers > 1 else "samples arrive several times"
        )
        found.append(finding(code, "error", what, text, *extra))
    return found


def _missing(counts: Counts, facts: Facts) -> Finding:
    """Rules 8 and 10: a share of one in R, W or R W is a second cut."""
    parts_of = {"ranks": facts.ranks, "workers": facts.workers, "ranks and workers": facts.ranks * facts.workers}
    for what, parts in parts_of.items():
        if parts > 1 and not counts.excess and abs(counts.arrived * parts - 1) < _ABOUT:
            by = "ranks or workers" if facts.ranks == facts.workers == parts else what
            text = f"only one sample in {parts} arrives: the data are sharded twice, by {by}"
            return finding("sharded-twice", "error", text, *_lacking(counts, facts))
    return finding("missing-samples", "error", "some samples are not delivered", *_lacking(counts, facts))


def _lacking(counts: Counts, facts: Facts) -> tuple[str, ...]:
    if not counts.lack:
        return ()
    lack, size, missing = counts.lack.total(), counts.control.total(), listed([str(key) for key in counts.lack])
    missing = missing if facts.noun == "sample" else f"{facts.noun} {missing}"
    return (f"{facts.where}: {lack} of {size} samples are not delivered: {missing}",)


def _example(counts: Counts, key: RowKey, facts: Facts) -> str:
    places = [f"rank {rank} ({count}x)" for rank, each in enumerate(counts.by_rank) if (count := each[key])]
    return f"{facts.noun} {key} on {listed(places)}"


def never_drawn(drawn: set[RowKey], control: set[RowKey], facts: Facts) -> list[Finding]:
    """Samples that the control draws in some epoch and the ranks in none, with replacement (rule 9).

    With the same odds, each of both draws about as many samples that the other one does not.
    """
    never, new = control - drawn, drawn - control
    if len(never) <= 4 * len(new) + facts.ranks * max(facts.workers, 1) * facts.batch:
        return []
    of_control = f"{len(never)} of {len(control)} samples that one process draws"
    text = f"{facts.where}: {of_control} are drawn in no epoch: {listed(sorted(map(str, never)))}"
    return [finding("missing-samples", "error", "some samples are never drawn", text)]


def window(counts: Sequence[Counter[RowKey]], control: Counter[RowKey], facts: Facts) -> list[Finding]:
    """The beginning of an epoch that was cut, of each rank: repeats, if the control has none in as many rows."""
    total: Counter[RowKey] = sum(counts, Counter())
    if repeated(control) >= REPETITIVE or repeated(total) <= _REPEATS or facts.replaces or not facts.exact:
        return []
    return _repeats(Counts(Counter({*total}), [[*each.elements()] for each in counts]), facts)


def repeated(counts: Counter[RowKey]) -> float:
    """The share of deliveries that repeat another one."""
    return 1 - len(counts) / counts.total() if counts else 0.0


@dataclass(frozen=True)
class Tokens:
    """An epoch of token sequences: sampled shingles of each rank, number of tokens, longest sequence (L)."""

    by_rank: Sequence[Counter[RowKey]]
    count: int
    length: int

    @cached_property
    def shingles(self) -> Counter[RowKey]:
        return sum(self.by_rank, Counter())


def judge_tokens(control: Tokens, run: Tokens, facts: Facts) -> Finding:
    """Packed sequences, whose content changes with the configuration: compared by their shingles (rule 12)."""
    excess = (run.shingles - control.shingles).total() / max(1, run.shingles.total())
    lack = (control.shingles - run.shingles).total() / max(1, control.shingles.total())
    explained = max(_EXPLAINED, 0.1 + 12 / max(run.length, 12))  # a cut sequence loses 11 of its shingles
    open_ends = facts.ranks * max(facts.workers, 1) * run.length
    rest = open_ends * (facts.batch if facts.drops else 1)
    text = (
        f"{facts.where}: {run.count} tokens, the control {control.count}; "
        f"{excess:.0%} of the 12-token sequences repeat, {lack:.0%} are missing"
    )
    if control.count < 20 * open_ends:
        what = "too few tokens to compare packed sequences"
        return finding("not-counted", "unproven", what, f"{text}; {20 * open_ends} are needed")
    if repeated(control.shingles) < REPETITIVE and max(excess, lack) > explained + _DISEASED:
        if lack >= excess:
            return finding("missing-samples", "error", "a large part of the tokens is not delivered", text)
        within = sum((each - control.shingles).total() for each in run.by_rank) / run.shingles.total()
        code = "duplicated-by-workers" if within > explained and facts.workers > 1 else "not-sharded-by-rank"
        return finding(code, "error", "packed sequences contain the same tokens several times", text)
    if max(excess, lack) < explained and abs(run.count - control.count) <= rest:
        what = "tokens are complete up to the last incomplete sequence of each worker"
        return finding("packed-sequences", "note", what, text)
    return finding("not-counted", "unproven", "packed sequences could not be compared with the control", text)


def same_sequence(one: Sequence[RowKey], other: Sequence[RowKey]) -> bool:
    """Whether two sequences agree as far as both reach, with enough different rows to exclude chance."""
    least = min(len(one), len(other))
    return least >= ENOUGH and len({*one[:least]}) >= ENOUGH and [*one[:least]] == [*other[:least]]


def length_of(
    length: int, steps: int, total: int, ranks: int, workers: int
) -> Literal["rank", "all ranks"] | None:
    """Whose steps ``len(loader)`` of a stream counts, up to an incomplete batch of each worker (rule 15)."""
    spare = max(workers, 1)
    if abs(length - steps) <= spare:
        return "rank"
    return "all ranks" if abs(length - total) <= ranks * spare else None
