"""Deliveries in, verdict out: the rules that audit, doctor and pytest fixture share."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.diagnostics.deliveries import EpochReport, LoaderTraits, RankEpoch, RankRecord, report_of
from rankfeed.diagnostics.findings import Finding, Verdict, merged, verdict_of
from rankfeed.diagnostics.judge import JudgedFacts, judge, judge_samples
from rankfeed.diagnostics.multiset import Keys, count

SOUND, DISEASED, NOT_PROVEN = Verdict.SOUND, Verdict.DISEASED, Verdict.NOT_PROVEN


def epoch(
    index: int = 0, samples: int = 96, unique: int = 96, missing: int | None = 0, **given: Any
) -> EpochReport:
    """Two ranks with batches of 8, if nothing else is given."""
    steps, at_end = given.pop("steps", (6, 6)), given.pop("at_end", (0, 0))
    orders = given.pop("orders", (f"{index}a", f"{index}b"))
    ranks = tuple(
        RankEpoch(rank, count, samples // 2, {8: count}, {-1: orders[rank]}, repeated_at_end=at_end[rank])
        for rank, count in enumerate(steps)
    )
    return EpochReport(index, samples, unique, missing, 0, ranks, **given)


def facts(
    keys: Any = "ids", expectation: Any = "declared", expected: int | None = 96, **given: Any
) -> JudgedFacts:
    cut = given.pop("cut", False)
    return JudgedFacts(keys, expectation, expected, cut, LoaderTraits(**given))


@pytest.mark.parametrize(
    ("epochs", "known", "verdict", "code"),
    [
        ([epoch()], facts(), SOUND, None),
        ([epoch(steps=(6, 5))], facts(), DISEASED, "uneven-steps"),
        ([epoch(steps=(6, 0))], facts(keys="none"), DISEASED, "uneven-steps"),
        ([epoch(), epoch(1, 0, 0, 96, steps=(0, 0))], facts(), DISEASED, "yields-nothing"),
        # repeats
        ([epoch(samples=98, at_end=(1, 1), between_ranks=2)], facts(), SOUND, "padded-with-repeats"),
        ([epoch(unique=95, between_ranks=1)], facts(expected=95), SOUND, "padded-with-repeats"),
        ([epoch(samples=98, at_end=(1, 0), between_ranks=2)], facts(), DISEASED, "not-sharded-by-rank"),
        ([epoch(samples=128, at_end=(16, 16), between_ranks=32)], facts(), DISEASED, "not-sharded-by-rank"),
        ([epoch(samples=192, between_ranks=96)], facts(), DISEASED, "not-sharded-by-rank"),
        ([epoch(samples=192, between_workers=96)], facts(workers=2), DISEASED, "duplicated-by-workers"),
        ([epoch(samples=97)], facts(), DISEASED, "repeated-samples"),
        ([epoch(samples=97)], facts(expectation=None, expected=None), DISEASED, "repeated-samples"),
        (
            [epoch(orders=("a", "a"), between_ranks=48, samples=96, unique=48)],
            facts(),
            DISEASED,
            "not-sharded-by-rank",
        ),
        # replacement
        ([epoch(unique=60, missing=36)], facts(replaces=True), NOT_PROVEN, "drawn-with-replacement"),
        ([epoch(unique=48, missing=48, orders=("a", "a"))], facts(replaces=True), DISEASED, "not-sharded-by-rank"),
        # missing samples
        ([epoch(samples=95, unique=95, missing=1)], facts(), DISEASED, "missing-samples"),
        ([epoch(samples=90, unique=90, missing=6)], facts(drops=True), SOUND, "missing-samples"),
        ([epoch(samples=64, unique=64, missing=32)], facts(drops=True), DISEASED, "missing-samples"),
        ([epoch(n, 94, 94, 2, missing_digest=n, digest=n) for n in range(2)], facts(), SOUND, "missing-samples"),
        ([epoch(n, 94, 94, 2, missing_digest=7) for n in range(2)], facts(), DISEASED, "missing-samples"),
        ([epoch(missing=None)], facts(expectation=None, expected=None), NOT_PROVEN, "expected-unknown"),
        (
            [epoch(n, 94, 94, 2, missing_digest=7) for n in range(2)],
            facts(expectation="epochs", expected=None),
            NOT_PROVEN,
            "missing-samples",
        ),
        (  # epochs of other samples, or whose content changes
            [epoch(n, 48, 48, 48, missing_digest=n) for n in range(2)],
            facts(expectation="epochs", expected=None),
            NOT_PROVEN,
            "missing-samples",
        ),
        ([epoch(samples=16, unique=16, missing=80)], facts(cut=True), NOT_PROVEN, "epoch-not-finished"),
        # content
        ([epoch(n, digest=5) for n in range(2)], facts(keys="content"), SOUND, "no-ids"),
        ([epoch(n, digest=n) for n in range(2)], facts(keys="content"), NOT_PROVEN, "not-counted"),
        ([epoch()], facts(keys="content"), NOT_PROVEN, "not-counted"),
        ([epoch(unique=50)], facts(keys="content"), NOT_PROVEN, "not-counted"),
        (
            [epoch(samples=192, between_ranks=96)],
            facts(keys="content", expectation=None, expected=None),
            DISEASED,
            "not-sharded-by-rank",
        ),
        (
            [epoch(unique=48, between_ranks=48, orders=("a", "a"))],
            facts(keys="content"),
            NOT_PROVEN,
            "not-counted",
        ),
        ([epoch(unique=2, orders=("a", "a"))], facts("content", None, None), NOT_PROVEN, "not-counted"),
        ([epoch(samples=192, unique=192)], facts(keys="content"), DISEASED, "repeated-samples"),
        ([epoch(samples=80, unique=80, missing=16)], facts(keys="content"), DISEASED, "missing-samples"),
        ([epoch(0, 0, 0, None)], facts("none", None, None), NOT_PROVEN, "not-counted"),
    ],
)
def test_judge_derives_a_verdict_and_a_finding_from_the_counts_of_epochs(
    epochs: list[EpochReport], known: JudgedFacts, verdict: Verdict, code: str | None
) -> None:
    findings = [*judge(epochs, known)]
    assert verdict_of(findings) == verdict, findings
    assert code is None or code in {finding.code for finding in findings}
    assert code or not findings


PLANNED = JudgedFacts("ids", "plan")


@pytest.mark.parametrize(
    ("report", "known", "verdict", "code"),
    [
        (epoch(), PLANNED, SOUND, None),
        (epoch(samples=0, unique=0, steps=(0, 0)), PLANNED, SOUND, None),
        (epoch(samples=0, unique=0, missing=96, steps=(0, 0)), PLANNED, DISEASED, "missing-samples"),
        (epoch(samples=95, unique=95, missing=1), PLANNED, DISEASED, "missing-samples"),
        (epoch(samples=48, unique=48, missing=48), PLANNED, DISEASED, "missing-samples"),
        (epoch(samples=95, unique=95, missing=1), replace(PLANNED, recorded=False), NOT_PROVEN, "missing-samples"),
        (epoch(samples=98, at_end=(1, 1), between_ranks=2), PLANNED, DISEASED, "not-sharded-by-rank"),
        (epoch(samples=98, orders=("", "")), PLANNED, DISEASED, "repeated-samples"),
        (epoch(steps=(6, 5)), PLANNED, DISEASED, "uneven-steps"),
    ],
)
def test_against_a_plan_padding_and_remainders_excuse_no_missing_or_repeated_sample(
    report: EpochReport, known: JudgedFacts, verdict: Verdict, code: str | None
) -> None:
    """Where a plan says what is delivered, neither padding nor a remainder explains a difference."""
    findings = [*judge([report], known)]
    assert verdict_of(findings) == verdict, findings
    assert {finding.code for finding in findings} == ({code} if code else set())


def test_two_workers_of_a_rank_with_the_same_order_are_reported_as_duplicates() -> None:
    rank = RankEpoch(0, 12, 96, {8: 12}, {-1: "a", 0: "b", 1: "b"})
    report = EpochReport(0, 96, 48, 0, 0, (rank,), between_workers=48)
    codes = {finding.code for finding in judge([report], facts("content", None, None))}
    assert "duplicated-by-workers" in codes


@pytest.mark.parametrize("indexed", [True, False])
def test_equal_random_states_of_workers_of_ranks_and_of_epochs_are_reported(indexed: bool) -> None:
    reports = [
        EpochReport(
            index,
            4,
            4,
            0,
            0,
            tuple(
                RankEpoch(
                    rank, 2, 2, {1: 2}, {-1: f"{index} {rank}"}, True, ((0, "numpy", "a"), (1, "numpy", "a"))
                )
                for rank in range(2)
            ),
        )
        for index in range(2)
    ]
    drawn = [
        finding
        for finding in judge(reports, facts(indexed=indexed))
        if finding.code == "same-randomness-in-workers"
    ]
    assert {finding.evidence[0].split()[0]: finding.severity for finding in drawn} == {
        "workers": "error" if indexed else "warning",
        "ranks": "warning",
        "epochs": "warning",
    }


def test_verdict_of_takes_the_worst_finding_and_merged_joins_findings_of_one_code() -> None:
    assert verdict_of([]) is SOUND
    assert verdict_of([Finding("no-ids", "unproven", "samples have no ids")]) is NOT_PROVEN
    twice = [Finding("hangs", "error", "it hangs", (f"rank {rank}",)) for rank in range(2)]
    assert merged(twice)[0].evidence == ("rank 0", "rank 1")


N = 96
EVERYTHING = [*range(N)]
#: Samples that a rank receives in an epoch, or its batches of samples.
Order = Sequence[int] | Sequence[Sequence[int]]


def delivered(index: int, orders: Sequence[Order], expected: Counter[int], batch: int) -> EpochReport:
    """The figures of an epoch."""
    figures, deliveries, logs = [], [], []
    for rank, order in enumerate(orders):
        record = RankRecord()
        flat = [*order]
        batches: Any = [flat[start : start + batch] for start in range(0, len(flat), batch)]
        for keys in flat if flat and not isinstance(flat[0], int) else batches:
            record.add(np.array(keys, np.int64))
        keys = np.array(
            [key for part in order for key in (part if not isinstance(part, int) else [part])], np.int64
        )
        deliveries.append(Keys(keys, np.arange(len(keys))))
        figures.append(record.figures(rank, in_order=True))
        logs.append(record.steps)
    keys, times = (
        np.array(sorted(expected), np.int64),
        np.array([expected[key] for key in sorted(expected)], np.int64),
    )
    return report_of(index, count(deliveries, logs, keys, times), figures, logs)


def said(
    *epochs: Sequence[Order],
    control: int | Sequence[int] = N,
    batch: int = 4,
    exact: bool = True,
    allowed: tuple[str, ...] = (),
    workers: int = 2,
    **traits: Any,
) -> list[tuple[str, str]]:
    """Codes and severities of epochs that are compared with a control."""
    expected = Counter(range(control) if isinstance(control, int) else control)
    reports = [delivered(index, orders, expected, batch) for index, orders in enumerate(epochs)]
    facts = JudgedFacts("ids", "control", exact=exact, allowed=allowed, traits=LoaderTraits(workers, **traits))
    return [(finding.code, finding.severity) for finding in merged(judge_samples(reports, facts))]


def shares(ids: Sequence[int], ranks: int = 2) -> list[list[int]]:
    return [[*ids[rank::ranks]] for rank in range(ranks)]


RESAMPLED = [random.Random(rank).choices(EVERYTHING, k=N // 2) for rank in range(2)]
UNSHARDED, BY_WORKERS = ("not-sharded-by-rank", "error"), ("duplicated-by-workers", "error")
TWICE, MISSING, DROPPED = ("sharded-twice", "error"), ("missing-samples", "error"), ("missing-samples", "note")
PADDED, DRAWN = ("padded-with-repeats", "note"), ("drawn-with-replacement", "unproven")
BATCHES = [EVERYTHING[start : start + 4] for start in range(0, N, 4)]

#: What the ranks receive in each epoch, what else is known, and what must be found.
TABLE: dict[str, tuple[Sequence[Sequence[Order]], dict[str, Any], list[tuple[str, str]]]] = {
    "each sample once": ([shares(EVERYTHING)], {}, []),
    "labels only, equal counts": ([shares(EVERYTHING)], {"exact": False}, [("not-counted", "unproven")]),
    "padding": ([[EVERYTHING[::2], [*EVERYTHING[1::2][:-1], 0]]], {"control": 95}, [PADDED]),
    "padding in the middle": ([[EVERYTHING[::2], [1, 3, 5, 0, *EVERYTHING[7::2]]]], {"control": 95}, [UNSHARDED]),
    "a whole batch again": ([[BATCHES[:11], [*BATCHES[11:], BATCHES[0]]]], {}, [PADDED]),
    "extra samples on one rank": ([[EVERYTHING[::2], [*EVERYTHING[1::2], 0, 2, 4]]], {}, [UNSHARDED]),
    "the first sample of the next rank": ([[EVERYTHING[:49], EVERYTHING[48:]]], {}, [UNSHARDED]),
    "all on all ranks": ([[EVERYTHING] * 2], {}, [UNSHARDED]),
    "all on all ranks, tiny": ([[[0, 1, 2, 3]] * 2], {"control": 4}, [UNSHARDED]),
    "all on all ranks, labels only": ([[EVERYTHING] * 2], {"exact": False}, [UNSHARDED]),
    "the same half on both ranks": ([[EVERYTHING[::2]] * 2], {}, [UNSHARDED]),
    "each worker repeats": ([[EVERYTHING[rank::2] * 2 for rank in range(2)]], {}, [BY_WORKERS]),
    "a rank repeats": ([[EVERYTHING[rank::2] * 2 for rank in range(2)]], {"workers": 0},
                       [("repeated-samples", "error")]),
    "ranks and workers repeat": ([[EVERYTHING * 2] * 2], {}, [BY_WORKERS, UNSHARDED]),
    "sharded twice by ranks": ([shares(EVERYTHING[::2])], {"workers": 0}, [TWICE]),
    "sharded twice by both": ([shares(EVERYTHING[::4])], {}, [TWICE]),
    "a third missing": ([shares([sample for sample in EVERYTHING if sample % 3])], {}, [MISSING]),
    "remainder, declared": ([shares(EVERYTHING[:90])], {"drops": True}, [DROPPED]),
    "remainder, declared, the same in each epoch": ([shares(EVERYTHING[:90])] * 2, {"drops": True}, [DROPPED]),
    "remainder, another in each epoch": ([shares(EVERYTHING[:84]), shares(EVERYTHING[12:])], {}, [DROPPED]),
    "remainder, the same in each epoch, less than a global batch": ([shares(EVERYTHING[:90])] * 2, {}, [DROPPED]),
    "remainder, the same in each epoch, of each worker": ([shares(EVERYTHING[:84])] * 2, {}, [MISSING]),
    "padded by the sampler, last batch dropped": ([[EVERYTHING[:44:2], [*EVERYTHING[1:42:2], 0]]],
                                                  {"control": 44, "drops": True}, [DROPPED, PADDED]),
    "a repeat for a missing sample": ([[EVERYTHING[:44:2], [*EVERYTHING[1:42:2], 0]]], {"control": 44},
                                      [UNSHARDED]),
    "with replacement, declared": ([RESAMPLED], {"replaces": True}, [DRAWN]),
    "with replacement, allowed": ([RESAMPLED], {"replaces": True, "allowed": ("replacement",)},
                                  [("drawn-with-replacement", "note")]),
    "one rank draws what the control does": ([RESAMPLED], {"replaces": True, "control": RESAMPLED[0]}, [DRAWN]),
    "equal samples, all on all ranks": ([[[sample // 2 for sample in EVERYTHING]] * 2],
                                        {"replaces": True, "control": [sample // 2 for sample in EVERYTHING]},
                                        [UNSHARDED]),
    "the same draws": ([[RESAMPLED[0]] * 2], {"replaces": True}, [UNSHARDED]),
    "the same draws, allowed": ([[RESAMPLED[0]] * 2], {"replaces": True, "allowed": ("replacement",)},
                                [UNSHARDED]),
    "two different orders, each cut": ([[random.Random(rank).sample(EVERYTHING, N // 2) for rank in range(2)]], {},
                                       [UNSHARDED]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_judge_samples_gives_the_expected_findings_for_epochs_compared_with_a_control(name: str) -> None:
    epochs, options, expected = TABLE[name]
    assert sorted(said(*epochs, **options)) == sorted(expected)


@given(st.permutations(range(40)), st.integers(1, 5), st.integers(0, 3), st.integers(1, 9))
def test_any_partition_of_the_samples_over_ranks_has_no_findings(
    order: list[int], ranks: int, workers: int, batch: int
) -> None:
    assert said(shares(order, ranks), control=40, workers=workers, batch=batch) == []


@given(st.integers(2, 200), st.integers(2, 5), st.integers(1, 9), st.integers(0, 3))
def test_ranks_that_each_read_all_samples_are_always_reported_as_not_sharded(
    size: int, ranks: int, batch: int, workers: int
) -> None:
    assert UNSHARDED in said([range(size)] * ranks, control=size, workers=workers, batch=batch)


@given(st.integers(1, 300), st.integers(2, 6), st.integers(1, 8))
def test_padding_by_a_distributed_sampler_is_only_a_note_unless_it_is_half_of_the_dataset(
    size: int, ranks: int, batch: int
) -> None:
    share = -(-size // ranks)
    padded = [position % size for position in range(share * ranks)]
    findings = said(shares(padded, ranks), control=size, workers=0, batch=batch)
    assert all(severity == "note" for _, severity in findings) or 2 * (share * ranks - size) >= size


@given(st.integers(1, 100), st.lists(st.lists(st.integers(0, 120), max_size=150), min_size=2, max_size=4))
def test_epochs_without_errors_miss_or_repeat_at_most_a_global_batch_of_samples(
    size: int, orders: list[list[int]]
) -> None:
    """Whatever is delivered in each of two epochs: without an error at most a global batch is too many or few."""
    findings = said(orders, orders, control=size)
    counts = Counter(key for order in orders for key in order)
    excess = (counts - Counter(range(size)) - Counter(set(counts) - {*range(size)})).total()
    if all(severity == "note" for _, severity in findings):
        assert (Counter(range(size)) - counts).total() <= len(orders) * 4
        assert excess < len(orders) * 4
