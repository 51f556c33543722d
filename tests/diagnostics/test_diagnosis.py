"""From what was seen to what is wrong, on observations that are made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.diagnostics.doctor.diagnosis import diagnose
from rankfeed.diagnostics.doctor.findings import REMEDIES, Finding, merged
from rankfeed.diagnostics.doctor.observed import (
    Began,
    Built,
    Done,
    Ended,
    Job,
    Line,
    Moved,
    Ready,
    Sizes,
    Stated,
    Step,
)
from rankfeed.diagnostics.doctor.seen import Failure, ProbeSeen, RankSeen

#: Of a rank, epoch and number of ranks and workers: batches of (keys, worker).
Deal = Callable[[int, int, int, int], Sequence[tuple[list[int], int | None]]]
SAMPLES = 48


def job(**changes: Any) -> Job:
    usual = {
        "name": "",
        "factory": "a:b",
        "path": [],
        "ranks": 2,
        "workers": 2,
        "start_method": "fork",
        "epochs": 3,
    }
    made = Job(**(usual | changes))
    name = f"{made.ranks} ranks, {made.workers} workers ({made.start_method})"
    return msgspec.structs.replace(made, name=name)


def seen(this: Job, deal: Deal, built: Built | None = None, state_after: int | None = None) -> ProbeSeen:
    ranks = []
    for number in range(this.ranks):
        rank = RankSeen(number)
        lines: list[Line] = [Ready(), built or Built(seconds=0.1, seeded=True)]
        for epoch in range(this.epochs):
            lines.append(Began(epoch=epoch))
            for keys, worker in deal(number, epoch, this.ranks, this.workers):
                lines.append(Step(keys=list(keys), waited=0.01, worker=worker))
            if state_after is not None and not epoch:
                lines.append(Stated(step=state_after))
            lines.append(Ended(whole=True))
        for line in (*lines, Done()):
            rank.add(line)
        ranks.append(rank)
    return ProbeSeen(this, ranks)


def all_probes(deal: Deal, **options: Any) -> list[ProbeSeen]:
    jobs = [
        job(),
        job(start_method="spawn", epochs=2),
        job(workers=0, epochs=1),
        job(ranks=1, workers=0, epochs=1),
    ]
    return [seen(each, deal, **options) for each in jobs]


def codes(found: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(each.code, each.severity) for each in found]


def shuffled(epoch: int, samples: int = SAMPLES) -> list[int]:
    ids = list(range(samples))
    random.Random(epoch).shuffle(ids)
    return ids


def batched(ids: Sequence[int], workers: int, size: int = 4) -> list[tuple[list[int], int | None]]:
    """As a map-style data set is read: workers take batches by turns."""
    batches = [list(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [(batch, number % workers if workers else None) for number, batch in enumerate(batches)]


def streamed(parts: Sequence[Sequence[int]], size: int = 4) -> list[tuple[list[int], int | None]]:
    """As an iterable data set is read: each worker has its own batches."""
    rows = [batched(part, 0, size) for part in parts]
    return [
        (row[number][0], worker)
        for number in range(max(map(len, rows)))
        for worker, row in enumerate(rows)
        if number < len(row)
    ]


def sound(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    return batched(shuffled(epoch)[rank::ranks], workers)


def test_a_sound_loader_has_no_findings() -> None:
    assert diagnose(all_probes(sound), cpus=4) == ()


@given(st.integers(1, 5), st.integers(0, 4), st.integers(2, 9), st.integers(1, 5))
def test_a_sound_loader_has_no_findings_whatever_its_shape(
    ranks: int, workers: int, steps: int, size: int
) -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch, total)[rank::ranks], workers, size)

    total = ranks * steps * size
    found = diagnose([seen(job(ranks=ranks, workers=workers), deal)], cpus=99)
    assert [each for each in codes(found) if each[0] != "same-order-every-epoch"] == []


def test_workers_that_all_read_everything() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        mine = list(range(rank, SAMPLES, ranks))
        return streamed([mine] * max(1, workers))

    found = diagnose(all_probes(deal), cpus=4)
    assert codes(found) == [("duplicated-by-workers", "error")]
    assert "24 of 24" not in found[0].evidence[0]
    assert "48 of 48 samples" in found[0].evidence[0]


def test_workers_that_are_not_known_and_repeat() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        mine = list(range(rank, SAMPLES, ranks))
        return [(keys, None) for keys, _ in streamed([mine] * max(1, workers))]

    assert codes(diagnose(all_probes(deal), cpus=4)) == [("duplicated-by-workers", "error")]


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_all_read_everything(alike: bool) -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch if alike else 100 * rank + epoch), workers)

    found = diagnose(all_probes(deal), cpus=4)
    assert codes(found) == [("not-sharded-by-rank", "error")]
    assert "every rank reads all of it" in found[0].evidence[0]


def test_ranks_that_cut_different_orders() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(100 * rank + epoch)[rank::ranks], workers)

    found = diagnose(all_probes(deal), cpus=4)
    assert codes(found) == [("not-sharded-by-rank", "error")]
    assert any("do not come" in line for line in found[0].evidence)


def test_data_cut_twice_by_ranks() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch)[rank::ranks][rank::ranks], workers)

    assert codes(diagnose(all_probes(deal), cpus=4)) == [("sharded-twice", "error")]


def test_data_cut_twice_and_padded() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        mine = shuffled(epoch)[rank::ranks][rank::ranks]
        return batched([*mine, shuffled(epoch)[0]] if ranks > 1 else mine, workers)

    assert codes(diagnose(all_probes(deal), cpus=4)) == [("sharded-twice", "error")]


def test_data_cut_twice_by_workers() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        mine = list(range(rank, SAMPLES, ranks))
        parts = max(1, workers)
        return streamed([mine[part::parts][part::parts] for part in range(parts)])

    found = diagnose(all_probes(deal), cpus=4)
    assert ("sharded-twice", "error") in codes(found)
    assert "by workers" in found[0].what


def test_uneven_steps_say_where_a_collective_hangs() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        ids = shuffled(epoch)
        return batched(ids[:32] if rank == 0 and ranks > 1 else ids[32:] if ranks > 1 else ids, workers)

    found = diagnose(all_probes(deal), cpus=4)
    assert codes(found) == [("uneven-steps", "error")]
    assert "rank 0 takes 8, rank 1 takes 4" in found[0].evidence[0]
    assert "in step 4 (from 0) waits for ever for rank 1" in found[0].evidence[1]


def test_padding() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        ids = shuffled(epoch, 47)
        return batched((ids + ids[:1] if ranks > 1 else ids)[rank::ranks], workers)

    assert codes(diagnose(all_probes(deal), cpus=4)) == [("padded-with-repeats", "warning")]


@pytest.mark.parametrize(("drops", "severity"), [(True, "note"), (False, "warning")])
def test_a_rest_that_is_left_out(drops: bool, severity: str) -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        ids = shuffled(epoch, 51)
        return batched((ids[:48] if ranks > 1 else ids)[rank::ranks], workers)

    built = Built(seconds=0, drops=drops, seeded=True)
    assert codes(diagnose(all_probes(deal, built=built), cpus=4)) == [("missing-samples", severity)]


def test_samples_that_never_come() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        ids = shuffled(epoch, 96)
        return batched([each for each in ids if ranks == 1 or each % 3][rank::ranks], workers)

    assert codes(diagnose(all_probes(deal), cpus=4)) == [("missing-samples", "error")]


def test_samples_that_are_drawn_with_replacement() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        drawn = random.Random(f"{rank} {epoch} {ranks} {workers}").choices(range(SAMPLES), k=SAMPLES // ranks)
        return batched(drawn, workers)

    found = diagnose(all_probes(deal), cpus=4)
    assert codes(found) == [("missing-samples", "error"), ("padded-with-repeats", "error")]
    assert "with replacement" in found[0].what


def drawn(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    chosen = random.Random(f"{rank} {epoch} {ranks} {workers}").choices(range(SAMPLES), k=SAMPLES // ranks)
    return batched(chosen, workers)


def test_samples_that_a_sampler_draws_with_replacement_are_as_they_should_be() -> None:
    built = Built(seconds=0, replaces=True, seeded=True)
    found = diagnose(all_probes(drawn, built=built), cpus=4)
    assert codes(found) == [("missing-samples", "note")]
    often = [seen(job(ranks=1, workers=0), lambda *of: [*drawn(*of), *drawn(*of), *drawn(9, *of[1:])], built)]
    assert [each for each in codes(diagnose(often, cpus=4)) if each[1] != "note"] == []


def test_shards_that_are_drawn_are_shared_by_ranks_and_workers_by_chance() -> None:
    """Ranks without workers happen to draw no shard twice: what workers draw tells that they might."""

    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        parts = max(1, workers)
        random_ = random.Random(f"shards {rank} {epoch} {ranks} {workers}")
        pick = random_.choices if workers else random_.sample
        shards = [pick(range(12), k=12 // ranks // parts) for _ in range(parts)]
        return streamed([[4 * shard + row for shard in chosen for row in range(4)] for chosen in shards])

    found = diagnose(all_probes(deal), cpus=4)
    grave = [each for each in codes(found) if each[1] != "note"]
    assert grave == [("missing-samples", "error"), ("padded-with-repeats", "error")]
    assert "with replacement" in found[0].what


def test_ranks_that_draw_the_same_with_replacement() -> None:
    built = Built(seconds=0, replaces=True, seeded=True)
    found = diagnose(all_probes(lambda rank, *of: drawn(0, *of), built=built), cpus=4)
    assert codes(found)[0] == ("not-sharded-by-rank", "error")
    assert "draw the same" in found[0].what


def test_a_part_of_the_data_in_each_epoch_is_not_cut_twice() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(f"{epoch} {ranks} {workers}")[: SAMPLES // 2][rank::ranks], workers)  # type: ignore[arg-type]

    assert codes(diagnose(all_probes(deal), cpus=4)) == [("missing-samples", "error")]


def filled_up(deal: Deal) -> Deal:
    """Contents that are filled up to the longest of a batch, which is the same in seven of eight."""

    def changed(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return [
            ([key if sum(keys) % 8 else key + SAMPLES for key in keys], worker)
            for keys, worker in deal(rank, epoch, ranks, workers)
        ]

    return changed


def test_contents_that_change_with_their_batch_are_not_missing() -> None:
    def unsharded(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch), workers)

    found = diagnose(renamed(all_probes(filled_up(sound)), str, by_content=True), cpus=4)
    assert codes(found) == [("not-counted", "note")]
    assert "longest of a batch" in found[0].evidence[0]
    found = diagnose(renamed(all_probes(filled_up(unsharded)), str, by_content=True), cpus=4)
    assert codes(found) == [("not-sharded-by-rank", "error"), ("not-counted", "note")]


def test_an_order_that_is_the_same_in_each_epoch() -> None:
    assert codes(diagnose(all_probes(fixed), cpus=4)) == [("same-order-every-epoch", "warning")]


def fixed(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    return batched(shuffled(5)[rank::ranks], workers)


def renamed(probes: Sequence[ProbeSeen], name: Callable[[Any], Any], **changes: Any) -> list[ProbeSeen]:
    """The same probes, with other keys of samples."""
    for probe in probes:
        for rank in probe.ranks:
            for epoch in rank.epochs:
                epoch.steps = [
                    msgspec.structs.replace(step, keys=[name(key) for key in step.keys], **changes)
                    for step in epoch.steps
                ]
    return list(probes)


def test_an_order_that_its_sampler_keeps_is_meant() -> None:
    """A part of the data that random_split chose, read as it lies."""
    built = Built(seconds=0, shuffles=False, seeded=True)
    assert diagnose(all_probes(fixed, built=built), cpus=4) == ()


@pytest.mark.parametrize("name", [lambda key: f"img{key}.jpg", lambda key: 7919**3 * (key + 1) % 1000003])
def test_names_may_lie_in_any_order(name: Callable[[int], Any]) -> None:
    found = diagnose(renamed(all_probes(fixed), name), cpus=4)
    assert codes(found) == [("same-order-every-epoch", "note")]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_order_that_nobody_shuffles_may_repeat(workers: int) -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        mine = list(range(SAMPLES))[rank * SAMPLES // ranks : (rank + 1) * SAMPLES // ranks]
        parts = max(1, workers)
        return streamed(
            [mine[len(mine) * part // parts : len(mine) * (part + 1) // parts] for part in range(parts)]
        )

    found = diagnose(all_probes(deal), cpus=4)
    assert [each for each in codes(found) if each[1] != "note"] == []


def test_an_order_that_depends_on_the_number_of_workers() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        mine = shuffled(epoch)[rank::ranks]
        parts = max(1, workers)
        return streamed([mine[part::parts] for part in range(parts)])

    assert codes(diagnose(all_probes(deal), cpus=4)) == [("order-depends-on-workers", "note")]


@pytest.mark.parametrize(("ahead", "code"), [(0, None), (-1, "resume-repeats"), (1, "resume-skips")])
def test_a_resumed_run(ahead: int, code: str | None) -> None:
    whole = seen(job(), sound, state_after=3)
    after = seen(job(epochs=1, resume="here"), lambda *of: sound(*of)[3 + ahead :])
    assert codes(diagnose([whole], 4, [after])) == ([] if code is None else [(code, "error")])


def test_a_run_resumed_on_other_ranks() -> None:
    def rest(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch)[24:][rank::ranks], workers)

    whole = seen(job(), sound, state_after=3)
    assert diagnose([whole], 4, [seen(job(ranks=3, epochs=1, resume="here"), rest)]) == ()
    wrong = seen(job(ranks=1, epochs=1, resume="here"), lambda *of: rest(*of)[1:])
    assert codes(diagnose([whole], 4, [wrong])) == [("resume-skips", "error")]


def with_steps(change: Callable[[int, int, int, Step], Step], **options: Any) -> list[ProbeSeen]:
    """Sound probes whose steps are changed, by rank, epoch and number of the worker's step."""
    probes = all_probes(sound, **options)
    for probe in probes:
        for rank in probe.ranks:
            for epoch in rank.epochs:
                epoch.steps = [
                    change(rank.rank, epoch.epoch, number // max(1, probe.job.workers), step)
                    for number, step in enumerate(epoch.steps)
                ]
    return probes


def streaming(digest: Callable[[int, int, Step], str], name: str = "dataset.rng") -> Any:
    return lambda rank, epoch, number, step: msgspec.structs.replace(
        step, streams={name: digest(rank, epoch, step)}
    )


def test_workers_with_one_random_stream() -> None:
    found = diagnose(with_steps(streaming(lambda rank, epoch, step: f"{rank} {epoch}")), cpus=4)
    assert codes(found) == [("same-randomness-in-workers", "warning")]
    assert "workers draw the same numbers from dataset.rng" in found[0].evidence[0]


def test_streams_of_their_own_are_sound() -> None:
    own = streaming(lambda rank, epoch, step: f"{rank} {epoch} {step.worker}")
    assert diagnose(with_steps(own), cpus=4) == ()


def test_what_is_drawn_before_the_first_batch_alone_may_be_the_same() -> None:
    def once(rank: int, epoch: int, number: int, step: Step) -> Step:
        return msgspec.structs.replace(step, streams={} if number else {"dataset.rng": "all"})

    assert diagnose(with_steps(once), cpus=4) == ()


def test_a_global_generator_that_nobody_has_seeded_is_no_fault_of_the_loader() -> None:
    of_rank = streaming(lambda rank, epoch, step: f"{epoch} {step.worker}", "torch")
    for seeded, severity in ((False, "note"), (True, "warning")):
        found = diagnose(with_steps(of_rank, built=Built(seconds=0, seeded=seeded)), cpus=4)
        assert codes(found) == [("same-randomness-in-workers", severity)]


def test_random_values_that_come_at_the_same_places() -> None:
    def drawn(rank: int, epoch: int, number: int, step: Step) -> Step:
        return msgspec.structs.replace(
            step, values={"noise": [f"{number} {row}" for row in range(len(step.keys))]}
        )

    assert codes(diagnose(with_steps(drawn), cpus=4)) == [("same-randomness-in-workers", "warning")]


def test_values_that_belong_to_the_sample_are_no_random_numbers() -> None:
    def label(rank: int, epoch: int, number: int, step: Step) -> Step:
        return msgspec.structs.replace(step, values={"x": [str(int(key) % 10) for key in step.keys]})

    assert diagnose(with_steps(label), cpus=4) == ()


def test_memory_that_grows_with_each_epoch() -> None:
    for step, expected in ((20, [("memory-grows", "warning")]), (2, [])):
        probe = seen(job(), sound)
        for rank in probe.ranks:
            for epoch in rank.epochs:
                epoch.sizes.append(Sizes(rank=(300 + step * epoch.epoch) << 20, children={"7": 50 << 20}))
        assert codes(diagnose([probe], 4)) == expected


def test_memory_that_is_filled_once_does_not_grow() -> None:
    probe = seen(job(), sound)
    for rank in probe.ranks:
        for epoch in rank.epochs:
            epoch.sizes.append(Sizes(rank=(300 + 200 * bool(epoch.epoch)) << 20, children={}))
    assert diagnose([probe], 4) == ()


def test_data_that_each_worker_loads_for_itself() -> None:
    def read(this: Job, ends: int, children: dict[str, int]) -> ProbeSeen:
        probe = seen(this, sound)
        for rank in probe.ranks:
            rank.epochs[0].sizes += [Sizes(rank=100 << 20, children={}), Sizes(rank=ends << 20, children=children)]
        return probe

    without = read(job(workers=0, epochs=1), 230, {})
    loaded = read(job(), 101, {"7": 135 << 20, "8": 140 << 20})
    assert codes(diagnose([loaded, without], 4)) == [("memory-copied", "warning")]
    assert diagnose([read(job(), 101, {"7": 20 << 20, "8": 140 << 20}), without], 4) == ()


def test_data_that_each_worker_has_for_itself() -> None:
    probe = seen(job(), sound, Built(seconds=0, bytes=100 << 20, seeded=True))
    probe.ranks[0].epochs[0].sizes.append(Sizes(rank=0, children={"7": 90 << 20}))
    assert codes(diagnose([probe], 4)) == [("memory-copied", "warning")]
    sent = seen(job(start_method="spawn"), sound, Built(seconds=0, pickled=100 << 20, seeded=True))
    assert codes(diagnose([sent], 4)) == [("memory-copied", "warning")]


def test_a_file_that_workers_share() -> None:
    probe = seen(job(), sound)
    probe.ranks[1].add(Moved(path="/data", start=0, end=80))
    assert codes(diagnose([probe], 4)) == [("handles-before-fork", "error")]


@pytest.mark.parametrize(("method", "severity"), [("fork", "warning"), ("spawn", "note")])
def test_a_first_batch_that_takes_long(method: str, severity: str) -> None:
    probe = seen(job(start_method=method), sound)
    steps = probe.ranks[0].epochs[0].steps
    steps[0] = msgspec.structs.replace(steps[0], waited=30.0)
    assert codes(diagnose([probe], 4)) == [("slow-first-batch", severity)]


@pytest.mark.parametrize(("work", "expected"), [(0.0, []), (0.01, [("starved", "warning")]), (1.0, [])])
def test_a_consumer_that_waits(work: float, expected: Any) -> None:
    assert codes(diagnose([seen(job(step_seconds=work), sound)], 4)) == expected


@pytest.mark.parametrize(("cpus", "severity"), [(1, "warning"), (3, "note"), (4, None)])
def test_more_workers_than_cpus(cpus: int, severity: str | None) -> None:
    probes = all_probes(sound, built=Built(seconds=0, workers=2, seeded=True))
    assert codes(diagnose(probes, cpus)) == ([] if severity is None else [("too-many-workers", severity)])


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure("raised", "in the factory", "ValueError: no"), ("factory-raises", "error")),
        (Failure("raised", "in epoch 0", "RuntimeError: DataLoader worker (pid 7) exited unexpectedly"),
         ("process-died", "error")),
        (Failure("raised", "looking for ids", "AuditError: a batch has no 'id'"), ("no-ids", "error")),
        (Failure("died", "epoch 0", "SIGKILL"), ("process-died", "error")),
        (Failure("hangs", "epoch 0", "nothing came for 60 s"), ("hangs", "error")),
    ],
)  # fmt: skip
def test_failures(failure: Failure, expected: tuple[str, str]) -> None:
    rank = RankSeen(0, failure=failure)
    follows = RankSeen(1, failure=Failure("hangs", "epoch 0", "it waited for rank 0", root=False))
    assert codes(diagnose([ProbeSeen(job(), [rank, follows])], 4)) == [expected]


