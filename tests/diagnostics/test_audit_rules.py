"""The rules of an audit, on figures instead of loaders."""

from typing import Any

import pytest

from rankfeed.diagnostics.audit.epochs import EpochReport, LoaderTraits, RankEpoch
from rankfeed.diagnostics.audit.rules import AuditFacts, findings_of
from rankfeed.diagnostics.findings import Finding, Verdict, merged, verdict_of

SOUND, DISEASED, NOT_PROVEN = Verdict.SOUND, Verdict.DISEASED, Verdict.NOT_PROVEN


def epoch(
    number: int = 0, samples: int = 96, unique: int = 96, missing: int | None = 0, **given: Any
) -> EpochReport:
    """Two ranks with batches of 8, if nothing else is given."""
    steps, at_end = given.pop("steps", (6, 6)), given.pop("at_end", (0, 0))
    orders = given.pop("orders", (f"{number}a", f"{number}b"))
    ranks = tuple(
        RankEpoch(rank, count, samples // 2, {8: count}, {-1: orders[rank]}, repeated_at_end=at_end[rank])
        for rank, count in enumerate(steps)
    )
    return EpochReport(number, samples, unique, missing, 0, ranks, **given)


def facts(keys: Any = "ids", expectation: Any = "declared", expected: int | None = 96, **given: Any) -> AuditFacts:
    cut = given.pop("cut", False)
    return AuditFacts(keys, expectation, expected, cut, LoaderTraits(**given))


@pytest.mark.parametrize(
    ("epochs", "known", "verdict", "code"),
    [
        ([epoch()], facts(), SOUND, None),
        ([epoch(steps=(6, 5))], facts(), DISEASED, "uneven-steps"),
        ([epoch(steps=(6, 0))], facts(keys="none"), DISEASED, "uneven-steps"),
        ([epoch(), epoch(1, 0, 0, 96, steps=(0, 0))], facts(), DISEASED, "yields-nothing"),
        # repeats
        ([epoch(samples=98, at_end=(1, 1), between_ranks=2)], facts(), SOUND, "padded-with-repeats"),
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
        (
            [epoch(unique=48, missing=48, orders=("a", "a"))],
            facts(replaces=True),
            DISEASED,
            "not-sharded-by-rank",
        ),
        # missing samples
        ([epoch(samples=95, unique=95, missing=1)], facts(), DISEASED, "missing-samples"),
        ([epoch(samples=90, unique=90, missing=6)], facts(drops=True), SOUND, "missing-samples"),
        ([epoch(samples=64, unique=64, missing=32)], facts(drops=True), DISEASED, "missing-samples"),
        (
            [epoch(n, 94, 94, 2, missing_digest=n, digest=n) for n in range(2)],
            facts(),
            SOUND,
            "missing-samples",
        ),
        ([epoch(n, 94, 94, 2, missing_digest=7) for n in range(2)], facts(), DISEASED, "missing-samples"),
        ([epoch(missing=None)], facts(expectation=None, expected=None), NOT_PROVEN, "expected-unknown"),
        (
            [epoch(n, 94, 94, 2, missing_digest=7) for n in range(2)],
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
def test_each_rule(epochs: list[EpochReport], known: AuditFacts, verdict: Verdict, code: str | None) -> None:
    found = [*findings_of(epochs, known)]
    assert verdict_of(found) == verdict, found
    assert code is None or code in {each.code for each in found}
    assert code or not found


def test_a_known_worker_order_is_compared_with_the_others_of_its_rank() -> None:
    rank = RankEpoch(0, 12, 96, {8: 12}, {-1: "a", 0: "b", 1: "b"})
    report = EpochReport(0, 96, 48, 0, 0, (rank,), between_workers=48)
    codes = {each.code for each in findings_of([report], facts("content", None, None))}
    assert "duplicated-by-workers" in codes


def test_the_verdict_follows_from_all_findings_and_one_is_kept_of_each_code() -> None:
    assert verdict_of([]) is SOUND
    assert verdict_of([Finding("no-ids", "unproven", "samples have no ids")]) is NOT_PROVEN
    twice = [Finding("hangs", "error", "it hangs", (f"rank {rank}",)) for rank in range(2)]
    assert merged(twice)[0].evidence == ("rank 0", "rank 1")
