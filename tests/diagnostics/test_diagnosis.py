"""From logs to findings, on logs that are made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.diagnostics.deliveries import LoaderTraits
from rankfeed.diagnostics.doctor import Examination
from rankfeed.diagnostics.doctor.diagnosis import diagnose
from rankfeed.diagnostics.doctor.records import (
    Built,
    Event,
    Job,
    Moved,
    RankLog,
    Record,
    RunFailure,
    RunLog,
    Sizes,
    Step,
)
from rankfeed.diagnostics.findings import Finding

#: Of a rank, epoch and number of ranks and workers: batches of (samples, worker).
Deal = Callable[[int, int, int, int], Sequence[tuple[list[int], int | None]]]
#: A step of a batch: its samples, its worker, the run's number, rank and epoch.
Shape = Callable[[list[int], int | None, tuple[int, int, int]], Step]
SAMPLES = 96


def job(**changes: Any) -> Job:
    usual: dict[str, Any] = {
        "name": "",
        "factory": "a:b",
        "ranks": 2,
        "workers": 2,
        "start_method": "fork",
        "epochs": 3,
    }
    made = Job(**(usual | changes))
    return replace(made, name=f"{made.ranks} ranks, {made.workers} workers ({made.start_method})")


def by_id(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
    return Step(rows=len(samples), ids=[*samples], waited=0.01, worker=worker)


def by_index(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
    return Step(rows=len(samples), indices=[*samples], waited=0.01, worker=worker)


def by_content(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
    return Step(rows=len(samples), fields={"x": [7 * sample for sample in samples]}, waited=0.01, worker=worker)


def log(
    this: Job,
    deal: Deal,
    built: Built | None = None,
    state_after: int | None = None,
    shape: Shape = by_id,
    number: int = 0,
) -> RunLog:
    ranks = []
    for rank in range(this.ranks):
        rank_log = RankLog(rank)
        lines: list[Record] = [built or Built(seconds=0.1)]
        for epoch in range(this.epochs):
            lines.append(Event("epoch", epoch))
            dealt = deal(rank, epoch, this.ranks, this.workers)
            lines.extend(shape([*keys], worker, (number, rank, epoch)) for keys, worker in dealt)
            if state_after is not None and not epoch:
                lines.append(Event("state", state_after))
            lines.append(Event("whole"))
        for line in (*lines, Event("done")):
            rank_log.add(line)
        ranks.append(rank_log)
    return RunLog(this, ranks)


def alone(deal: Deal, **options: Any) -> list[RunLog]:
    return [log(job(ranks=1, workers=0), deal, **options, number=index) for index in (8, 9)]


def findings(
    deal: Deal, *, allow: Sequence[str] = (), controlled_by: Deal | None = None, **options: Any
) -> list[Finding]:
    runs = [job(), job(start_method="spawn", epochs=2), job(ranks=3, workers=0, epochs=2)]
    logs = [log(run, deal, **options, number=index) for index, run in enumerate(runs)]
    return [*diagnose(logs, alone(controlled_by or deal, **options), cpus=4, allow=allow)]


def codes(diagnosis: Sequence[Finding], *, notes: bool = True) -> list[tuple[str, str]]:
    return [
        (finding.code, finding.severity)
        for finding in diagnosis
        if notes or finding.severity not in ("note", "warning")
    ]


def severe(deal: Deal, **options: Any) -> list[tuple[str, str]]:
    return codes(findings(deal, **options), notes=False)


def shuffled(seed: object, samples: int = SAMPLES) -> list[int]:
    ids = list(range(samples))
    random.Random(str(seed)).shuffle(ids)
    return ids


def batched(ids: Sequence[int], workers: int, size: int = 4) -> list[tuple[list[int], int | None]]:
    """As a map-style dataset is read: workers take batches in turn."""
    batches = [list(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [(batch, index % workers if workers else None) for index, batch in enumerate(batches)]


def streamed(parts: Sequence[Sequence[int]], size: int = 4) -> list[tuple[list[int], int | None]]:
    """As an iterable dataset is read: each worker has its own batches."""
    rows = [batched(part, 0, size) for part in parts]
    return [
        (row[index][0], worker)
        for index in range(max(map(len, rows)))
        for worker, row in enumerate(rows)
        if index < len(row)
    ]


def sound(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    return batched(shuffled(epoch)[rank::ranks], workers)


def everything(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    return batched(shuffled(epoch), workers)


def own_orders(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    return batched(shuffled(f"{rank} {epoch} {ranks}"), workers)


def each_worker(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    return streamed([shuffled(epoch)[rank::ranks]] * max(1, workers))


def twice_by_ranks(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    return batched(shuffled(epoch)[rank::ranks][rank::ranks], workers)


def twice_by_workers(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    mine, parts = shuffled(epoch)[rank::ranks], max(1, workers)
    return streamed([mine[part::parts][part::parts] for part in range(parts)])


def uneven(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    ids = shuffled(epoch)
    return batched(ids if ranks == 1 else ids[:64] if not rank else ids[64 + rank - 1 :: ranks - 1], workers)


def padded(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    ids = shuffled(epoch, 95)
    return batched([*ids, *ids[: -95 % ranks]][rank::ranks], workers)


def padded_by_batches(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    """A sampler of batches of different sizes repeats whole ones."""
    batches = batched(range(90), workers)
    random.Random(epoch).shuffle(batches)
    return [*batches, *batches[: -len(batches) % ranks]][rank::ranks]


def same_half(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    return batched(shuffled(epoch)[: SAMPLES // 2], workers)


def never(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    ids = [sample for sample in shuffled(epoch) if ranks == 1 or sample % 4]
    return batched(ids[rank::ranks], workers)


DISEASES: dict[str, tuple[Deal, str]] = {
    "everything on each rank": (everything, "not-sharded-by-rank"),
    "each rank in its own order": (own_orders, "not-sharded-by-rank"),
    "everything in each worker": (each_worker, "duplicated-by-workers"),
    "sharded twice by ranks": (twice_by_ranks, "sharded-twice"),
    "sharded twice by workers": (twice_by_workers, "sharded-twice"),
    "uneven": (uneven, "uneven-steps"),
    "some never arrive": (never, "missing-samples"),
    "all ranks read one half": (same_half, "not-sharded-by-rank"),
}


@pytest.mark.parametrize("shape", [by_id, by_index, by_content])
def test_a_sound_or_padding_loader_has_no_errors_by_id_by_index_or_by_content(shape: Shape) -> None:
    assert severe(sound, shape=shape) == []
    assert severe(padded, shape=shape) == []
    assert severe(padded_by_batches, shape=shape) == []


@pytest.mark.parametrize("shape", [by_id, by_content])
@pytest.mark.parametrize("name", DISEASES)
def test_faulty_sharding_is_diagnosed_by_ids_and_by_content(name: str, shape: Shape) -> None:
    deal, code = DISEASES[name]
    assert (code, "error") in severe(deal, shape=shape)


def test_recorded_indices_reveal_unsharded_ranks_that_random_augmentation_hides() -> None:
    def augmented(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        fields = {"x": [hash((sample, place)) & (1 << 60) - 1 for sample in samples]}
        return Step(rows=len(samples), indices=[*samples], fields=fields, worker=worker)

    built = Built(seconds=0, samples=SAMPLES)
    assert severe(sound, shape=augmented, built=built) == []
    assert severe(everything, shape=augmented, built=built) == [("not-sharded-by-rank", "error")]
    assert severe(same_half, shape=augmented, built=built) == [
        ("not-sharded-by-rank", "error"),
        ("partial-epochs", "unproven"),
    ]


@given(st.integers(1, 5), st.integers(0, 4), st.integers(2, 9), st.integers(1, 5))
def test_a_sound_loader_has_no_errors_for_any_number_of_ranks_workers_and_steps(
    ranks: int, workers: int, steps: int, size: int
) -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch, total)[rank::ranks], workers, size)

    total = ranks * steps * size
    diagnosis = diagnose([log(job(ranks=ranks, workers=workers), deal)], alone(deal), cpus=99)
    assert codes(diagnosis, notes=False) == []


def noisy(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
    fields = {
        "x": [hash((sample, place)) & (1 << 60) - 1 for sample in samples],
        "label": [sample % 5 for sample in samples],
    }
    return Step(rows=len(samples), fields=fields, worker=worker)


def test_labels_beside_random_content_prove_faulty_sharding_but_never_soundness() -> None:
    assert severe(sound, shape=noisy) == [("not-counted", "unproven")]
    assert severe(everything, shape=noisy) == [("not-sharded-by-rank", "error")]
    assert severe(never, shape=noisy) == [("missing-samples", "error")]


def test_fields_that_count_steps_or_positions_are_not_used_to_identify_samples() -> None:
    """Their values are the same in every configuration, but belong to other samples."""
    counted: dict[object, int] = {}

    def numbered(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        start = counted[place] = counted.get(place, -len(samples)) + len(samples)
        fields = {"x": [7 * sample for sample in samples], "position": [*range(start, start + len(samples))]}
        fields["step"] = [start // 4] * len(samples)
        return Step(rows=len(samples), fields=fields, worker=worker)

    assert severe(sound, shape=numbered) == []
    counted.clear()
    assert severe(everything, shape=numbered) == [("not-sharded-by-rank", "error")]


def random_content(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
    return Step(rows=len(samples), fields={"x": [random.getrandbits(60) for _ in samples]}, worker=worker)


def seeded_content(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
    """Random, but the same on all ranks of a run."""
    run, _, epoch = place
    return Step(rows=len(samples), fields={"x": [hash((sample, run, epoch)) for sample in samples]}, worker=worker)


def test_a_loader_with_fully_random_content_is_not_proven_whether_sharded_or_not() -> None:
    assert severe(sound, shape=random_content) == [("not-counted", "unproven")]
    assert severe(everything, shape=random_content) == [("not-counted", "unproven")]


def test_packed_tokens_that_are_masked_at_random_are_not_proven() -> None:
    def masked(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        shingles = [random.getrandbits(60) for _ in range(3 * len(samples))]
        return replace(random_content(samples, worker, place), shingles=shingles, tokens=512 * len(samples))

    assert severe(sound, shape=masked) == [("not-counted", "unproven")]


def test_ranks_with_identical_batches_are_unsharded_even_if_content_differs_between_runs() -> None:
    def masked(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        step = seeded_content(samples, worker, place)
        return replace(step, fields={"x": [digest & (1 << 60) - 1 for digest in step.fields["x"]]})

    assert severe(everything, shape=masked) == [("not-sharded-by-rank", "error")]
    assert severe(everything, shape=masked, allow=["shared"]) == [("not-counted", "unproven")]
    assert severe(sound, shape=masked) == [("not-counted", "unproven")]


def test_padding_to_the_longest_row_of_a_batch_does_not_change_how_samples_are_identified() -> None:
    """Rows that end in the padding element, 5, where their batch has a longer one."""

    def to_the_longest(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        pads = [max(samples) - row for row in samples]
        fields = {"x": [1000 * row + pad for row, pad in zip(samples, pads, strict=True)]}
        ends = {"x": [(5 if pad else 900 + row, row, max(pad, 1)) for row, pad in zip(samples, pads, strict=True)]}
        fields["x"] = [row if not pad else 10**6 * (row + 1) + pad for row, pad in zip(samples, pads, strict=True)]
        return Step(rows=len(samples), fields=fields, ends=ends, worker=worker)

    assert severe(sound, shape=to_the_longest) == []
    assert severe(everything, shape=to_the_longest) == [("not-sharded-by-rank", "error")]


def drawn(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    chosen = random.Random(f"{rank} {epoch} {ranks} {workers}").choices(range(SAMPLES), k=SAMPLES // ranks)
    return batched(chosen, workers)


@pytest.mark.parametrize("shape", [by_id, by_index])
def test_sampling_with_replacement_is_unproven_and_the_same_draws_on_all_ranks_an_error(shape: Shape) -> None:
    built = Built(seconds=0, samples=SAMPLES, traits=LoaderTraits(replaces=True))
    assert severe(drawn, shape=shape, built=built) == [("drawn-with-replacement", "unproven")]
    assert severe(drawn, shape=shape, built=built, allow=["replacement"]) == []
    same = severe(lambda rank, *of: drawn(0, *of), shape=shape, built=built)
    assert same == [("not-sharded-by-rank", "error")]


def test_samples_that_no_rank_ever_draws_with_replacement_are_reported_missing() -> None:
    """Ranks that draw from the first N / world size samples only."""

    def from_the_first(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        chosen = random.Random(f"{rank} {epoch} {ranks}").choices(range(SAMPLES // ranks), k=SAMPLES // ranks)
        return batched(chosen, workers)

    built = Built(seconds=0, samples=SAMPLES, traits=LoaderTraits(replaces=True))
    for shape in (by_id, by_index):
        diagnosis = severe(from_the_first, shape=shape, built=built, allow=["replacement"])
        assert diagnosis == [("missing-samples", "error")]


def test_a_control_that_reads_only_part_of_its_dataset_is_unproven_or_a_note() -> None:
    """An offset that is never cleared is unproven, unless allowed; a fixed split by a sampler is a note."""

    def offset(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch)[24:][rank::ranks], workers)

    def split(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched([sample for sample in shuffled(epoch) if sample % 4][rank::ranks], workers)

    built = Built(seconds=0, samples=SAMPLES)
    diagnosis = findings(offset, shape=by_index, built=built)
    assert codes(diagnosis) == [("partial-epochs", "unproven")]
    assert diagnosis[0].evidence[0].endswith("72, 72, 72 of the 96 samples of its dataset")
    assert codes(findings(offset, shape=by_index, built=built, allow=["partial"])) == [("partial-epochs", "note")]
    assert codes(findings(split, shape=by_index, built=built)) == [("partial-epochs", "note")]
    assert codes(findings(sound, shape=by_index, built=built)) == []

    def one_large_batch(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch)[:60][rank::ranks], workers, 60 // ranks)

    assert codes(findings(one_large_batch, shape=by_index, built=built), notes=False) == []


def test_no_error_is_reported_if_the_single_process_control_drops_its_last_batch() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        mine = shuffled(epoch, 99)[rank::ranks]
        return batched(mine[: len(mine) // 4 * 4 if ranks == 1 else 32 if ranks == 3 else 48], workers)

    assert severe(deal) == []


def test_samples_that_the_single_process_control_does_not_deliver_are_not_proven() -> None:
    """A fixed number of steps on each rank: one process delivers fewer samples than two ranks."""

    def fixed(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(0)[rank::ranks][:24], workers)

    assert severe(fixed) == [("not-counted", "unproven")]


def test_allow_shared_permits_ranks_but_not_workers_to_read_the_same_samples() -> None:
    assert severe(everything, allow=["shared"]) == []
    assert severe(own_orders, allow=["shared"]) == []
    assert severe(each_worker, allow=["shared"]) == [("duplicated-by-workers", "error")]

    def peers(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch)[rank // 2 :: 2] if ranks > 3 else shuffled(epoch), workers)

    logs = [log(job(ranks=4, workers=0), peers)]
    assert codes(diagnose(logs, alone(peers), cpus=4, allow=["shared"]), notes=False) == []


def test_samples_with_equal_content_in_the_dataset_are_not_reported_as_repeats() -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched([sample // 2 for sample in shuffled(epoch)][rank::ranks], workers)

    assert severe(deal, shape=by_content) == []


def test_a_declared_universe_replaces_the_control_and_reveals_what_the_control_misses() -> None:
    def half(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch, SAMPLES // 2)[rank::ranks], workers)

    diagnosis = diagnose([log(job(), half)], alone(half), cpus=4, universe=SAMPLES)
    assert codes(diagnosis, notes=False) == [("sharded-twice", "error")]
    assert codes(diagnose([log(job(), sound)], [], cpus=4, universe=SAMPLES), notes=False) == []


def test_with_a_universe_repeats_of_the_same_samples_are_an_error_and_random_draws_unproven() -> None:
    """Indices that all read one item are an error; random draws, which differ by epoch, are unproven."""

    def doubled(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched([max(sample, 24) for sample in shuffled(epoch)][rank::ranks], workers)

    diagnosis = diagnose([log(job(), doubled)], alone(doubled), cpus=4, universe=SAMPLES)
    assert "error" in {severity for _, severity in codes(diagnosis)}
    assert codes(diagnose([log(job(), doubled)], alone(doubled), cpus=4), notes=False) == []

    def drawn(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        draws = random.Random(epoch).choices(range(SAMPLES), k=SAMPLES)
        return batched(draws[rank::ranks], workers)

    diagnosis = diagnose([log(job(), drawn)], alone(drawn), cpus=4, universe=SAMPLES)
    assert codes(diagnosis, notes=False) == [("drawn-with-replacement", "unproven")]


def test_labels_paired_with_other_samples_are_found_if_each_rank_has_its_own_dataset() -> None:
    """An index then means another sample on each rank, which alone is no finding."""

    def examined(rolled: int) -> list[tuple[str, str]]:
        def shares(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
            labels = [(sample + rolled * (place[0] < 8)) % SAMPLES // 30 for sample in samples]
            indices = [sample // 2 for sample in samples] if place[0] < 8 else [*samples]
            return Step(rows=len(samples), indices=indices, fields={"x": samples, "y": labels}, worker=worker)

        return codes(diagnose([log(job(), sound, shape=shares)], alone(sound, shape=shares), cpus=4), notes=False)

    assert ("rows-come-apart", "error") in examined(40)
    assert ("rows-come-apart", "error") not in examined(0)


def test_samples_dropped_by_collate_are_missing_and_samples_packed_into_one_row_are_not() -> None:
    def filtering(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        kept = [sample for sample in samples if sample % 10]
        return Step(rows=len(kept), indices=[*samples], dropped=len(samples) - len(kept), worker=worker)

    def packing(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        return Step(rows=1, indices=[*samples], worker=worker)

    built = Built(seconds=0, samples=SAMPLES)
    assert severe(sound, shape=filtering, built=built) == [("missing-samples", "error")]
    assert severe(sound, shape=packing, built=built) == []


def test_a_split_that_differs_between_ranks_is_an_error() -> None:
    """random_split without a generator: each process has its own split."""

    def split(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        run, rank, _ = place
        order = shuffled(f"split {run} {rank}", SAMPLES + 20)
        return Step(rows=len(samples), indices=[*samples], fields={"x": [order[sample] for sample in samples]})

    built = Built(seconds=0, samples=SAMPLES, cuts_one_dataset=True)
    diagnosis = severe(sound, shape=split, built=built)
    assert diagnosis[0] == ("differs-between-ranks", "error")


def test_an_index_that_means_other_data_in_each_worker_is_reported_and_augmentation_is_not() -> None:
    """A worker_init_fn that gives each worker a part of a map-style dataset, whose indices wrap around."""

    def cut_in_workers(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        parts = 1 if worker is None else 2
        held = [*range(worker or 0, SAMPLES, parts)]
        values = [7 * held[sample % len(held)] for sample in samples]
        return Step(rows=len(samples), indices=[*samples], fields={"x": values}, worker=worker)

    def augmented(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        values = [hash((sample, worker, place)) for sample in samples]
        return Step(rows=len(samples), indices=[*samples], fields={"x": values}, worker=worker)

    built = Built(seconds=0, samples=SAMPLES)
    assert severe(sound, shape=cut_in_workers, built=built) != []
    assert severe(sound, shape=augmented, built=built) == []


def test_local_indices_into_the_files_of_each_rank_do_not_identify_samples() -> None:
    def own(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        local = [*range(len(samples))]
        return Step(rows=len(samples), indices=local, fields={"x": [7 * key for key in samples]}, worker=worker)

    logs = [log(job(), sound, shape=own, built=Built(seconds=0, samples=SAMPLES // 2))]
    diagnosis = diagnose(logs, alone(sound, shape=own, built=Built(seconds=0, samples=SAMPLES)), cpus=4)
    assert codes(diagnosis, notes=False) == []


@pytest.mark.parametrize(
    ("length", "severities"),
    [
        (12, []),
        (14, []),
        (15, ["error"]),
        (20, ["note"]),  # the steps of all ranks
        (28, ["note"]),
        (29, ["error"]),
        (96, ["error"]),
        (3, ["error"]),
    ],
)
def test_len_of_a_loader_is_an_error_unless_close_to_the_steps_of_one_rank_or_of_all(
    length: int, severities: list[str]
) -> None:
    logs = [log(job(), sound, Built(seconds=0, length=length))]
    diagnosis = codes(diagnose(logs, alone(sound), cpus=4))
    assert [severity for code, severity in diagnosis if code == "wrong-length"] == severities


@pytest.mark.parametrize(("length", "wrong"), [(12, False), (13, True), (11, True), (24, True)])
def test_len_of_a_loader_over_a_map_style_dataset_must_equal_its_number_of_steps(length: int, wrong: bool) -> None:
    logs = [log(job(), sound, Built(seconds=0, length=length, traits=LoaderTraits(indexed=True)))]
    assert (("wrong-length", "error") in codes(diagnose(logs, alone(sound), cpus=4))) is wrong


def test_the_same_order_in_each_epoch_is_a_warning_unless_the_loader_does_not_shuffle() -> None:
    def fixed(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(5)[rank::ranks], workers)

    assert codes(findings(fixed)) == [("same-order-every-epoch", "warning")]
    assert findings(fixed, built=Built(seconds=0, traits=LoaderTraits(shuffles=False))) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unshuffled_order_may_repeat_in_each_epoch_without_a_warning(workers: int) -> None:
    def deal(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        mine = list(range(SAMPLES))[rank * SAMPLES // ranks : (rank + 1) * SAMPLES // ranks]
        parts = max(1, workers)
        return streamed([mine[len(mine) * part // parts :][: len(mine) // parts] for part in range(parts)])

    diagnosis = diagnose([log(job(workers=workers), deal)], alone(deal), cpus=4)
    assert [code for code, severity in codes(diagnosis) if severity != "note"] == []


@pytest.mark.parametrize(("ahead", "code"), [(0, None), (-1, "resume-repeats"), (1, "resume-skips")])
def test_a_resumed_run_that_repeats_or_skips_a_batch_is_an_error(ahead: int, code: str | None) -> None:
    whole = log(job(), sound, state_after=3)
    after = log(job(epochs=1, resume="here"), lambda *of: sound(*of)[3 + ahead :])
    diagnosis = codes(diagnose([whole], alone(sound), 4, [after]))
    assert diagnosis == ([] if code is None else [(code, "error")])


def test_a_resume_offset_that_also_skips_batches_of_the_next_epoch_is_an_error() -> None:
    whole = log(job(), sound, state_after=3)
    after = log(job(epochs=2, resume="here"), lambda *of: sound(*of)[3:])
    diagnosis = diagnose([whole], alone(sound), 4, [after])
    assert codes(diagnosis) == [("resume-skips", "error")]
    assert diagnosis[0].evidence[0].startswith("epoch 1 after a state of epoch 0")
    sane = log(job(epochs=2, resume="here"), lambda rank, epoch, *of: sound(rank, epoch, *of)[0 if epoch else 3 :])
    assert diagnose([whole], alone(sound), 4, [sane]) == ()


def test_a_run_resumed_on_another_number_of_ranks_is_sound_unless_it_skips_samples() -> None:
    def rest(rank: int, epoch: int, ranks: int, workers: int) -> Any:
        return batched(shuffled(epoch)[24:][rank::ranks], workers)

    whole = log(job(), sound, state_after=3)
    assert diagnose([whole], alone(sound), 4, [log(job(ranks=3, epochs=1, resume="here"), rest)]) == ()
    wrong = log(job(ranks=1, epochs=1, resume="here"), lambda *of: rest(*of)[1:])
    assert codes(diagnose([whole], alone(sound), 4, [wrong])) == [("resume-skips", "error")]


@pytest.mark.parametrize("indexed", [True, False])
def test_equal_random_streams_of_workers_are_an_error_with_indices_and_otherwise_a_warning(indexed: bool) -> None:
    """An error if the draws belong to samples: a stream may use them to shuffle only."""

    def streaming(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        step = by_index(samples, worker, place) if indexed else by_id(samples, worker, place)
        return replace(step, streams={"dataset.rng": f"{place}"})

    diagnosis = findings(sound, shape=streaming, built=Built(seconds=0, samples=SAMPLES))
    assert ("same-randomness-in-workers", "error" if indexed else "warning") in codes(diagnosis)


def test_workers_with_different_random_streams_have_no_findings() -> None:
    def streaming(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        return replace(by_index(samples, worker, place), streams={"rng": f"{place} {worker}"})

    assert findings(sound, shape=streaming, built=Built(seconds=0, samples=SAMPLES)) == []


def measured(steps: Sequence[int], children: dict[int, int], **changes: Any) -> RunLog:
    run = log(job(**changes), sound)
    for rank in run.ranks:
        for epoch, size in zip(rank.epochs, steps, strict=False):
            epoch.sizes += [Sizes(rank=100 << 20, children={}), Sizes(rank=size << 20, children=children)]
    return run


def test_memory_that_grows_by_epoch_or_is_copied_into_workers_is_a_warning() -> None:
    def said(*runs: RunLog) -> list[tuple[str, str]]:
        return codes(diagnose(runs, alone(sound), 4))

    grows, copied = ("memory-grows", "warning"), ("memory-copied", "warning")
    assert said(measured((300, 320, 340), {})) == [grows]
    assert said(measured((300, 302, 304), {})) == []
    assert said(measured((300, 500, 500), {})) == []
    without = measured((230,), {}, workers=0, epochs=1)
    assert said(measured((101,), {7: 135 << 20, 8: 140 << 20}), without) == [copied]
    assert said(measured((101,), {7: 20 << 20, 8: 140 << 20}), without) == []
    held = measured((101,), {7: 90 << 20})
    held.ranks[0].built = Built(seconds=0, bytes=100 << 20)
    assert said(held) == [copied]
    assert said(log(job(start_method="spawn"), sound, Built(seconds=0, pickled=100 << 20))) == [copied]


def test_slow_first_batch_starvation_and_too_many_workers_are_warnings_of_a_sound_loader() -> None:
    run = log(job(step_seconds=0.001), sound, Built(seconds=0.1, traits=LoaderTraits(workers=9)))
    first = run.ranks[0].epochs[0].steps
    first[0] = replace(first[0], waited=30.0)
    report = diagnose([run], alone(sound), cpus=4)
    assert {*codes(report)} == {(code, "warning") for code in ("slow-first-batch", "starved", "too-many-workers")}
    examination = Examination("a:b", report, (run,))
    assert (examination.verdict, examination.as_dict()["sound"]) == ("sound", True)


def test_a_file_handle_that_workers_share_since_a_fork_is_an_error() -> None:
    run = log(job(), sound)
    run.ranks[1].add(Moved(path="/data", start=0, end=80))
    assert codes(diagnose([run], alone(sound), 4)) == [("handles-before-fork", "error")]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RunFailure("raised", "in the factory", "ValueError: no"), ("factory-raises", "error")),
        (RunFailure("raised", "in epoch 0", "RuntimeError: DataLoader worker (pid 7) exited unexpectedly"),
         ("process-died", "error")),
        (RunFailure("raised", "reading the ids", "AuditError: a batch has no 'id'"), ("no-ids", "unproven")),
        (RunFailure("died", "epoch 0", "SIGKILL"), ("process-died", "error")),
        (RunFailure("hangs", "epoch 0", "nothing came for 60 s"), ("hangs", "error")),
    ],
)  # fmt: skip
def test_each_failure_of_a_rank_becomes_one_finding_and_failures_it_causes_become_none(
    failure: RunFailure, expected: tuple[str, str]
) -> None:
    rank = RankLog(0, failure=failure)
    follows = RankLog(1, failure=RunFailure("hangs", "epoch 0", "it waited for rank 0", root=False))
    assert codes(diagnose([RunLog(job(), [rank, follows])], [], 4)) == [expected]


def failed(this: Job, text: str, phase: str = "in epoch 0") -> RunLog:
    return RunLog(this, [RankLog(0, failure=RunFailure("raised", phase, text))])


def test_an_error_only_with_another_start_method_or_number_of_ranks_is_a_warning_or_unproven() -> None:
    def said(other: RunLog) -> list[tuple[str, str]]:
        return codes(diagnose([log(job(), sound), other], alone(sound), 4))

    assert said(failed(job(start_method="spawn"), "PicklingError: lambda")) == [("factory-raises", "warning")]
    later = log(job(start_method="spawn", epochs=1), sound)
    later.ranks[0].failure, later.ranks[0].done = RunFailure("raised", "in epoch 0", "ValueError: corrupt"), False
    assert said(later) == [("factory-raises", "unproven")]
    assert said(failed(job(ranks=3, workers=0), "ValueError: 2 shards")) == [("factory-raises", "unproven")]
    refused = failed(job(ranks=1, resume="here"), "StateError: 2 ranks", "loading the state")
    assert codes(diagnose([log(job(), sound)], alone(sound), 4, [refused])) == [("factory-raises", "note")]
    again = failed(job(resume="here"), "StateError", "loading the state")
    assert codes(diagnose([log(job(), sound)], alone(sound), 4, [again])) == [("factory-raises", "error")]


def test_an_epoch_without_batches_is_an_error_that_names_the_rank() -> None:
    assert codes(diagnose([log(job(), lambda *of: [])], [], 4)) == [("yields-nothing", "error")]

    def once(rank: int, epoch: int, *of: int) -> Any:
        return [] if epoch else sound(rank, epoch, *of)

    assert ("yields-nothing", "error") in severe(once)
    diagnosis = diagnose([log(job(), lambda rank, *of: [] if rank else sound(rank, *of))], alone(sound), 4)
    assert codes(diagnosis)[0] == ("yields-nothing", "error")
    assert "for rank 1" in diagnosis[0].evidence[0]


@pytest.mark.parametrize(
    ("deal", "expected"),
    [(sound, [("never-ends", "unproven")]),
     (everything, [("not-sharded-by-rank", "error"), ("never-ends", "unproven")]),
     (own_orders, [("not-sharded-by-rank", "error"), ("never-ends", "unproven")])],
)  # fmt: skip
def test_an_endless_epoch_is_unproven_but_samples_repeated_between_ranks_are_an_error(
    deal: Deal, expected: Any
) -> None:
    def cut(run: RunLog) -> RunLog:
        for rank in run.ranks:
            rank.epochs = rank.epochs[:1]
            rank.add(Event("cut"))
        return run

    diagnosis = diagnose([cut(log(job(), deal))], [cut(control) for control in alone(deal)], 4)
    assert codes(diagnosis) == expected


def test_ranks_with_datasets_of_different_sizes_are_an_error() -> None:
    run = log(job(), sound)
    for rank in run.ranks:
        rank.built = Built(seconds=0, samples=48 + rank.rank, cuts_one_dataset=True)
    assert codes(diagnose([run], alone(sound), 4)) == [("differs-between-ranks", "error")]


def test_diagnose_merges_findings_of_one_code_and_lists_errors_first() -> None:
    run, other = log(job(), uneven), log(job(start_method="spawn"), uneven)
    run.ranks[0].add(RunFailure("hangs", "epoch 0", "nothing came for 60 s"))
    diagnosis = diagnose([run, other], alone(uneven), 4)
    assert codes(diagnosis)[:2] == [("hangs", "error"), ("uneven-steps", "error")]
    assert len({finding.code for finding in diagnosis}) == len(diagnosis)
    assert {line.split(",")[1] for line in diagnosis[1].evidence} == {" 2 workers (fork)", " 2 workers (spawn)"}


def test_a_loader_whose_batches_have_no_rows_is_not_proven() -> None:
    def nothing(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        return Step(worker=worker)

    assert severe(lambda rank, epoch, ranks, workers: [([0], None)] * 12, shape=nothing) == [
        ("not-counted", "unproven")
    ]