def test_a_state_that_is_refused_on_other_ranks_is_no_fault() -> None:
    refused = RankSeen(0, failure=Failure("raised", "loading the state", "StateError: 2 ranks"))
    for ranks, severity in ((1, "note"), (2, "error")):
        after = ProbeSeen(job(ranks=ranks, resume="here"), [refused])
        assert codes(diagnose(all_probes(sound), 4, [after])) == [("factory-raises", severity)]


def test_an_error_with_one_start_method_alone_is_a_warning() -> None:
    probes = all_probes(sound)
    failed = RankSeen(0, failure=Failure("raised", "in epoch 0", "PicklingError: lambda"))
    probes[1] = ProbeSeen(probes[1].job, [failed, RankSeen(1)])
    found = diagnose(probes, 4)
    assert codes(found) == [("factory-raises", "warning")]
    assert "spawn" in found[0].what


def test_epochs_without_batches_and_without_end() -> None:
    assert codes(diagnose([seen(job(), lambda *of: [])], 4)) == [("yields-nothing", "error")]
    once = seen(job(), lambda rank, epoch, *of: [] if epoch else sound(rank, epoch, *of))
    assert ("yields-nothing", "error") in codes(diagnose([once], 4))
    for length, severity in ((None, "error"), (99, "note")):
        probe = seen(job(epochs=1), sound, Built(seconds=0, length=length, seeded=True))
        for rank in probe.ranks:
            rank.add(Ended(whole=False))
            rank.epochs[0].whole = False
        assert codes(diagnose([probe], 4)) == [("never-ends", severity)]


