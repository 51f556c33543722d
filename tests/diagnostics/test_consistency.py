"""Whether a dataset index means the same sample on all ranks, whatever random numbers are in the batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.diagnostics.test_diagnosis import Deal, alone, batched, codes, job, log, padded, shuffled, sound

from rankfeed.diagnostics.doctor.consistency import renumbered
from rankfeed.diagnostics.doctor.diagnosis import diagnose
from rankfeed.diagnostics.doctor.records import Built, Step
from rankfeed.diagnostics.findings import Finding
from rankfeed.diagnostics.keys import hashes

SAMPLES = 96
#: Run, rank, epoch, worker (None: no workers), and number of rows that the worker read before in this epoch.
Place = tuple[int, int, int, int | None, int]
#: The fields of a sample, by its index and where it is read.
Fields = Callable[[int, Place], dict[str, object]]


def number(*of: object) -> int:
    return hash(of) & (1 << 60) - 1


def restarts(place: Place) -> int:
    """Number of draws before from a generator that each worker inherits; without workers it continues."""
    epoch, worker, before = place[2:]
    return before if worker is not None else epoch * 1000 + before


def split(seed: object, index: int) -> int:
    return shuffled(seed, SAMPLES + 24)[index]


#: Random numbers in a batch, in one dataset.
SOUND: dict[str, Fields] = {
    "drawn by the global generator": lambda i, at: {"x": number(i, at)},
    "noise alone, drawn by the global generator": lambda i, at: {"t": number(at)},
    "a generator of the dataset with a fixed seed": lambda i, at: {"t": number(restarts(at))},
    "a generator of a fixed seed for flags": lambda i, at: {"x": i, "flip": number(restarts(at)) % 2},
    "a generator of each worker, seeded by its number": lambda i, at: {"t": number(at[3] or 0, at[4])},
    "a generator seeded by the epoch": lambda i, at: {"t": number(at[2], at[4])},
    "a generator seeded by epoch and sample": lambda i, at: {"x": number(at[2], i), "t": number(at[2], i, 1)},
    "a generator seeded by rank and sample": lambda i, at: {"flip": number(i, at[1]) % 2, "y": i % 7},
    "a generator seeded by the sum of rank and sample": lambda i, at: {"x": number(i), "t": number(i + at[1])},
    "crops of different shapes": lambda i, at: {"x": number(i, at) if at[4] % 3 else number(i)},
    "another sample as a negative, chosen at the start": lambda i, at: {"x": i, "negative": split(at[:2], i)},
    "the number of the rank and of the worker": lambda i, at: {"x": i, "rank": at[1], "worker": number(at[3])},
    "a counter of rows": lambda i, at: {"x": i, "row": number(at[4])},
}  # fmt: skip

#: An index is another sample on each rank; the seed of the order of the samples.
SEEDS: dict[str, Callable[[Place], object]] = {"unseeded": lambda at: at[:2], "seeded by rank": lambda at: at[1]}
DISEASED: dict[str, Callable[[int, int, Place], dict[str, object]]] = {
    "content": lambda sample, i, at: {"x": number(sample)},
    "content and label": lambda sample, i, at: {"x": number(sample), "y": sample % 10},
    "content and its index": lambda sample, i, at: {"x": number(sample), "index": i},
    "content and noise": lambda sample, i, at: {"x": number(sample), "t": number(restarts(at))},
    "augmented content and label": lambda sample, i, at: {"x": number(sample, at), "y": sample % 10},
    "augmented content, label, and index": lambda sample, i, at: {"x": number(at), "y": sample % 10, "index": i},
    "augmented content and two classes": lambda sample, i, at: {"x": number(sample, at), "y": sample % 2},
}


def in_order(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    """A DistributedSampler that does not shuffle: 95 samples, padded."""
    return batched([*range(95), *range(-95 % ranks)][rank::ranks], workers)


def examined(fields: Fields, deal: Deal, epochs: int) -> Sequence[Finding]:
    read: Counter[object] = Counter()

    def shape(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        rows = []
        for index in samples:
            rows.append(fields(index, (*place, worker, read[place, worker])))
            read[place, worker] += 1
        columns = {name: [number(row[name]) for row in rows] for name in rows[0]}
        if "index" in columns:
            columns["index"] = hashes([row["index"] for row in rows]) or []
        return Step(rows=len(samples), indices=[*samples], fields=columns, worker=worker)

    size = 95 if deal in (padded, in_order) else SAMPLES
    built = Built(seconds=0, samples=size, cuts_one_dataset=True)
    options: dict[str, Any] = {"built": built, "shape": shape}
    jobs = [job(epochs=epochs), job(ranks=3, workers=0, epochs=min(2, epochs))]
    runs = [log(run, deal, number=index, **options) for index, run in enumerate(jobs)]
    controls = alone(deal, **options)
    for control in controls:
        control.ranks[0].epochs = control.ranks[0].epochs[:epochs]
    return diagnose(runs, controls, cpus=4)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("deal", [sound, padded, in_order])
@pytest.mark.parametrize("name", SOUND)
def test_random_augmentation_is_not_diagnosed_as_datasets_that_differ_between_ranks(
    name: str, deal: Deal, epochs: int
) -> None:
    findings = examined(SOUND[name], deal, epochs)
    assert codes(findings, notes=False) == [], "\n".join(map(str, findings))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", DISEASED)
def test_an_index_that_means_another_sample_on_each_rank_is_diagnosed_as_an_error(name: str, seed: str) -> None:
    def fields(index: int, at: Place) -> dict[str, object]:
        return DISEASED[name](split(SEEDS[seed](at), index), index, at)

    for deal in (sound, padded):
        assert codes(examined(fields, deal, 3))[0] == ("differs-between-ranks", "error")
    if "augmented" not in name:
        for deal in (sound, padded, in_order):
            findings = codes(examined(fields, deal, 1), notes=False)
            assert findings
            assert findings[0][1] == "error"


def test_content_that_depends_on_the_rank_is_unproven_unless_labels_identify_samples() -> None:
    """A cache with too short a key is unproven; noise seeded by rank and sample, beside a label, is sound."""

    def cached(index: int, at: Place) -> dict[str, object]:
        return {"x": number(index % 12, at[1], at[3])}

    def with_label(index: int, at: Place) -> dict[str, object]:
        return {"x": number(index, at[1]), "y": index % 7}

    assert codes(examined(cached, sound, 3), notes=False) == [("differs-between-ranks", "unproven")]
    assert codes(examined(with_label, sound, 3), notes=False) == []


@pytest.mark.parametrize("deal", [sound, padded])
@pytest.mark.parametrize("seed", ["same", *SEEDS])
def test_padding_to_the_longest_text_of_a_batch_neither_hides_nor_fakes_datasets_that_differ_by_rank(
    deal: Deal, seed: str
) -> None:
    """The padding element is 5; other ranks have the same text with another padding."""

    def shape(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        order = shuffled(SEEDS[seed]((*place, 0, 0)) if seed != "same" else 0)
        texts = [order[index] for index in samples]
        pads = [max(texts) - text for text in texts]
        rows = [number(text, pad) for text, pad in zip(texts, pads, strict=True)]
        ends = [(5 if pad else -text, number(text), max(pad, 1)) for text, pad in zip(texts, pads, strict=True)]
        rows = [row if pad else number(text) for row, pad, text in zip(rows, pads, texts, strict=True)]
        return Step(rows=len(samples), indices=[*samples], fields={"x": rows}, ends={"x": ends}, worker=worker)

    options: dict[str, Any] = {"built": Built(seconds=0, samples=SAMPLES, cuts_one_dataset=True), "shape": shape}
    findings = diagnose([log(job(), deal, **options)], alone(deal, **options), cpus=4)
    assert (codes(findings)[:1] == [("differs-between-ranks", "error")]) is (seed != "same")


@pytest.mark.parametrize("deal", [padded, in_order])
@pytest.mark.parametrize("same", [True, False])
def test_a_dataset_shuffled_before_each_epoch_is_sound_only_if_all_ranks_share_the_seed(
    deal: Deal, same: bool
) -> None:
    """With a seed that all ranks share it is sound; otherwise samples repeat, although indices do not."""

    def fields(index: int, at: Place) -> dict[str, object]:
        return {"x": shuffled(at[2] if same else at[1:3], 95)[index]}

    findings = codes(examined(fields, deal, 3), notes=False)
    assert {severity for _, severity in findings} == (set() if same else {"error"})


def test_subsets_that_differ_between_ranks_are_an_error_even_if_content_is_random() -> None:
    def subset(rank: int) -> Built:
        return Built(seconds=0, samples=SAMPLES, subset=f"digest {rank}", cuts_one_dataset=True)

    def augmented(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        return Step(rows=len(samples), indices=[*samples], fields={"x": [number(key, place) for key in samples]})

    run = log(job(epochs=1), sound, shape=augmented)
    for rank in run.ranks:
        rank.built = subset(rank.rank)
    findings = diagnose([run], alone(sound, shape=augmented, built=subset(0)), cpus=4)
    assert ("differs-between-ranks", "error") in codes(findings)
    for rank in run.ranks:
        rank.built = subset(0)
    assert codes(diagnose([run], alone(sound, shape=augmented, built=subset(0)), cpus=4), notes=False) == []


def in_a_set(at: Place) -> list[int]:
    """The numbers of 12 classes in the process of a place."""
    return shuffled(at[:2], 12)


RENUMBERED: dict[str, Fields] = {
    "in the order of a set": lambda i, at: {"x": i, "y": in_a_set(at)[i % 12]},
    "in the order of a set, with noise": lambda i, at: {"x": number(i, at), "y": in_a_set(at)[i % 12]},
}
NOT_RENUMBERED: dict[str, Fields] = {
    "in sorted order": lambda i, at: {"x": i, "y": i % 12},
    "drawn by each rank at the start": lambda i, at: {"x": i, "y": split(at[:2], i) % 12},
    "a factor of each class, drawn by each rank": lambda i, at: {"x": i, "t": number(at[:2], i % 12)},
    "the step of a share": lambda i, at: {"x": i, "step": i % (SAMPLES // {0: 2, 1: 3}.get(at[0], 1)) // 4},
}


def in_contiguous_shares(rank: int, epoch: int, ranks: int, workers: int) -> Any:
    return batched(range(SAMPLES)[rank * SAMPLES // ranks : (rank + 1) * SAMPLES // ranks], workers)


@pytest.mark.parametrize("name", [*RENUMBERED, *NOT_RENUMBERED])
@pytest.mark.parametrize("with_ids", [True, False])
def test_class_numbers_that_differ_between_processes_are_an_error_and_random_fields_are_not(
    name: str, with_ids: bool
) -> None:
    fields = (RENUMBERED | NOT_RENUMBERED)[name]

    def shape(samples: list[int], worker: int | None, place: tuple[int, int, int]) -> Step:
        rows = [fields(index, (*place, worker, row)) for row, index in enumerate(samples)]
        columns = {key: [number(row[key]) for row in rows] for key in rows[0]}
        keys = {"ids" if with_ids else "indices": [*samples]}
        return Step(rows=len(samples), fields=columns, worker=worker, **keys)  # type: ignore[arg-type]

    deal = in_contiguous_shares if name.startswith("the step") else sound
    runs = [log(job(), deal, shape=shape), log(job(ranks=3, workers=0, epochs=2), deal, shape=shape, number=1)]
    texts = [*renumbered([*alone(deal, shape=shape), *runs])]
    assert bool(texts) is (name in RENUMBERED), texts
    if texts:
        assert ("differs-between-ranks", "error") in codes(diagnose(runs, alone(sound, shape=shape), cpus=4))
