"""The rules of an audit: from the figures of epochs to findings. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rankfeed.diagnostics.audit.epochs import WHOLE_RANK, EpochReport, LoaderTraits
from rankfeed.diagnostics.findings import Finding, Severity, finding, rows_not_proven
from rankfeed.errors import listed

#: What samples are identified by; "none": rows cannot be told apart or hashed.
KeyKind = Literal["ids", "content", "none"]
#: Where the expected samples are known from: the universe or the plan, the length of the dataset, or the samples
#: that any of several epochs delivered.
Expectation = Literal["declared", "dataset", "epochs"]
#: Equal sequences of fewer samples, or of fewer different ones, may be chance.
_ENOUGH, _DIFFERENT = 8, 0.9


@dataclass(frozen=True)
class AuditFacts:
    """What is known of an audit besides the figures of its epochs."""

    keys: KeyKind  # what samples are identified by
    expectation: Expectation | None = None  # where the expected samples are known from; None: they are not
    expected: int | None = None  # their number
    cut: bool = False  # whether an epoch was ended before its end
    traits: LoaderTraits = field(default_factory=LoaderTraits)

    @property
    def identified_by(self) -> str:
        return {"ids": "their ids", "content": "their content", "none": "nothing"}[self.keys]


def findings_of(epochs: Sequence[EpochReport], facts: AuditFacts) -> Iterator[Finding]:
    """Everything that is wrong, could not be shown, or is worth knowing."""
    empty = [f"epoch {each.epoch}" for each in epochs if not any(each.steps)]
    if len(empty) == len(epochs):
        yield finding("yields-nothing", "unproven", "the loader has no batches")
    elif empty:
        yield finding("yields-nothing", "error", "an epoch has no batches", *empty)
    for epoch in epochs:
        yield from _steps(epoch)
        for rank in epoch.ranks:
            for function, samples in rank.unproven.items():
                yield rows_not_proven(function, f"epoch {epoch.epoch}, rank {rank.rank}: {samples:,} samples")
    if facts.keys == "none":
        yield finding("not-counted", "unproven", "samples cannot be told apart, so they are not counted")
    else:
        for epoch in epochs:
            yield from _excess(epoch, facts)
            yield from _lack(epoch, epochs, facts)
            if facts.keys == "ids" or facts.expected != epoch.samples:
                yield from _same_sequences(epoch, facts)
        yield from _same_order(epochs)
        if facts.keys == "content":
            yield _content(epochs)
        if facts.expectation in (None, "epochs"):
            what = "which samples are expected is not known, so missing ones are not seen"
            yield finding("expected-unknown", "unproven", what)
    if facts.cut:
        what = "epochs were ended before their end (max_steps): the rest is not known"
        yield finding("epoch-not-finished", "unproven", what)
    yield from _same_randomness(epochs)


def _steps(epoch: EpochReport) -> Iterator[Finding]:
    least, most = (pick(epoch.ranks, key=lambda each: each.steps) for pick in (min, max))
    if least.steps < most.steps:
        text = (
            f"epoch {epoch.epoch}: rank {least.rank} has {least.steps:,} steps, rank {most.rank} has "
            f"{most.steps:,}: a collective in step {least.steps:,} (from 0) would wait forever"
        )
        yield finding("uneven-steps", "error", "ranks take different numbers of steps", text)


def _excess(epoch: EpochReport, facts: AuditFacts) -> Iterator[Finding]:
    """Samples that were delivered more than once."""
    excess, between_ranks, between_workers = epoch.repeated, epoch.between_ranks, epoch.between_workers
    if not excess:
        return

    def found(code: str, severity: Severity, what: str, number: int = excess) -> Finding:
        example = f"; {epoch.repeats[0]}" if epoch.repeats else ""
        text = f"epoch {epoch.epoch}: {number:,} of {epoch.samples:,} deliveries{example}"
        return finding(code, severity, what, text)

    if facts.keys == "content":
        every = epoch.unique if epoch.unique >= _ENOUGH and facts.expected != epoch.samples else 0
        if excess == between_ranks == every * (len(epoch.ranks) - 1):
            yield found("not-sharded-by-rank", "error", "every rank reads all samples")
        elif excess == between_workers == every * (facts.traits.workers - 1):
            yield found("duplicated-by-workers", "error", "every worker reads all samples")
        else:
            what = "deliveries have equal content: equal samples and repeated ones cannot be told apart"
            yield found("not-counted", "unproven", what)
    elif facts.traits.replaces:
        what = "samples are drawn with replacement, as the sampler declares"
        yield found("drawn-with-replacement", "unproven", what)
    elif _is_padding(epoch):
        yield found("padded-with-repeats", "note", "the last step repeats some samples as padding")
    else:
        if between_ranks:
            what = "ranks receive the same samples"
            yield found("not-sharded-by-rank", "error", what, between_ranks)
        if between_workers:
            what = "workers of a rank deliver the same samples"
            yield found("duplicated-by-workers", "error", what, between_workers)
        if rest := excess - between_ranks - between_workers:
            yield found("repeated-samples", "error", "a rank receives samples more than once", rest)


def _is_padding(epoch: EpochReport) -> bool:
    """Whether all repeats are in the last step, fewer than a global batch, of ranks with equally many samples."""
    excess, ranks = epoch.repeated, epoch.ranks
    return (
        not epoch.missing
        and sum(each.repeated_at_end for each in ranks) == excess
        and len({each.samples for each in ranks}) == 1
        and excess < len(ranks) * epoch.batch_size
        and 2 * excess < epoch.unique
    )


def _lack(epoch: EpochReport, epochs: Sequence[EpochReport], facts: AuditFacts) -> Iterator[Finding]:
    """Samples that were not delivered, and samples that were not expected."""
    where, replaces = f"epoch {epoch.epoch}: ", facts.traits.replaces
    over = epoch.samples - (facts.expected or 0) - len(epoch.ranks) * epoch.batch_size
    if facts.keys == "content" and facts.expectation == "declared" and over >= 0 and not replaces:
        text = f"{where}{epoch.samples:,} samples, expected {facts.expected:,}"
        yield finding("repeated-samples", "error", "more samples are delivered than there are", text)
    if epoch.unknown:
        text = f"{where}{epoch.unknown:,} samples: {listed(epoch.unknown_keys)}"
        yield finding("unknown-samples", "error", "samples are not among those declared", text)
    if not epoch.missing or facts.cut or (replaces and epoch.repeated):
        return
    text = f"{where}{epoch.missing:,} samples" + (f": {listed(epoch.missing_keys)}" * bool(epoch.missing_keys))
    limit = len(epoch.ranks) * max(facts.traits.workers, 1) * epoch.batch_size
    small = not epoch.repeated and epoch.missing <= limit and epoch.missing < epoch.unique
    changing = len(epochs) > 1 and len({each.missing_digest for each in epochs}) == len(epochs)
    if small and (facts.traits.drops or changing):
        yield finding("missing-samples", "note", "the remainder of an epoch is dropped", text)
    elif facts.expectation == "declared":
        yield finding("missing-samples", "error", "samples are not delivered", text)
    else:
        what = "an epoch lacks samples that another one delivered"
        yield finding("missing-samples", "unproven", what, text)


def _same_sequences(epoch: EpochReport, facts: AuditFacts) -> Iterator[Finding]:
    """Ranks, or workers of a rank, that read the same samples in the same order."""
    what = "the same samples are read in the same order"
    certain = facts.keys == "ids" and not facts.traits.replaces

    def is_telling(length: int) -> bool:
        return certain or (length >= _ENOUGH and epoch.unique >= _DIFFERENT * length)

    ranks = _alike({each.rank: each.order for each in epoch.ranks if each.samples})
    if ranks and is_telling(epoch.ranks[0].samples):
        yield finding("not-sharded-by-rank", "error", what, f"epoch {epoch.epoch}: ranks {listed(ranks)}")
    for each in epoch.ranks:
        workers = _alike({worker: order for worker, order in each.orders.items() if worker != WHOLE_RANK})
        if workers and is_telling(each.samples // len(workers)):
            text = f"epoch {epoch.epoch}: workers {listed(workers)} of rank {each.rank}"
            yield finding("duplicated-by-workers", "error", what, text)
            break


def _content(epochs: Sequence[EpochReport]) -> Finding:
    """Content identifies samples if it is the same in each epoch though their order is another one."""
    stable = len({each.digest for each in epochs}) == 1
    if stable and len({tuple(rank.order for rank in each.ranks) for each in epochs}) > 1:
        return finding("no-ids", "note", "batches have no ids: samples are identified by their content")
    what = "batches have no ids, and content identifies samples only if it does not change"
    why = "the epochs have the same order" if stable else "the epochs have other content"
    why = why if len(epochs) > 1 else "of one epoch it is not known"
    return finding("not-counted", "unproven", what, why)


def _same_order(epochs: Sequence[EpochReport]) -> Iterator[Finding]:
    shuffled = [each for each in epochs if any(rank.samples > 1 and not rank.in_order for rank in each.ranks)]
    again = _alike({each.epoch: ",".join(rank.order for rank in each.ranks) for each in shuffled})
    if again:
        yield finding("same-order-every-epoch", "warning", "epochs have the same order", f"epochs {listed(again)}")


def _same_randomness(epochs: Sequence[EpochReport]) -> Iterator[Finding]:
    """Never changes the verdict: all workers may draw alike to shuffle alike."""
    what = "workers draw the same random numbers, so that random augmentation repeats"
    drawn: dict[str, list[dict[str, str]]] = {}
    for number, epoch in enumerate(epochs):
        for rank in epoch.ranks:
            for worker, name, digest in rank.streams:
                by_epoch = drawn.setdefault(name, [{} for _ in epochs])
                by_epoch[number][f"rank {rank.rank} worker {worker}"] = digest
    for generator, by_epoch in sorted(drawn.items()):
        if alike := _alike(by_epoch[0]):
            yield finding("same-randomness-in-workers", "warning", what, f"{generator}: {listed(alike)}")
        if any(each and each == by_epoch[0] for each in by_epoch[1:]):
            yield finding("same-randomness-in-workers", "warning", what, f"{generator}: in each epoch")


def _alike(digests: Mapping[Any, str]) -> list[str]:
    """The first group of two or more that have one digest."""
    again = next((digest for digest, times in Counter(digests.values()).items() if times > 1), None)
    return [str(name) for name, digest in digests.items() if digest == again]