def test_the_beginning_of_a_long_epoch_shows_what_comes_twice() -> None:
    def begun(deal: Deal) -> ProbeSeen:
        probe = seen(job(epochs=1), deal, Built(seconds=0, length=99, seeded=True))
        for rank in probe.ranks:
            rank.epochs[0].whole, rank.epochs[0].cut = False, True
        return probe

    cut = ("never-ends", "note")
    assert codes(diagnose([begun(sound)], 4)) == [cut]
    unsharded = begun(lambda rank, epoch, ranks, workers: batched(shuffled(epoch), workers))
    assert codes(diagnose([unsharded], 4)) == [("not-sharded-by-rank", "error"), cut]
    not_one_each = begun(lambda *of: [([key // 4 for key in keys], worker) for keys, worker in sound(*of)])
    assert codes(diagnose([not_one_each], 4)) == [cut]
    uneven = begun(lambda rank, *of: sound(rank, *of)[rank:])
    assert codes(diagnose([uneven], 4)) == [cut]


def test_a_rank_that_is_given_nothing() -> None:
    found = diagnose([seen(job(), lambda rank, *of: [] if rank else sound(rank, *of))], 4)
    assert codes(found) == [("yields-nothing", "error")]
    assert "for rank 1" in found[0].evidence[0]


def test_ranks_that_know_samples_by_different_ids() -> None:
    probe = seen(job(), sound)
    for epoch in probe.ranks[1].epochs:
        epoch.steps = [
            msgspec.structs.replace(step, keys=[f"k{key}" for key in step.keys]) for step in epoch.steps
        ]
    assert codes(diagnose([probe], 4)) == [("differs-between-ranks", "error")]


def test_ranks_that_cut_different_data_sets() -> None:
    probe = seen(job(), sound)
    for rank in probe.ranks:
        rank.built = Built(seconds=0, samples=48 + rank.rank, cuts_one_data_set=True, seeded=True)
    assert codes(diagnose([probe], 4)) == [("differs-between-ranks", "error")]


def test_contents_that_change_each_time_are_not_counted() -> None:
    probes = all_probes(sound)
    number = 0
    for probe in probes:
        for rank in probe.ranks:
            for epoch in rank.epochs:
                for at, step in enumerate(epoch.steps):
                    number += 1
                    keys = [f"{number} {row}" for row in range(len(step.keys))]
                    epoch.steps[at] = msgspec.structs.replace(step, keys=keys, by_content=True)
    assert codes(diagnose(probes, 4)) == [("not-counted", "note")]


def test_contents_that_stay_are_counted() -> None:
    assert codes(diagnose(renamed(all_probes(sound), str, by_content=True), 4)) == [("no-ids", "note")]

    def without_rest(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        ids = random.Random(f"{epoch} {ranks} {workers}").sample(range(51), 48)
        return batched(ids[rank::ranks], workers)

    probes = all_probes(without_rest, built=Built(seconds=0, drops=True, seeded=True))
    found = diagnose(renamed(probes, str, by_content=True), 4)
    assert codes(found) == [("missing-samples", "note"), ("no-ids", "note")]


def test_samples_that_are_in_the_data_twice_are_no_repeats() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched([each // 2 for each in shuffled(epoch)][rank::ranks], workers)

    assert diagnose(all_probes(deal), cpus=4) == ()


def test_findings_of_one_code_are_told_once_and_the_gravest_first() -> None:
    found = merged(
        [
            Finding("no-ids", "note", "n", ("a",)),
            Finding("uneven-steps", "error", "u", ("fork",)),
            Finding("hangs", "error", "h", ()),
            Finding("uneven-steps", "error", "u", ("spawn",)),
        ]
    )
    assert [each.code for each in found] == ["hangs", "uneven-steps", "no-ids"]
    assert found[1].evidence == ("fork", "spawn")
    assert {*REMEDIES} >= {each.code for each in found}
