"""What is wrong with the order of samples, with random numbers, and with what a resumed run delivers."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from rankfeed.diagnostics.doctor.findings import Finding
from rankfeed.diagnostics.doctor.observed import SampleKey
from rankfeed.diagnostics.doctor.seen import EpochSeen, ProbeSeen, RankSeen
from rankfeed.errors import listed

#: Orders of fewer samples may agree by chance.
_ENOUGH = 8
#: Random values that must agree before two streams are called one.
_ALIKE = 4
#: Sequences that are interleaved and each in order: so many at most.
_LANES = 16


def same_order(probe: ProbeSeen) -> Iterator[Finding]:
    """Epochs that have one order on a rank, where the loader shuffles."""
    for rank in probe.ranks:
        for one, other in pairwise(rank.whole):
            keys = one.keys
            if len({*keys}) < _ENOUGH or keys != other.keys:
                continue
            says = None if rank.built is None else rank.built.shuffles
            if says is False or (says is None and in_order(one.steps)):
                return
            sure = says or _count(keys, probe.job.ranks)
            yield Finding(
                "same-order-every-epoch",
                "warning" if sure else "note",
                "epochs have the same order" + ("" if sure else " (no matter, if nobody meant to shuffle)"),
                (
                    f"{probe.job.name}, rank {rank.rank}: epochs {one.epoch} and {other.epoch} both begin with "
                    + listed([str(key) for key in keys], 8),
                ),
            )
            return


def _count(keys: Sequence[SampleKey], ranks: int) -> bool:
    """Whether these are numbers of samples, so that another order than theirs was meant; names may have any."""
    numbers = [key for key in keys if isinstance(key, int)]
    return len(numbers) == len(keys) and max(numbers) - min(numbers) < 2 * ranks * len({*numbers})


def in_order(steps: Sequence[Any]) -> bool:
    """Whether batches come in the order of their keys, or are interleaved from a few streams that do.

    Args:
        steps: with their `keys`.

    Examples:
        >>> from rankfeed.diagnostics.doctor.observed import Step
        >>> def steps(*batches): return [Step(keys=list(keys), waited=0) for keys in batches]
        >>> in_order(steps([0, 1], [50, 51], [2, 3], [52, 53], [4, 5]))
        True
        >>> in_order(steps([3, 1], [2, 0], [7, 4], [5, 6], [9, 8]))
        False
    """
    batches = [step.keys for step in steps if step.keys]
    kinds = {type(key) for batch in batches for key in batch}
    if len(kinds) > 1:
        return False
    inside = [earlier <= later for batch in batches for earlier, later in pairwise(batch)]
    if sum(inside) < 0.95 * len(inside):
        return False
    first = [batch[0] for batch in batches]
    for lanes in range(1, min(_LANES, max(1, len(first) // 2)) + 1):
        pairs = list(zip(first, first[lanes:], strict=False))
        if sum(earlier <= later for earlier, later in pairs) >= 0.95 * len(pairs):
            return True
    return False


def depends_on_workers(probe: ProbeSeen, again: ProbeSeen | None, without: ProbeSeen) -> Iterator[Finding]:
    """An order that is another one with another number of workers, though it is the same where it is repeated."""
    if again is None or not (probe.epochs and again.epochs and without.epochs):
        return
    first, repeated, other = (each.epochs[0] for each in (probe, again, without))
    for rank, epoch in enumerate(first):
        keys = epoch.keys
        bare = other[rank].keys
        if (
            len(keys) >= _ENOUGH
            and keys == repeated[rank].keys
            and keys != bare
            and Counter(keys) == Counter(bare)
        ):
            workers = probe.job.workers
            yield Finding(
                "order-depends-on-workers",
                "note",
                "the order depends on the number of workers",
                (
                    f"rank {rank} begins with {listed([str(key) for key in keys], 8)} with {workers} workers, and "
                    f"with {listed([str(key) for key in bare], 8)} with none",
                ),
            )
            return


def same_randomness(probe: ProbeSeen, all_probes: Sequence[ProbeSeen]) -> Iterator[Finding]:
    """Workers, ranks or epochs that draw the same random numbers for different samples."""
    seeded = any(rank.built is not None and rank.built.seeded for rank in probe.ranks)
    for what, detail, default in (*_same_streams(probe), *_same_values(probe, _drawn(all_probes))):
        # What nobody has seeded yet, a training script may seed by rank.
        yield Finding(
            "same-randomness-in-workers",
            "note" if default and not seeded else "warning",
            "the same random numbers are drawn for different samples",
            (f"{probe.job.name}: {what} {detail}",),
        )


def _same_streams(probe: ProbeSeen) -> Iterator[tuple[str, str, bool]]:
    """By the states of generators in workers: they began as one, and were drawn from all along."""
    drawn: dict[str, dict[tuple[int, int, int], str]] = {}
    for rank in probe.ranks:
        for epoch in rank.epochs:
            for name, streams in _streams_of(epoch).items():
                for worker, digest in streams.items():
                    drawn.setdefault(name, {})[rank.rank, worker, epoch.epoch] = digest
    for name, places in sorted(drawn.items()):
        told = set()
        for (one, first), (other, second) in combinations(places.items(), 2):
            if first == second and (who := _who(one, other)) not in told:
                told.add(who)
                default = name in ("torch", "numpy", "random") and who == "ranks"
                yield f"{who} draw the same numbers from {name}:", f"{_place(one)} and {_place(other)}", default


def _streams_of(epoch: EpochSeen) -> Mapping[str, Mapping[int, str]]:
    """Of generators that each worker draws from in more batches than its first: name, worker, digest.

    What is drawn before the first batch alone shuffles files or the like, and has to be the same everywhere.
    """
    times: Counter[tuple[str, int]] = Counter()
    begun: set[int] = set()
    digests: dict[str, dict[int, str]] = {}
    for step in epoch.steps:
        if step.worker is None:
            continue
        for name, digest in step.streams.items():
            if step.worker in begun:
                times[name, step.worker] += 1
            digests.setdefault(name, {})[step.worker] = digest
        begun.add(step.worker)
    return {
        name: {worker: digest for worker, digest in streams.items() if times[name, worker] >= 2}
        for name, streams in digests.items()
    }


def _drawn(probes: Sequence[ProbeSeen]) -> set[str]:
    """Fields whose value for one sample is another one from delivery to delivery: something random is in them."""
    known: dict[tuple[str, SampleKey], str] = {}
    differs: set[str] = set()
    for probe in probes:
        for rank in probe.ranks:
            for epoch in rank.epochs:
                for step in epoch.steps:
                    for name, values in step.values.items():
                        for key, value in zip(step.keys, values, strict=False):
                            if known.setdefault((name, key), value) != value:
                                differs.add(name)
    return differs


def _same_values(probe: ProbeSeen, drawn: set[str]) -> Iterator[tuple[str, str, bool]]:
    """By what comes: the same values at the same places of two workers' streams, for other samples."""
    streams: dict[str, dict[tuple[int, int, int], list[tuple[SampleKey, str]]]] = {}
    for rank in probe.ranks:
        for epoch in rank.epochs:
            for step in epoch.steps:
                for name in drawn & step.values.keys():
                    place = (rank.rank, -1 if step.worker is None else step.worker, epoch.epoch)
                    pairs = list(zip(step.keys, step.values[name], strict=False))
                    streams.setdefault(name, {}).setdefault(place, []).extend(pairs)
    for name, places in sorted(streams.items()):
        told = set()
        for (one, first), (other, second) in combinations(places.items(), 2):
            who = _who(one, other)
            together = list(zip(first, second, strict=False))
            equal = {value for (key, value), (another, same) in together if value == same and key != another}
            if who not in told and len(equal) >= max(_ALIKE, 0.9 * len(together)):
                told.add(who)
                torch_alone = who == "ranks"
                yield f"{who} have the same values in {name!r}:", f"{_place(one)} and {_place(other)}", torch_alone


