"""The audit proves an epoch, or says how many samples are missing and repeated, and which."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tests.loading.feeds import ENGINES, NAMES, feed, steps_of, take

import rankfeed as rf
from rankfeed.errors import AuditError
from rankfeed.loading.audit import EpochAudit
from rankfeed.loading.batch_builder import BatchBuilder
from rankfeed.plan import Plan, Schedule
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
        assert (found.epoch, len(found.delivered), found.steps) == (epoch, 50, (13,))
        assert "0 missing, 0 repeated" in str(found)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_reports_of_all_ranks_together_prove_the_epoch(world_size: int, tail: str, shuffle: str) -> None:
    parts = [report(rank, world_size, tail=tail, shuffle=shuffle) for rank in range(world_size)]
    together = EpochAudit.merge(parts)
    together.check()
    assert together.complete
    assert (together.missing, together.repeated) == (0, 0)
    assert len(together.delivered) == (50 // (4 * world_size) * 4 * world_size if tail == "drop" else 50)
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
    assert len(together.delivered) == 50
    with pytest.raises(AuditError, match="processes of one rank delivered different samples"):
        EpochAudit.merge([report(0, 2), report(0, 2, batch_size=5), report(1, 2)])


def test_nothing_to_merge_is_an_error_too() -> None:
    with pytest.raises(AuditError, match="no reports"):
        EpochAudit.merge([])


def test_ranks_with_different_orders_are_found() -> None:
    with pytest.raises(AuditError, match=r"(?s)different parts of the data.*plan"):
        EpochAudit.merge([report(0, 2), report(1, 2, seed=9)])


def counted(*intervals: tuple[int, int], size: int = 1000) -> EpochAudit:
    found = EpochAudit.of_rank(Schedule(Plan(size), batch_size=10, topology=Topology()), "plan")
    for low, high in intervals:
        found.delivered.add(low, high)
    return found


@pytest.mark.parametrize("lost", [1, 3, 60])
@pytest.mark.parametrize("repeated", [0, 2, 50])
def test_the_error_names_how_many_and_which_positions_are_missing_and_repeated(lost: int, repeated: int) -> None:
    with pytest.raises(AuditError, match=rf"{lost} samples missing, {repeated} repeated") as caught:
        counted((lost, 1000), (500, 500 + repeated)).check()
    assert f"positions 0 to {lost} missing" in str(caught.value)
    assert not repeated or f"positions 500 to {500 + repeated} repeated" in str(caught.value)


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
    assert (together.start, together.end, len(together.delivered)) == (24, 50, 26)


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


def test_a_batch_of_another_step_fails_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    build_step = BatchBuilder.build_step

    def wrong(self: BatchBuilder, schedule: Schedule, step: int, *copies: Any) -> Any:
        return build_step(self, schedule, 0 if step == 2 else step, *copies)._replace(step=step)

    monkeypatch.setattr(BatchBuilder, "build_step", wrong)
    with pytest.raises(AuditError, match=r"(?s)other samples than the plan.*rank 0, epoch 0, step 2"):
        list(feed(audit=True))


def test_a_report_is_small_whatever_it_counted() -> None:
    assert max(len(pickle.dumps(report(size=size, batch_size=1))) for size in (10, 5000)) < 2048


def test_processes_that_each_take_themselves_for_the_only_rank_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    loader = rf.Loader(rf.from_dataset([{"x": 1}] * 4), 2, topology=rf.Topology(), audit=True)
    with pytest.raises(rf.errors.AuditError, match="has world size 1"):
        list(loader)
    peers = rf.Topology(launcher="mesh")  # the only data-parallel rank, with tensor-parallel peers
    assert len(list(rf.Loader(rf.from_dataset([{"x": 1}] * 4), 2, topology=peers, audit=True))) == 2
