"""From what probes saw of a loader to what is wrong with it: nothing but arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence

from rankfeed.proof.doctor import conduct, orders
from rankfeed.proof.doctor.delivered import Dealt, delivered
from rankfeed.proof.doctor.findings import Finding, merged
from rankfeed.proof.doctor.observed import SampleKey
from rankfeed.proof.doctor.seen import ProbeSeen


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
    stable = yield from _of_ids(probes)
    due, complete = expected(probes)
    without = next((each for each in working if not each.job.workers and each.job.ranks > 1), None)
    for probe in probes:
        yield from conduct.endings(probe)
        yield from conduct.differences(probe)
        yield from conduct.handles(probe)
        yield from conduct.memory(probe, without)
        yield from conduct.times(probe)
        if stable and len({*conduct.kinds_of_ids(probe).values()}) < 2:
            yield from _delivered(probe, without, due, complete)
            yield from orders.same_randomness(probe, probes)
        yield from orders.same_order(probe)
    yield from conduct.workers(probes, cpus)
    if not stable or not probes:
        return
    if without is not None and without is not probes[0]:
        again = next((each for each in probes[1:] if _alike(each, probes[0])), None)
        yield from orders.depends_on_workers(probes[0], again, without)
    for after in resumed:
        yield from orders.resumed(probes[0], after)


def _delivered(
    probe: ProbeSeen, without: ProbeSeen | None, due: Mapping[SampleKey, int], complete: bool
) -> Iterator[Finding]:
    """Of each epoch, or the beginning of a long one; one rank alone says what there is, and is no job."""
    if probe.job.ranks == 1 and without is not None:
        return
    bare = None
    if without is not None and without is not probe and without.epochs:
        bare = Dealt(without, without.epochs[0], due, complete)
    for epochs in (*probe.epochs, probe.beginnings):
        if any(epoch.steps for epoch in epochs):
            yield from delivered(Dealt(probe, epochs, due, complete), bare)


def expected(probes: Sequence[ProbeSeen]) -> tuple[Mapping[SampleKey, int], bool]:
    """How often each sample should come in an epoch, and whether that is known from a rank that was alone.

    What came in any epoch should come in each. A sample may be in the data several times: as often as it came to
    a single rank without workers.
    """
    due: Counter[SampleKey] = Counter()
    complete = False
    for probe in probes:
        for epochs in probe.epochs:
            for key in {key for epoch in epochs for key in epoch.keys}:
                due[key] = max(due[key], 1)
            if len(epochs) == 1 and not probe.job.workers:
                complete = True
                for key, times in Counter(epochs[0].keys).items():
                    due[key] = max(due[key], times)
    return due, complete


def _of_ids(probes: Sequence[ProbeSeen]) -> Generator[Finding, None, bool]:
    """Whether samples can be told from each other and known again; a note where they have no ids."""
    if not any(probe.by_content for probe in probes):
        return True
    seen = [{key for epoch in epochs for key in epoch.keys} for probe in probes for epochs in probe.epochs]
    seen = [keys for keys in seen if keys]
    stable = all(2 * len(keys & seen[0]) > min(len(keys), len(seen[0])) for keys in seen[1:])
    evidence = "samples are known by a hash of what they hold; those that are equal count as one"
    if not stable:
        evidence = "what samples hold is another thing each time, so that they could not be counted"
    yield Finding("no-ids", "note", "batches have no ids", (evidence,))
    return stable


def _alike(one: ProbeSeen, other: ProbeSeen) -> bool:
    return one.job.ranks == other.job.ranks and one.job.workers == other.job.workers
