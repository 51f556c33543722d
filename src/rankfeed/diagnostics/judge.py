"""Derives findings from what the ranks received: the rules of audit, doctor, pytest fixture and verify.

With ``R`` ranks, ``W`` workers each and ``b`` samples a batch, padding of less than ``R b`` samples and a dropped
remainder of up to ``R max(W, 1) b`` are what batches explain. Everything beyond that has another cause, which the
places of repeated samples and the share of missing ones name. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rankfeed.diagnostics.deliveries import WHOLE_RANK, EpochReport, LoaderTraits
from rankfeed.diagnostics.findings import Finding, Severity, finding, rows_not_proven
from rankfeed.errors import listed

#: What identifies samples; "none": rows cannot be distinguished or hashed.
KeyKind = Literal["ids", "content", "none"]
#: Where the expected samples are known from: the plan of a schedule (neither padding nor a remainder explains a
#: difference), the universe, a control run on one rank, the length of the dataset, or the samples that any of
#: several epochs delivered.
Expectation = Literal["plan", "declared", "control", "dataset", "epochs"]
_Place = tuple[int, int, int]  # rank, worker, epoch
#: Equal sequences of fewer samples, or of fewer different ones, may be chance.
ENOUGH, _DIFFERENT = 8, 0.9
#: Two shares this close are equal.
_ABOUT = 0.15
#: An epoch that was cut is judged by its repeats if they are a larger share.
_REPEATS = 0.4


@dataclass(frozen=True)
class JudgedFacts:
    """What is known of a loader besides the figures of its epochs."""

    keys: KeyKind  # what identifies samples
    expectation: Expectation | None = None  # where the expected samples are known from; None: they are not known
    expected: int | None = None  # their number, if it is the same in each epoch
    cut: bool = False  # whether an epoch was ended before its end
    traits: LoaderTraits = field(default_factory=LoaderTraits)  # what the loader declares
    exact: bool = True  # whether equal keys mean equal samples: not if only some fields are compared
    allowed: tuple[str, ...] = ()  # what is intended: "replacement"
    where: str = ""  # the run, for messages
    recorded: bool = True  # whether all deliveries were; otherwise missing samples may have been delivered

    @property
    def identified_by(self) -> str:
        return {"ids": "their ids", "content": "their content", "none": "nothing"}[self.keys]

    def place(self, epoch: EpochReport) -> str:
        """An epoch, for messages."""
        return f"{self.where}, epoch {epoch.epoch}" if self.where else f"epoch {epoch.epoch}"


def judge(epochs: Sequence[EpochReport], facts: JudgedFacts) -> Iterator[Finding]:
    """Everything that is wrong, could not be shown, or is worth knowing."""
    yield from judge_steps(epochs, facts)
    yield from judge_samples(epochs, facts)


def judge_steps(epochs: Sequence[EpochReport], facts: JudgedFacts) -> Iterator[Finding]:
    """What needs no expected samples: numbers of steps, orders, and random numbers."""
    yield from _endings(epochs, facts)
    for epoch in epochs:
        for rank in epoch.ranks:
            for function, samples in rank.unproven.items():
                yield rows_not_proven(function, f"{facts.place(epoch)}, rank {rank.rank}: {samples:,} samples")
    if facts.keys != "none":
        yield from _same_order(epochs, facts)
    if facts.cut and facts.expectation != "control":
        what = "epochs were ended before their end (max_steps): the rest is not known"
        yield finding("epoch-not-finished", "unproven", what)
    yield from _same_randomness(epochs, facts)


def _endings(epochs: Sequence[EpochReport], facts: JudgedFacts) -> Iterator[Finding]:
    """Epochs without a batch, and ranks with different numbers of steps."""
    for epoch in epochs:
        least, most, place = min(epoch.steps), max(epoch.steps), facts.place(epoch)
        if not most and facts.expectation == "plan":
            continue  # samples that the plan has left are missing
        if not most:
            again = ", although the first had some: it can be read only once" if epoch is not epochs[0] else ""
            severity: Severity = "error" if again or facts.where else "unproven"
            yield finding("yields-nothing", severity, "the loader yields no batches", f"{place}: no batch{again}")
            return
        if least == most:
            continue
        first = listed([str(rank.rank) for rank in epoch.ranks if rank.steps == least])
        if not least:
            text = f"{place}: no batch for rank {first}"
            yield finding("yields-nothing", "error", "some ranks have no batches", text)
        counts = ", ".join(f"rank {rank.rank} takes {rank.steps:,}" for rank in epoch.ranks[:16])
        waits = f"a collective in step {least:,} (from 0) waits forever for rank {first}"
        what = "ranks take different numbers of steps: a collective would hang"
        yield finding("uneven-steps", "error", what, f"{place}: {counts}; {waits}")


def judge_samples(epochs: Sequence[EpochReport], facts: JudgedFacts) -> Iterator[Finding]:
    """Samples that were delivered too often, too rarely, or unexpectedly."""
    if facts.keys == "none":
        yield finding("not-counted", "unproven", "samples cannot be distinguished, so they are not counted")
        return
    lacks = len({epoch.missing_digest for epoch in epochs})
    #: Whether all epochs lack the same samples, or each of them others.
    same, other = lacks == 1 < len(epochs), lacks == len(epochs) > 1
    for epoch in epochs:
        findings = [*_excess(epoch, facts)]
        if all(finding.severity != "error" for finding in findings):
            findings += _lack(epoch, facts, same=same, other=other)
        pads = not epoch.repeated or _is_padding(epoch, facts)
        # Samples that only repeat, or only lack, show even in fields that samples have in common.
        is_one_sided = pads != ((epoch.missing or 0) <= _limit(epoch, facts))
        if facts.expectation == "control" and not facts.exact and not is_one_sided:
            text = f"{facts.place(epoch)}: stable fields are as in the control, but samples have them in common"
            findings = [finding("not-counted", "unproven", "samples cannot be distinguished", text)]
        if facts.keys == "ids" or facts.expected != epoch.samples:
            findings += _same_sequences(epoch, facts)
        yield from findings
        yield from _unknown(epoch, facts, explained=bool(findings))
    if facts.keys == "content" and facts.expectation != "control":
        yield _content(epochs)
    if facts.expectation in (None, "epochs"):
        what = "which samples are expected is not known, so missing ones are not seen"
        yield finding("expected-unknown", "unproven", what)


def _limit(epoch: EpochReport, facts: JudgedFacts) -> int:
    """The largest remainder that batches explain."""
    return len(epoch.ranks) * max(facts.traits.workers, 1) * epoch.batch_size


def _is_padding(epoch: EpochReport, facts: JudgedFacts) -> bool:
    """Whether repeats at the end give ranks equally many samples, or whole batches give them equal steps.

    Fewer repeats than ranks may be anywhere: a rank may shuffle its padded share.
    """
    at_end = sum(rank.repeated_at_end for rank in epoch.ranks) == epoch.repeated or (
        epoch.repeated < len(epoch.ranks) and not epoch.missing and epoch.samples % len(epoch.ranks) == 0
    )
    is_even = at_end and len({rank.samples for rank in epoch.ranks}) == 1
    return (
        facts.expectation != "plan"
        and (is_even or epoch.repeated == epoch.batches_again)
        and epoch.repeated < len(epoch.ranks) * epoch.batch_size
        and 2 * epoch.repeated < epoch.unique
        and (not epoch.missing or facts.traits.drops or epoch.missing > _limit(epoch, facts))
    )


def _excess(epoch: EpochReport, facts: JudgedFacts) -> Iterator[Finding]:
    """Samples that were delivered more often than expected: the places name the cause."""
    excess, workers = epoch.repeated, facts.traits.workers
    between_ranks, between_workers = epoch.between_ranks, epoch.between_workers
    if not excess or (facts.cut and excess <= _REPEATS * epoch.samples):
        return

    def repeats(code: str, severity: Severity, what: str, count: int = excess) -> Finding:
        example = f"; {epoch.repeats[0]}" if epoch.repeats else ""
        text = f"{facts.place(epoch)}: {count:,} of {epoch.samples:,} deliveries{example}"
        return finding(code, severity, what, text, *_missing_text(epoch, facts))

    if facts.keys == "content" and facts.expectation != "control":
        every = epoch.unique if epoch.unique >= ENOUGH and facts.expected != epoch.samples else 0
        if excess == between_ranks == every * (len(epoch.ranks) - 1):
            yield repeats("not-sharded-by-rank", "error", "every rank reads all samples")
        elif excess == between_workers == every * (workers - 1):
            yield repeats("duplicated-by-workers", "error", "every worker reads all samples")
        else:
            what = "deliveries have equal content: equal samples and repeated ones cannot be distinguished"
            yield repeats("not-counted", "unproven", what)
        return
    if facts.traits.replaces and (epoch.missing != 0 or epoch.unknown):  # no multiple of all samples
        severity: Severity = "note" if "replacement" in facts.allowed else "unproven"
        if not [*_same_sequences(epoch, facts)]:
            yield repeats("drawn-with-replacement", severity, "samples are drawn with replacement")
        return
    if _is_padding(epoch, facts):
        yield repeats("padded-with-repeats", "note", "some samples repeat as padding")
        return
    if between_ranks:
        is_all = between_ranks == epoch.unique * (len(epoch.ranks) - 1)
        what = "every rank reads all samples" if is_all else "ranks receive the same samples"
        yield repeats("not-sharded-by-rank", "error", what, between_ranks)
    rest = excess - between_ranks - between_workers
    if workers > 1 and rest and not any(worker != WHOLE_RANK for rank in epoch.ranks for worker in rank.orders):
        between_workers, rest = between_workers + rest, 0  # which worker built a batch is not known
    if between_workers:
        what = "workers of a rank deliver the same samples"
        yield repeats("duplicated-by-workers", "error", what, between_workers)
    if rest:
        yield repeats("repeated-samples", "error", "a rank receives samples more than once", rest)


def _missing_text(epoch: EpochReport, facts: JudgedFacts) -> tuple[str, ...]:
    if not epoch.missing or facts.cut:
        return ()
    names = f": {listed(epoch.missing_keys)}" if epoch.missing_keys else ""
    return (f"{facts.place(epoch)}: {epoch.missing:,} of {epoch.expected:,} samples are not delivered{names}",)


def _lack(epoch: EpochReport, facts: JudgedFacts, *, same: bool, other: bool) -> Iterator[Finding]:
    """Samples that were not delivered; ``same``, ``other``: all epochs lack the same, or each of them others."""
    traits, lack = facts.traits, epoch.missing or 0
    if not lack or facts.cut or (traits.replaces and epoch.repeated):
        return
    text, limit = _missing_text(epoch, facts), _limit(epoch, facts)
    global_batch = len(epoch.ranks) * epoch.batch_size
    if facts.expectation == "plan":
        severity: Severity = "error" if facts.recorded else "unproven"
        yield finding("missing-samples", severity, "samples of the plan are not delivered", *text)
        return
    if facts.expectation in (None, "epochs"):  # half of what all epochs delivered is no share of the data
        what = "an epoch lacks samples that another one delivered"
        yield finding("missing-samples", "unproven", what, *text)
        return
    is_remainder = lack <= limit and lack < epoch.unique
    ranks, workers = len(epoch.ranks), traits.workers
    for what, parts in (("ranks", ranks), ("workers", workers), ("ranks and workers", ranks * workers)):
        arrived = 1 - lack / epoch.expected
        if parts > 1 and not is_remainder and not epoch.repeated and abs(arrived * parts - 1) < _ABOUT:
            by = "ranks or workers" if ranks == workers == parts else what
            text_of = f"only one sample in {parts} is delivered: the data are sharded twice, by {by}"
            yield finding("sharded-twice", "error", text_of, *text)
            return
    if is_remainder and (traits.drops or other):
        yield finding("missing-samples", "note", "the remainder of an epoch is dropped", *text)
    elif facts.expectation == "control" and is_remainder and not (same and lack > global_batch):
        yield finding("missing-samples", "note", "some samples are not delivered", *text)
    else:
        what = "the same samples are missing in every epoch" if same else "samples are not delivered"
        yield finding("missing-samples", "error", what, *text)


def _unknown(epoch: EpochReport, facts: JudgedFacts, *, explained: bool) -> Iterator[Finding]:
    """Samples that were not expected."""
    over = epoch.samples - (facts.expected or 0) - len(epoch.ranks) * epoch.batch_size
    is_counted = facts.keys == "content" and facts.expectation == "declared" and not facts.traits.replaces
    if is_counted and over >= 0:
        text = f"{facts.place(epoch)}: {epoch.samples:,} samples, expected {facts.expected:,}"
        yield finding("repeated-samples", "error", "more samples are delivered than there are", text)
    if not epoch.unknown:
        return
    text = f"{facts.place(epoch)}: {epoch.unknown:,} samples: {listed(epoch.unknown_keys)}"
    if facts.expectation == "declared":
        yield finding("unknown-samples", "error", "samples are not among those declared", text)
    elif facts.expectation == "control" and epoch.unknown >= epoch.batch_size and not explained and not facts.cut:
        what = "the ranks receive samples that one process does not, so others may be missing"
        yield finding("not-counted", "unproven", what, text)


def _same_sequences(epoch: EpochReport, facts: JudgedFacts) -> Iterator[Finding]:
    """Ranks, or workers of a rank, that read the same samples in the same order."""
    what = "the same samples are read in the same order"
    # Whether equal keys mean that a sample was delivered again.
    is_certain = facts.keys == "ids" or (facts.expectation == "control" and facts.exact)

    def is_telling(length: int) -> bool:
        if facts.keys == "ids" and not facts.traits.replaces:
            return True
        return length >= ENOUGH and epoch.unique >= (ENOUGH if is_certain else _DIFFERENT * length)

    # Of one sample each, padding repeats one on another rank.
    ranks = _alike({rank.rank: rank.order for rank in epoch.ranks if rank.samples > 1 and rank.order})
    if ranks and is_telling(epoch.ranks[0].samples):
        yield finding("not-sharded-by-rank", "error", what, f"{facts.place(epoch)}: ranks {listed(ranks)}")
    for rank in epoch.ranks:
        workers = _alike({worker: order for worker, order in rank.orders.items() if worker != WHOLE_RANK})
        if workers and is_telling(rank.samples // len(workers)):
            text = f"{facts.place(epoch)}: workers {listed(workers)} of rank {rank.rank}"
            yield finding("duplicated-by-workers", "error", what, text)
            break


def _content(epochs: Sequence[EpochReport]) -> Finding:
    """Content identifies samples if it is the same in each epoch though their order is another one."""
    stable = len({epoch.digest for epoch in epochs}) == 1
    if stable and len({tuple(rank.order for rank in epoch.ranks) for epoch in epochs}) > 1:
        return finding("no-ids", "note", "batches have no ids: samples are identified by their content")
    what = "batches have no ids, and content identifies samples only if it does not change"
    why = "the epochs have the same order" if stable else "the epochs have other content"
    why = why if len(epochs) > 1 else "of one epoch it is not known"
    return finding("not-counted", "unproven", what, why)


def _same_order(epochs: Sequence[EpochReport], facts: JudgedFacts) -> Iterator[Finding]:
    """Epochs in the same order, although the loader shuffles."""
    for severity, in_order in (("warning", False), ("note", None)):
        orders = {
            epoch.epoch: ",".join(rank.order for rank in epoch.ranks)
            for epoch in epochs
            if any(rank.samples > 1 and rank.in_order is in_order for rank in epoch.ranks)
        }
        if again := _alike(orders):
            what = "epochs have the same order" + " (harmless if the loader does not shuffle)" * (in_order is None)
            text = f"{facts.where}: epochs {listed(again)}" if facts.where else f"epochs {listed(again)}"
            yield finding("same-order-every-epoch", severity, what, text)  # type: ignore[arg-type]


def _same_randomness(epochs: Sequence[EpochReport], facts: JudgedFacts) -> Iterator[Finding]:
    """Workers that draw the same random numbers.

    An error for workers of a rank, if the draws belong to samples: a stream may use them to shuffle only. Ranks
    and epochs may draw the same because a training script seeds them so.
    """
    drawn: dict[str, dict[_Place, str]] = {}
    for epoch in epochs:
        for rank in epoch.ranks:
            for worker, name, digest in rank.streams:
                drawn.setdefault(name, {})[rank.rank, worker, epoch.epoch] = digest
    for generator, places in sorted(drawn.items()):
        first_of: dict[tuple[object, ...], _Place] = {}
        pairs: dict[str, tuple[_Place, _Place]] = {}
        for place, digest in places.items():
            number, worker, turn = place
            groups = {"workers": (number, turn), "epochs": (number, worker), "ranks": (turn,)}
            for parties, group in groups.items():
                first = first_of.setdefault((digest, parties, *group), place)
                if first != place and (parties != "ranks" or first[0] != number):
                    pairs.setdefault(parties, (first, place))
        for parties, both in pairs.items():
            severity: Severity = "error" if parties == "workers" and facts.traits.indexed else "warning"
            names = " and ".join("rank {} worker {} epoch {}".format(*place) for place in both)
            text = f"{parties} draw the same numbers from {generator}: {names}"
            what = "the same random numbers are drawn for different samples"
            where = f"{facts.where}: " if facts.where else ""
            yield finding("same-randomness-in-workers", severity, what, where + text)


def _alike(digests: Mapping[Any, str]) -> list[str]:
    """The first group of two or more that have one digest."""
    again = next((digest for digest, times in Counter(digests.values()).items() if times > 1), None)
    return [str(name) for name, digest in digests.items() if digest == again]
