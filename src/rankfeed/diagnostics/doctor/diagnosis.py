"""Derives findings from the logs of runs and of single-process control runs: pure functions."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

from rankfeed.diagnostics.deliveries import EpochReport, LoaderTraits
from rankfeed.diagnostics.doctor import consistency, outcomes, pairs, resources
from rankfeed.diagnostics.doctor.kinds import IDENTITY, Kind, RunCounter, choose
from rankfeed.diagnostics.doctor.records import EpochLog, RowKey, RunLog, indices_of, remove_padding
from rankfeed.diagnostics.findings import REMEDIES, Finding, Severity, finding, merged
from rankfeed.diagnostics.judge import JudgedFacts, judge_samples, judge_steps
from rankfeed.errors import listed

#: Shares of shingles: packing explains less than the first, and more than the second above that is a disease.
_EXPLAINED, _DISEASED = 0.2, 0.2


@dataclass(frozen=True)
class Tokens:
    """An epoch of token sequences: sampled shingles of each rank, number of tokens, longest sequence (L)."""

    by_rank: Sequence[Counter[RowKey]]
    count: int
    length: int

    @cached_property
    def shingles(self) -> Counter[RowKey]:
        return sum(self.by_rank, Counter())


def diagnose(
    runs: Sequence[RunLog],
    controls: Sequence[RunLog],
    cpus: int,
    resumed: Sequence[RunLog] = (),
    allow: Collection[str] = (),
    universe: int | None = None,
) -> tuple[Finding, ...]:
    """All findings, the most severe first, causes before consequences; runs resumed from the first one."""
    remove_padding([step for log in (*runs, *controls, *resumed) for step in log.steps])
    good = [log for log in controls if log.ok or log.cut]
    logs = [*good, *runs]
    findings = [*outcomes.failures(runs, controls, resumed), *resources.workers(runs, cpus)]
    without = next((run for run in runs if run.ok and not run.job.workers and run.job.ranks > 1), None)
    for run in runs:
        for rule in (*outcomes.OF_A_RUN, resources.handles, resources.times):
            findings += rule(run)
        findings += resources.memory(run, without)
        counter = RunCounter(IDENTITY, run)
        reports = [counter.report(epochs) for epochs in run.epochs]
        findings += judge_steps(reports, _facts(run, IDENTITY, allow))
        if "shared-batches" in allow:
            findings += _other_batches(run, reports)
    differing = consistency.conflicts(logs)
    kinds = choose(good, runs, universe, same_indices=not differing)
    kind = _strongest(kinds, runs, good)
    one_dataset = any(built.cuts_one_dataset for run in runs for built in run.built)
    # Without a stable kind, data that differ between two equal runs are an unseeded split or order.
    of_datasets = "differs-between-ranks"
    for (one, other), text in differing.items():
        if (one == other and one_dataset and one >= len(good)) or (other < len(good) and kind is None):
            findings.append(finding(of_datasets, "error", "ranks read different datasets", text))
    what = "the same samples have other labels in other processes, as if classes were numbered in another order"
    findings += (finding(of_datasets, "error", what, text) for text in consistency.renumbered(logs))
    findings += [*_partial_epochs(good, allow), *outcomes.changed_reads(good)]
    findings += [*outcomes.collated_apart(good), *pairs.exchanged_by_epoch(good)]
    findings += pairs.rows_apart(good, [*runs, *resumed], same_indices=not differing)
    if kind is not None and kind.name == "indices":
        what = "samples have other content than in one process: a wrong cache, or a seed with the rank in it"
        texts = consistency.unknown_content(good, runs)
        findings += (finding(of_datasets, "unproven", what, text) for text in texts)
    for run in runs:
        if any(True for _ in run.steps):
            findings += _samples(run, kind, kinds, good, allow)
    for after in resumed:
        findings += outcomes.resumed(runs[0], after, kind) if kind is not None else ()
    return merged(sorted(findings, key=lambda finding: [*REMEDIES].index(finding.code)))


def _partial_epochs(controls: Sequence[RunLog], allow: Collection[str]) -> Iterator[Finding]:
    """A control that reads a part of its map-style dataset: a split or a curriculum, or a mistake of all runs."""
    for log in controls[:1]:
        size = next((built.samples for built in log.built), None)
        steps = list(log.steps)
        if size is None or any(step.indices is None for step in steps):
            return
        epochs = [Counter(epoch.order(indices_of)) for (epoch,) in log.epochs]
        remainder = max([consistency.FEW * size, *(len(indices_of(step)) for step in steps)])
        if not epochs or any(len(ids) + remainder >= size or consistency.is_repetitive(ids) for ids in epochs):
            return
        same = all(epoch.keys() == epochs[0].keys() for epoch in epochs)
        severity: Severity = "note" if same or "partial" in allow else "unproven"
        counts = ", ".join(str(len(epoch)) for epoch in epochs)
        text = f"{log.job.name}: epochs have {counts} of the {size} samples of its dataset"
        what = f"one process reads {'the same' if same else 'another'} part of the dataset in each epoch"
        yield finding("partial-epochs", severity, what, text)


def _strongest(kinds: Sequence[Kind], runs: Sequence[RunLog], controls: Sequence[RunLog]) -> Kind | None:
    """The strongest kind that both controls agree on; not indices if these are other samples in a run."""
    usable = [kind for kind in kinds if kind.control is not None and kind.exact]
    if usable and usable[0].name == "indices" and not usable[0].drawn:
        for content in usable[1:]:
            exchanged = not content.drawn and any(_exchanges(run, content) for run in runs)
            if exchanged and content.fields.issubset(consistency.sample_fields(controls)):
                return content
    return usable[0] if usable else None


def _exchanges(run: RunLog, kind: Kind) -> bool:
    """Whether known samples of an epoch come instead of others, more than padding and dropping explain."""
    for expected, epochs in zip(kind.control or (), run.epochs, strict=False):
        total = kind.total(epochs)
        new = Counter({key: 1 for key in total if key not in expected})
        if min((total - expected - new).total(), (expected - total).total()) > run.remainder:
            return True
    return False


def _facts(run: RunLog, kind: Kind | None, allow: Collection[str], *, drawn: bool = False) -> JudgedFacts:
    """What is known of a run besides its counts."""
    declared = [built.traits for built in run.built]
    return JudgedFacts(
        "none" if kind is None else "ids" if kind.names_samples else "content",
        "declared" if kind is not None and kind.declared else "control",
        cut=bool(run.cut),
        traits=LoaderTraits(
            run.job.workers,
            drops=any(traits.drops for traits in declared),
            replaces=drawn or any(traits.replaces for traits in declared),
            indexed=all(step.indices is not None for step in run.steps),
        ),
        exact=kind is None or kind.exact,
        allowed=tuple(allow),
        where=run.job.name,
    )


def _samples(
    run: RunLog, kind: Kind | None, kinds: Sequence[Kind], controls: Sequence[RunLog], allow: Collection[str]
) -> Iterator[Finding]:
    """What a run delivers, by the strongest kind of key."""
    chosen = kind or next((other for other in kinds if other.control is not None), next(iter(kinds), None))
    epochs = run.epochs
    if run.cut:  # its beginning, as far as all ranks came
        steps = min(len(epoch.steps) for epoch in run.cut)
        epochs = [[replace(epoch, steps=epoch.steps[:steps]) for epoch in run.cut]] if steps else []
    if not epochs:
        return
    if kind is None and not run.cut and (tokens := list(_tokens(run, controls, allow))):
        yield from tokens
        return
    drawn = chosen is not None and (chosen.drawn or (chosen.control is None and any(one.drawn for one in kinds)))
    facts = _facts(run, chosen, allow, drawn=drawn)
    if chosen is None:
        yield from judge_samples((), facts)
        return
    if chosen.control is not None and not chosen.names_samples and not run.cut:
        yield finding("no-ids", "note", "batches have no ids", f"samples are identified by {chosen.name}")
    shared = any(name.startswith("shared") for name in allow)
    expected = None if run.cut else chosen.control
    begun = [chosen.total([epoch]) for log in controls for rank in log.ranks for epoch in rank.epochs[:1]]
    repeats = run.cut and any(map(consistency.is_repetitive, begun))
    findings: list[Finding] = []
    if not repeats and (not shared or expected is not None):
        counter = RunCounter(chosen, run, controls)
        for group in counter.peers(epochs, expected) if shared else [epochs]:
            reports = [counter.report(*pair) for pair in zip(group, expected or repeat(None), strict=False)]
            findings += judge_samples(reports, facts)
    yield from findings
    errors = any(finding.severity == "error" for finding in findings)
    if expected is None and not run.cut and not errors:
        yield from _uncounted(run, facts, controls)
    if facts.traits.replaces and facts.exact and controls and not errors and expected is not None:
        yield from _never_drawn(run, chosen, controls, facts)


def _other_batches(run: RunLog, epochs: Sequence[EpochReport]) -> Iterator[Finding]:
    """Ranks without a peer that receives the same batches in the same order."""
    for epoch in epochs:
        peers = Counter(rank.order for rank in epoch.ranks)
        alone = [str(rank.rank) for rank in epoch.ranks if peers[rank.order] == 1]
        if alone and run.job.ranks > 1:
            # Content may be random on each rank.
            is_known = all(step.ids is not None or step.indices is not None for step in run.steps)
            what = "ranks that share their batches receive different ones"
            where = f"{run.job.name}, epoch {epoch.epoch}"
            text = f"{where}: no other rank receives the batches of rank {listed(alone)}"
            yield finding("differs-between-ranks", "error" if is_known else "unproven", what, text)
            return


def _never_drawn(run: RunLog, kind: Kind, controls: Sequence[RunLog], facts: JudgedFacts) -> Iterator[Finding]:
    """Samples that the control draws in some epoch and the ranks in none, with replacement.

    With the same odds, each of both draws about as many samples that the other one does not.
    """
    drawn = {key for epochs in run.epochs for key in kind.total(epochs)}
    control = {key for epochs in controls[0].epochs[: len(run.epochs)] for key in kind.total(epochs)}
    never, new = control - drawn, drawn - control
    if len(never) > 4 * len(new) + run.remainder:
        of_control = f"{len(never)} of {len(control)} samples that one process draws"
        text = f"{facts.where}: {of_control} are drawn in no epoch: {listed(sorted(map(str, never)))}"
        yield finding("missing-samples", "error", "some samples are never drawn", text)


def _uncounted(run: RunLog, facts: JudgedFacts, controls: Sequence[RunLog]) -> Iterator[Finding]:
    """Nothing identifies samples in all runs, so nothing shows soundness."""
    if facts.traits.replaces:
        severity: Severity = "note" if "replacement" in facts.allowed else "unproven"
        text = f"{run.job.name}: two control runs draw different samples"
        yield finding("drawn-with-replacement", severity, "samples are drawn with replacement", text)
        return
    rows = [sum(epoch.rows for epoch in epochs) for epochs in run.epochs]
    alone = [epochs[0].rows for log in controls[:1] for epochs in log.epochs]
    why = "the content of samples differs between two equal runs" if len(controls) > 1 else "there is no control"
    totals = f"; {rows} rows by epoch, the control {alone}" if rows != alone[: len(rows)] else ""
    yield finding("not-counted", "unproven", "samples cannot be identified", f"{run.job.name}: {why}{totals}")


def _tokens(run: RunLog, controls: Sequence[RunLog], allow: Collection[str]) -> Iterator[Finding]:
    """Packed sequences of tokens."""
    steps = [step for log in (*controls, run) for step in log.steps]
    known = [step.tokens for step in steps if step.rows]
    if len(controls) < 2 or not known or not all(known) or any(step.indices is not None for step in steps):
        return
    for number, epochs in enumerate(zip(*(log.epochs for log in (*controls[:2], run)), strict=False)):
        one, other, delivered = map(_tokens_of, epochs)
        traits, where = _facts(run, None, allow).traits, f"{run.job.name}, epoch {number}"
        options = {"ranks": run.job.ranks, "batch": run.largest_batch}
        if judge_tokens(one, other, traits, where=where, **options).severity == "error":
            return  # the tokens of two equal runs differ
        yield judge_tokens(one, delivered, traits, where=where, **options)


def _tokens_of(epochs: Sequence[EpochLog]) -> Tokens:
    steps = [step for epoch in epochs for step in epoch.steps]
    longest = max((step.tokens // max(step.rows or 1, 1) for step in steps), default=0)
    by_rank = [Counter[RowKey](key for step in epoch.steps for key in step.shingles) for epoch in epochs]
    return Tokens(by_rank, sum(step.tokens for step in steps), longest)


def judge_tokens(
    control: Tokens, run: Tokens, traits: LoaderTraits, *, ranks: int, batch: int, where: str
) -> Finding:
    """Packed sequences, whose content changes with the configuration: compared by their shingles.

    ``batch`` is the largest number of sequences in a batch.
    """
    excess = (run.shingles - control.shingles).total() / max(1, run.shingles.total())
    lack = (control.shingles - run.shingles).total() / max(1, control.shingles.total())
    explained = max(_EXPLAINED, 0.1 + 12 / max(run.length, 12))  # a cut sequence loses 11 of its shingles
    open_ends = ranks * max(traits.workers, 1) * run.length
    rest = open_ends * (batch if traits.drops else 1)
    text = (
        f"{where}: {run.count} tokens, the control {control.count}; "
        f"{excess:.0%} of the 12-token sequences repeat, {lack:.0%} are missing"
    )
    if control.count < 20 * open_ends:
        what = "too few tokens to compare packed sequences"
        return finding("not-counted", "unproven", what, f"{text}; {20 * open_ends} are needed")
    if not consistency.is_repetitive(control.shingles) and max(excess, lack) > explained + _DISEASED:
        if lack >= excess:
            return finding("missing-samples", "error", "a large part of the tokens is not delivered", text)
        within = sum((shingles - control.shingles).total() for shingles in run.by_rank) / run.shingles.total()
        code = "duplicated-by-workers" if within > explained and traits.workers > 1 else "not-sharded-by-rank"
        return finding(code, "error", "packed sequences contain the same tokens several times", text)
    if max(excess, lack) < explained and abs(run.count - control.count) <= rest:
        what = "tokens are complete up to the last incomplete sequence of each worker"
        return finding("packed-sequences", "note", what, text)
    return finding("not-counted", "unproven", "packed sequences could not be compared with the control", text)
