"""From what probes saw of a loader to what is wrong with it: nothing but arithmetic."""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from rankfeed.diagnostics.doctor import conduct, orders
from rankfeed.diagnostics.doctor.delivered import Dealt, Known, delivered
from rankfeed.diagnostics.doctor.findings import Finding, merged
from rankfeed.diagnostics.doctor.observed import SampleKey
from rankfeed.diagnostics.doctor.seen import EpochSeen, ProbeSeen


def diagnose(probes: Sequence[ProbeSeen], cpus: int, resumed: Sequence[ProbeSeen] = ()) -> tuple[Finding, ...]:
    """What is wrong, the gravest first.

    Args:
        probes: that read a loader from its beginning; the first one is the one that states were taken in.
        cpus: that this process may use.
        resumed: that went on from those states.
    """
    return merged(_found(probes, cpus, resumed))


def _found(probes: Sequence[ProbeSeen], cpus: int, resumed: Sequence[ProbeSeen]) -> Iterator[Finding]:
    working = [probe for probe in probes if probe.ok]
    for probe in (*probes, *resumed):
        like = [each for each in working if each.job.workers == probe.job.workers]
        alone = bool(like) and probe.job.start_method not in {each.job.start_method for each in like}
        elsewhere = probe.job.resume is not None and probe.job.ranks != probes[0].job.ranks
        yield from conduct.failures(probe, others_succeed=alone and not probe.job.resume, elsewhere=elsewhere)
    lone = next((each.epochs[0] for each in probes if each.is_alone and each.epochs), None)
    stable, certain = yield from _of_ids(probes, lone)
    known = expected(probes, lone, certain=certain)
    without = next((each for each in working if not each.job.workers and each.job.ranks > 1), None)
    for probe in probes:
        yield from conduct.endings(probe)
        yield from conduct.differences(probe)
        yield from conduct.handles(probe)
        yield from conduct.memory(probe, without)
        yield from conduct.times(probe)
        if stable and len({*conduct.kinds_of_ids(probe).values()}) < 2:
            yield from _delivered(probe, without, known)
            yield from orders.same_randomness(probe, probes)
        yield from orders.same_order(probe)
    yield from conduct.workers(probes, cpus)
    if not stable or not probes:
        return
    if without is not None and without is not probes[0]:
        again = next((each for each in probes[1:] if _alike(each, probes[0])), None)
        yield from orders.depends_on_workers(probes[0], again, without)
    for after in resumed if certain else ():
        yield from orders.resumed(probes[0], after)


def _delivered(probe: ProbeSeen, without: ProbeSeen | None, known: Known) -> Iterator[Finding]:
    """Of each epoch, or the beginning of a long one; one rank alone says what there is, and is no job."""
    if probe.job.ranks == 1 and without is not None:
        return
    bare = None
    if without is not None and without is not probe and without.epochs:
        bare = Dealt(without, without.epochs[0], known)
    for epochs in (*probe.epochs, probe.beginnings):
        if any(epoch.steps for epoch in epochs):
            yield from delivered(Dealt(probe, epochs, known), bare)


def expected(probes: Sequence[ProbeSeen], alone: Sequence[EpochSeen] | None, *, certain: bool) -> Known:
    """What should come in an epoch: what came in any, as often as it came to a rank alone.

    A sample may be in the data several times.

    Args:
        probes: all.
        alone: the epoch of a rank that was alone and had no workers, if there was one.
        certain: whether a sample has one key wherever it comes.
    """
    due: Counter[SampleKey] = Counter(key for epoch in alone or () for key in epoch.keys)
    came = len(due)
    for epoch in (epoch for probe in probes for epochs in probe.epochs for epoch in epochs):
        for key in {*epoch.keys} - due.keys():
            due[key] = 1
    part = came / len(due) if alone and due else 1.0
    known = Known(due, certain, part)
    every = [Dealt(probe, epochs, known) for probe in probes for epochs in probe.epochs]
    said = any(rank.built is not None and rank.built.replaces for probe in probes for rank in probe.ranks)
    return replace(known, drawn=said or any(each.is_drawn for each in every))


def _of_ids(
    probes: Sequence[ProbeSeen], alone: Sequence[EpochSeen] | None
) -> Generator[Finding, None, tuple[bool, bool]]:
    """Whether samples can be told from each other and known again, mostly and always; a note without ids."""
    if not any(probe.by_content for probe in probes):
        return True, True
    every = [Dealt(probe, epochs, Known({})) for probe in probes for epochs in probe.epochs]
    every = [dealt for dealt in every if dealt.total]
    seen = [dealt.total.keys() for dealt in every]
    stable = all(2 * len(keys & seen[0]) > min(len(keys), len(seen[0])) for keys in seen[1:])
    all_there_is = {key for epoch in alone or () for key in epoch.keys} or (seen[0] if seen else set())
    drops = any(rank.built is not None and rank.built.drops for probe in probes for rank in probe.ranks)
    certain = all(len(dealt.total.keys() - all_there_is) <= drops * dealt.padding for dealt in every)
    if certain:
        evidence = "samples are known by a hash of what they hold; those that are equal count as one"
        yield Finding("no-ids", "note", "batches have no ids", (evidence,))
        return stable, certain
    evidence = "what samples hold is another thing each time, so that they could not be counted"
    if stable:
        evidence = (
            "what some samples hold is another thing at times (filled up to the longest of a batch?), so that it "
            "is not known whether any are missing"
        )
    yield Finding("not-counted", "note", "batches have no ids, and what they hold tells too little", (evidence,))
    return stable, certain


def _alike(one: ProbeSeen, other: ProbeSeen) -> bool:
    return one.job.ranks == other.job.ranks and one.job.workers == other.job.workers
