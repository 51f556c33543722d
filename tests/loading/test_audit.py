"""The audit proves an epoch, or says how many samples are missing and repeated, and which."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from tests.loading.feeds import ENGINES, NAMES, feed, steps_of, take

import rankfeed as rf
from rankfeed.errors import AuditError
from rankfeed.loading import EpochAudit, Loader
from rankfeed.plan import InvertibleBloomTable, Plan, Schedule
from rankfeed.topology import Topology


def report(rank: int = 0, world_size: int = 1, state: Any = None, **options: Any) -> EpochAudit:
    """What a rank of a real loader reports, brought here as a caller would: by pickle."""
    loader = feed(rank, world_size, audit=True, **options)
    if state is not None:
        loader.load_state_dict(state)
    list(loader)
    assert loader.audit_report is not None
    return pickle.loads(pickle.dumps(loader.audit_report))  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_an_epoch_of_one_process_is_checked_when_it_ends(engine: dict[str, Any]) -> None:
    loader = feed(audit=True, **engine)
    assert loader.audit_report is None
    for epoch in range(2):
        list(loader)
        found = loader.audit_report
        assert found is not None
        assert (found.epoch, found.delivered.count, found.steps) == (epoch, 50, (13,))
        assert "0 missing, 0 repeated" in str(found)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_reports_of_all_ranks_together_prove_the_epoch(world_size: int, tail: str, shuffle: str) -> None:
    parts = [report(rank, world_size, tail=tail, shuffle=shuffle) for rank in range(world_size)]
    together = EpochAudit.merge(parts)
    together.check()
    assert together.complete
    assert not together.difference()
    assert together.delivered.count == (50 // (4 * world_size) * 4 * world_size if tail == "drop" else 50)
    # In any order, and in several goes.
    EpochAudit.merge([EpochAudit.merge(parts[1:]), parts[0]]).check()


def test_two_processes_that_both_claim_rank_0_are_found() -> None:
    with pytest.raises(AuditError, match=r"(?s)25 samples missing.*ranks \[0\], none from \[1\]") as caught:
        EpochAudit.merge([report(0, 2, size=50, batch_size=5), report(0, 2, size=50, batch_size=5)]).check()
    assert "give every process its own rank" in str(caught.value)


def test_processes_that_all_claim_to_be_alone_are_found() -> None:
    with pytest.raises(AuditError, match="different parts of the data"):
        EpochAudit.merge([report(0, 1), report(1, 2)])


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(AuditError, match=r"none from \[2\]"):
        EpochAudit.merge([report(rank, 4) for rank in (0, 1, 3)]).check()


def test_peers_of_one_rank_count_once_and_must_agree() -> None:
    peers = [report(rank, 2) for rank in (0, 1, 0, 1)]
    together = EpochAudit.merge(peers)
    together.check()
    assert together.delivered.count == 50
    with pytest.raises(AuditError, match="processes of one rank delivered different samples"):
        EpochAudit.merge([report(0, 2), report(0, 2, seed=9), report(1, 2)])


def test_nothing_to_merge_is_an_error_too() -> None:
    with pytest.raises(AuditError, match="no reports"):
        EpochAudit.merge([])


def counted(delivered: list[int], size: int = 1000) -> EpochAudit:
    schedule = Schedule(Plan(size), batch_size=10, topology=Topology())
    tally = InvertibleBloomTable()
    tally.add(np.array(delivered))
    return EpochAudit.of_rank(schedule, tally)


@pytest.mark.parametrize("lost", [1, 3, 60])
@pytest.mark.parametrize("repeated", [0, 2, 50])
def test_the_error_says_how_many_are_missing_and_repeated_and_which(lost: int, repeated: int) -> None:
    ids = [*range(lost, 1000), *range(500, 500 + repeated)]
    with pytest.raises(AuditError, match=rf"{lost} samples missing, {repeated} repeated") as caught:
        counted(ids).check()
    assert "sample 0 -1" in str(caught.value)
    assert "least" not in str(caught.value)


def test_a_sample_delivered_instead_of_another_is_found() -> None:
    with pytest.raises(AuditError, match=r"(?s)1 samples missing, 1 repeated.*sample 7 -1; sample 8 \+1"):
        counted([8 if each == 7 else each for each in range(1000)]).check()


def test_more_missing_than_can_be_named_is_still_counted_at_least() -> None:
    with pytest.raises(AuditError, match="at least 900 samples missing, at least 0 repeated"):
        counted(list(range(100))).check()


def test_ranks_that_took_different_numbers_of_steps_are_found() -> None:
    parts = [report(0, 2), report(1, 2)]
    uneven = EpochAudit(**{**vars(parts[1]), "steps": (parts[1].steps[0] + 1,)})
    with pytest.raises(AuditError, match="different numbers of steps"):
        EpochAudit.merge([parts[0], uneven]).check()


@pytest.mark.parametrize("new", [1, 2, 3])
def test_a_resumed_epoch_is_checked_from_where_it_was_taken_up(new: int) -> None:
    donor = [feed(rank, 2) for rank in range(2)]
    steps_of(donor, 3)
    together = EpochAudit.merge([report(rank, new, donor[0].state_dict()) for rank in range(new)])
    together.check()
    assert (together.start, together.end, together.delivered.count) == (24, 50, 26)


def test_the_very_end_of_an_epoch_is_a_proof_of_nothing_and_no_error() -> None:
    donor = feed()
    take(iter(donor), len(donor))
    report(0, 1, donor.state_dict()).check()


def test_an_epoch_left_early_is_not_reported() -> None:
    loader = feed(audit=True)
    take(iter(loader), 3)
    assert loader.audit_report is None
    list(loader)
    assert loader.audit_report is not None


def test_a_rank_alone_of_several_reports_without_judging() -> None:
    loader = feed(1, 2, audit=True)
    list(loader)
    assert isinstance(loader.audit_report, EpochAudit)
    assert not loader.audit_report.complete


def test_a_loader_that_delivers_too_little_fails_its_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Schedule.batch
    monkeypatch.setattr(Schedule, "batch", lambda self, step: batch(self, 0 if step == 2 else step))
    loader: Loader = feed(audit=True)
    with pytest.raises(AuditError, match="4 samples missing, 4 repeated"):
        list(loader)


def test_a_report_is_of_one_size_whatever_it_counted() -> None:
    sizes = {len(pickle.dumps(counted(list(range(size)), size))) for size in (1000, 100_000)}
    assert max(sizes) < 64 * 1024
    assert max(sizes) - min(sizes) < 64


def test_processes_that_each_take_themselves_for_the_only_rank_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    loader = rf.Loader(rf.from_dataset([{"x": 1}] * 4), 2, topology=rf.Topology(), audit=True)
    with pytest.raises(rf.errors.AuditError, match="is the only rank by its topology"):
        list(loader)
    peers = rf.Topology(launcher="mesh")  # the only data-parallel rank, with tensor-parallel peers
    assert len(list(rf.Loader(rf.from_dataset([{"x": 1}] * 4), 2, topology=peers, audit=True))) == 2
