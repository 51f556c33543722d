"""From the logs of control runs and of runs to findings: pure functions."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from rankfeed.diagnostics.doctor import outcomes, resources
from rankfeed.diagnostics.doctor.consistency import conflicts, sample_fields, unknown_content
from rankfeed.diagnostics.doctor.kinds import Kind, choose
from rankfeed.diagnostics.doctor.records import EpochLog, RowKey, RunLog, Step
from rankfeed.diagnostics.doctor.rules import (
    REPETITIVE,
    Counts,
    Facts,
    Tokens,
    judge,
    judge_tokens,
    never_drawn,
    repeated,
    same_sequence,
    window,
)
from rankfeed.diagnostics.findings import REMEDIES, Finding, Severity, finding, merged

#: A control that lacks less than this share of its dataset drops remainders.
_PART = 0.1


def diagnose(
    runs: Sequence[RunLog],
    controls: Sequence[RunLog],
    cpus: int,
    resumed: Sequence[RunLog] = (),
    allow: Collection[str] = (),
    universe: int | None = None,
) -> tuple[Finding, ...]:
    """All findings, the most severe first, causes before consequences; runs resumed from the first one."""
    found = _found(runs, controls, cpus, resumed, allow, universe)
    return merged(sorted(found, key=lambda each: [*REMEDIES].index(each.code)))


def _found(
    runs: Sequence[RunLog],
    controls: Sequence[RunLog],
    cpus: int,
    resumed: Sequence[RunLog],
    allow: Collection[str],
    universe: int | None,
) -> Iterator[Finding]:
    yield from outcomes.failures(runs, controls, resumed)
    without = next((each for each in runs if each.ok and not each.job.workers and each.job.ranks > 1), None)
    for run in runs:
        yield from outcomes.endings(run)
        yield from outcomes.differences(run)
        yield from outcomes.lengths(run)
        yield from outcomes.dropped(run)
        yield from resources.handles(run)
        yield from resources.memory(run, without)
        yield from resources.times(run)
        yield from outcomes.same_order(run)
        yield from outcomes.same_randomness(run)
    yield from resources.workers(runs, cpus)
    good = [each for each in controls if each.ok or each.cut]
    differing = conflicts([*good, *runs])
    kinds = choose(good, runs, universe, same_indices=not differing)
    kind = _strongest(kinds, runs, good)
    one_dataset = any(each.cuts_one_dataset for run in runs for each in run.built)
    for (one, other), text in differing.items():
        # Without a stable kind, data that differ between two equal runs are an unseeded split or order.
        if (one == other and one_dataset and one >= len(good)) or (other < len(good) and kind is None):
            yield finding("differs-between-ranks", "error", "ranks read different datasets", text)
    yield from _partial_epochs(good, allow)
    if kind is not None and kind.name == "indices":
        for text in unknown_content(good, runs):
            what = "samples have other content than in one process: a wrong cache, or a seed with the rank in it"
            yield finding("differs-between-ranks", "unproven", what, text)
    for run in runs:
        if any(True for _ in run.steps):
            yield from _counted(run, kind, kinds, good, allow)
    for after in resumed:
        if kind is not None:
            yield from outcomes.resumed(runs[0], after, kind)


def _partial_epochs(controls: Sequence[RunLog], allow: Collection[str]) -> Iterator[Finding]:
    """A control that reads a part of its map-style dataset: a split or a curriculum, or a mistake of all runs."""
    for log in controls[:1]:
        size = next((built.samples for built in log.built), None)
        steps = list(log.steps)
        if size is None or any(step.indices is None for step in steps):
            return
        epochs = [Counter[RowKey](i for step in each.steps for i in step.indices or ()) for (each,) in log.epochs]
        remainder = max([_PART * size, *(len(step.indices or ()) for step in steps)])
        if not epochs or any(len(each) + remainder >= size or repeated(each) >= REPETITIVE for each in epochs):
            return
        same = all(each.keys() == epochs[0].keys() for each in epochs)
        severity: Severity = "note" if same or "partial" in allow else "unproven"
        counts = ", ".join(str(len(each)) for each in epochs)
        text = f"{log.job.name}: epochs have {counts} of the {size} samples of its dataset"
        what = f"one process reads {'the same' if same else 'another'} part of the dataset in each epoch"
        yield finding("partial-epochs", severity, what, text)


def _strongest(kinds: Sequence[Kind], runs: Sequence[RunLog], controls: Sequence[RunLog]) -> Kind | None:
    """The strongest kind that both controls agree on; not indices if these are other samples in a run."""
    usable = [each for each in kinds if each.control is not None and each.exact]
    if usable and usable[0].name == "indices" and not usable[0].drawn:
        for content in usable[1:]:
            exchanged = not content.drawn and any(_exchanges(run, content) for run in runs)
            if exchanged and content.fields.issubset(sample_fields(controls)):
                return content
    return usable[0] if usable else None


def _exchanges(run: RunLog, kind: Kind) -> bool:
    """Whether known samples of an epoch come instead of others, more than padding and dropping explain."""
    facts = _facts(run, ())
    explained = facts.ranks * max(facts.workers, 1) * facts.batch
    for expected, each in zip(kind.control or (), run.epochs, strict=False):
        counts = Counts(expected, [kind.order(epoch) for epoch in each])
        if min(counts.excess.total(), counts.lack.total()) > explained:
            return True
    return False


def _counted(
    run: RunLog,
    kind: Kind | None,
    kinds: Sequence[Kind],
    controls: Sequence[RunLog],
    allow: Collection[str],
) -> Iterator[Finding]:
    """What a run delivers, by the strongest kind."""
    inexact = next((each for each in kinds if each.control is not None), None)
    if run.cut:
        yield from _window(run, kind or next(iter(kinds), None), controls, allow)
    elif run.epochs:
        if kind is None and (tokens := list(_tokens(run, controls, allow))):
            yield from tokens
        elif (found := kind or inexact) is not None:
            yield from _by_kind(run, found, controls, allow)
        else:
            yield from _uncounted(run, kinds, controls, allow)


def _by_kind(run: RunLog, kind: Kind, controls: Sequence[RunLog], allow: Collection[str]) -> Iterator[Finding]:
    """Each epoch against the control (rules 4 to 11)."""
    assert kind.control is not None
    if kind.name not in ("ids", "indices"):
        yield finding("no-ids", "note", "batches have no ids", f"samples are identified by {kind.name}")
    received = [[kind.order(epoch) for epoch in each] for each in run.epochs]
    epochs = list(zip(kind.control, received, strict=False))
    judged = [(number, counts) for number, each in enumerate(epochs) for counts in _counts(*each, allow)]
    lacks = [counts.lack for _, counts in judged]
    facts = _facts(run, allow)
    facts = replace(
        facts,
        noun="sample" if kind.name in ("ids", "indices") else "content hash",
        exact=kind.exact,
        same_lack=all(lack == lacks[0] for lack in lacks) if len(epochs) > 1 else None,
        shuffles=any(built.shuffles for built in run.built)
        or any(one[0] != other[0] for one, other in combinations(received, 2)),
        replaces=facts.replaces or kind.drawn,
    )
    errors = False
    for number, counts in judged:
        where = f"{run.job.name}, epoch {number}"
        padding = _repeated_batches(run.epochs[number], kind)
        found = judge(counts, replace(facts, where=where, ranks=len(counts.orders), padding=padding))
        yield from found
        errors = errors or any(each.severity == "error" for each in found)
        new = len(counts.total.keys() - kind.control[number].keys())
        explained = any(each.severity == "error" or each.code == "drawn-with-replacement" for each in found)
        if new >= max(facts.batch, 1) and not explained:
            text = f"{where}: {new} samples that the control does not deliver, so others may be missing"
            yield finding("not-counted", "unproven", "the epoch is not that of the control", text)
    if facts.replaces and facts.exact and controls and not errors:
        drawn = {key for each in received for order in each for key in order}
        control = {key for each in controls[0].epochs[: len(received)] for key in kind.total(each)}
        yield from never_drawn(drawn, control, facts)


def _repeated_batches(epochs: Sequence[EpochLog], kind: Kind) -> Counter[RowKey]:
    """The rows of batches that arrived before as they are."""
    batches = Counter(tuple(kind.of(step)) for epoch in epochs for step in epoch.steps)
    return Counter(key for batch, times in batches.items() for key in batch * (times - 1))


def _counts(expected: Counter[RowKey], received: Sequence[list[RowKey]], allow: Collection[str]) -> list[Counts]:
    """One for all ranks; if ranks may share samples, peers count once, and a rank that reads everything alone."""
    # The control may have dropped its incomplete last batch: what it did not deliver is expected once.
    extended = expected + Counter({key for order in received for key in order if key not in expected})
    if "shared" not in allow:
        return [Counts(extended, received)]
    peers = [order for number, order in enumerate(received) if order not in received[:number]]
    alone = [Counts(extended, [order]) for order in peers]
    whole = all(2 * counts.lack.total() < extended.total() for counts in alone)
    return alone if whole else [Counts(extended, peers)]


def _facts(run: RunLog, allow: Collection[str]) -> Facts:
    return Facts(
        where=run.job.name,
        ranks=run.job.ranks,
        workers=run.job.workers,
        batch=max((step.rows or len(step.indices or ()) for step in run.steps), default=0),
        drops=any(built.drops for built in run.built),
        replaces=any(built.replaces for built in run.built),
        allows_replacement="replacement" in allow,
    )


def _window(
    run: RunLog, kind: Kind | None, controls: Sequence[RunLog], allow: Collection[str]
) -> Iterator[Finding]:
    """The beginning of an epoch (rule 16): the finding that it was cut is made elsewhere."""
    if kind is None or "shared" in allow or not controls or not controls[0].ranks[0].epochs:
        return
    received = [Counter(kind.order(epoch)) for epoch in run.cut]
    size = sum(each.total() for each in received)
    control = Counter(kind.order(controls[0].ranks[0].epochs[0])[:size])
    facts = replace(_facts(run, allow), where=f"{run.job.name}, the first {size} rows", exact=kind.exact)
    found = window(received, control, facts)
    yield from found or _same_sequences(run, [run.cut], controls)


def _uncounted(
    run: RunLog, kinds: Sequence[Kind], controls: Sequence[RunLog], allow: Collection[str]
) -> Iterator[Finding]:
    """No stable kind (rules 13 and 14): equal sequences and repeats show a disease, nothing shows soundness."""
    facts = _facts(run, allow)
    if "shared" not in allow:
        found = [*_same_sequences(run, run.epochs, controls)]
        yield from found
        if found:
            return
    if facts.replaces or any(kind.drawn for kind in kinds):
        severity: Severity = "note" if facts.allows_replacement else "unproven"
        text = f"{run.job.name}: two control runs draw different samples"
        yield finding("drawn-with-replacement", severity, "samples are drawn with replacement", text)
        return
    rows = [sum(epoch.rows for epoch in each) for each in run.epochs]
    alone = [each[0].rows for log in controls[:1] for each in log.epochs]
    text = f"{run.job.name}: the content of samples differs between two equal runs"
    totals = f"; {rows} rows by epoch, the control {alone}" if rows != alone[: len(rows)] else ""
    yield finding("not-counted", "unproven", "samples cannot be identified", text + totals)


def _same_sequences(
    run: RunLog, epochs: Sequence[Sequence[EpochLog]], controls: Sequence[RunLog]
) -> Iterator[Finding]:
    """Identical sequences of batches on two ranks, or from two workers of a rank."""
    alone = Counter(
        key for log in controls[:1] for each in log.ranks[0].epochs[:1] for key in _contents(each.steps)
    )
    if repeated(alone) >= REPETITIVE:
        return
    for each in epochs:
        places: dict[tuple[int, int], list[Step]] = {}
        for rank, epoch in enumerate(each):
            places[rank, -1] = epoch.steps
            for step in epoch.steps:
                if step.worker is not None:
                    places.setdefault((rank, step.worker), []).append(step)
        for (one, first), (other, second) in combinations(sorted(places), 2):
            across, inside = one != other and first == second == -1, one == other and -1 not in (first, second)
            both = places[one, first], places[other, second]
            if (across or inside) and min(map(len, both)) >= 2 and same_sequence(*map(_contents, both)):
                code = "not-sharded-by-rank" if across else "duplicated-by-workers"
                which = f"ranks {one} and {other}" if across else f"rank {one}: workers {first} and {second}"
                what = f"{'ranks' if across else 'workers of a rank'} deliver identical sequences of batches"
                yield finding(code, "error", what, f"{run.job.name}, epoch {each[0].epoch}: {which}")


def _contents(steps: Sequence[Step]) -> list[RowKey]:
    return [key for step in steps for key in step.content]


def _tokens(run: RunLog, controls: Sequence[RunLog], allow: Collection[str]) -> Iterator[Finding]:
    """Packed sequences of tokens (rule 12)."""
    logs = [*controls, run]
    if len(controls) < 2 or any(step.indices is not None for log in logs for step in log.steps):
        return
    known = [step.tokens for log in logs for step in log.steps if step.rows]
    if not known or not all(known):
        return
    for number, each in enumerate(run.epochs):
        if number >= min(len(log.epochs) for log in controls):
            return
        one, other = (_tokens_of(log.epochs[number]) for log in controls[:2])
        facts = replace(_facts(run, allow), where=f"{run.job.name}, epoch {number}")
        if judge_tokens(one, other, facts).severity == "error":
            return  # the tokens of two equal runs differ
        yield judge_tokens(one, _tokens_of(each), facts)


def _tokens_of(epochs: Sequence[EpochLog]) -> Tokens:
    steps = [step for epoch in epochs for step in epoch.steps]
    longest = max((step.tokens // max(step.rows or 1, 1) for step in steps), default=0)
    by_rank = [Counter[RowKey](key for step in epoch.steps for key in step.shingles) for epoch in epochs]
    return Tokens(by_rank, sum(step.tokens for step in steps), longest)