def _who(one: tuple[int, int, int], other: tuple[int, int, int]) -> str:
    if one[:2] == other[:2]:
        return "epochs"
    return "ranks" if one[0] != other[0] and one[1:] == other[1:] else "workers"


def _place(place: tuple[int, int, int]) -> str:
    rank, worker, epoch = place
    return f"rank {rank}{'' if worker < 0 else f' worker {worker}'} epoch {epoch}"


def resumed(whole: ProbeSeen, after: ProbeSeen) -> Iterator[Finding]:
    """What a run delivers that goes on from the middle of an epoch, against the epoch that was not interrupted.

    Args:
        whole: took the state in the middle of its first epoch, and read on to its end.
        after: went on from that.
    """
    same_world = whole.job.ranks == after.job.ranks and whole.job.workers == after.job.workers
    if not whole.epochs or not after.epochs or any(rank.state_after is None for rank in whole.ranks):
        return
    due = Counter(key for epoch in whole.epochs[0] for key in epoch.keys)
    came: Counter[SampleKey] = Counter()
    for rank, epoch in zip(whole.ranks, whole.epochs[0], strict=True):
        came.update(key for step in epoch.steps[: rank.state_after] for key in step.keys)
    before = sum(came.values())
    for epoch in after.epochs[0]:
        came.update(epoch.keys)
    taken = f"the state was taken after {_steps(whole.ranks)} steps ({before} samples), {after.job.name}"
    if not same_world:
        due = Counter({*due})
    for code, found, what in (
        ("resume-repeats", came - due, "a resumed run delivers samples again that had come before"),
        ("resume-skips", due - came, "a resumed run leaves out samples that had not come yet"),
    ):
        if found:
            evidence = f"{taken}: {sum(found.values())} samples: {listed([str(key) for key in found], 8)}"
            yield Finding(code, "error", what, (evidence,))


def _steps(ranks: Sequence[RankSeen]) -> str:
    return " or ".join(str(each) for each in sorted({rank.state_after or 0 for rank in ranks}))
