"""Audit, doctor, pytest fixture and verify come to one verdict on a loader, as far as they can see its fault."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnostics.jobs import judged
from tests.diagnostics.ledger_jobs import Job as LedgerJob
from tests.support import jobs

import rankfeed as rf
from rankfeed.diagnostics import verify_plan, verify_run
from rankfeed.diagnostics.doctor.diagnosis import diagnose
from rankfeed.diagnostics.doctor.rank import LoaderReader, read
from rankfeed.diagnostics.doctor.records import Job, RankLog, RunLog
from rankfeed.diagnostics.findings import Verdict, verdict_of
from rankfeed.integrations.pytest_plugin import Rankfeed

FILE = Path(judged.__file__)
SOUND, DISEASED, NOT_PROVEN = Verdict.SOUND, Verdict.DISEASED, Verdict.NOT_PROVEN
VERDICTS = {
    "sound": SOUND,
    "unsharded": DISEASED,
    "other_order": DISEASED,
    "a_sample_twice": DISEASED,
    "a_quarter_lacks": DISEASED,
    "uneven": DISEASED,
    "remainder_dropped_as_declared": SOUND,
    "with_replacement": NOT_PROVEN,
    "dropping_workers": DISEASED,
    "plan": SOUND,
    "plan_of_windows": SOUND,
    "plan_that_repeats": DISEASED,
    "run_resumed": SOUND,
    "run_with_a_gap": DISEASED,
    "run_of_a_short_rank": DISEASED,
}


def test_the_table_of_expected_verdicts_lists_every_example_loader() -> None:
    assert list(VERDICTS) == list(judged.FACTORIES)


@pytest.mark.timeout(200)
def test_an_audit_on_two_ranks_gives_each_example_loader_its_expected_verdict(tmp_path: Path) -> None:
    jobs.run(jobs.torchrun(2, FILE, tmp_path / "verdicts.json"), tmp_path / "log", 150)
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    assert {name: verdict for name, (verdict, _) in verdicts.items()} == VERDICTS, verdicts


def run_here(job: Job, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    """The ranks of a run one after the other, in this process."""
    logs = []
    for rank in range(job.ranks):
        monkeypatch.setitem(os.environ, "RANK", str(rank))
        monkeypatch.setitem(os.environ, "WORLD_SIZE", str(job.ranks))
        logs.append(RankLog(rank))
        read(job, rank, logs[-1].add)
    return RunLog(job, logs)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", VERDICTS)
def test_the_doctor_gives_each_example_loader_its_expected_verdict(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoaderReader, "init_group", lambda self: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    workers = 2 if name == "dropping_workers" else 0
    job = Job("2 ranks", f"{FILE}:{name}", ranks=2, workers=workers, start_method="fork", epochs=2)
    controls = [replace(job, name=f"control {index}", ranks=1, workers=0) for index in (1, 2)]
    logs = [run_here(run, monkeypatch) for run in (job, *controls)]
    findings = diagnose(logs[:1], logs[1:], cpus=4, universe=judged.SAMPLES)
    assert verdict_of(findings) == VERDICTS[name], findings


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("sound", "a_sample_twice") else pytest.mark.slow)
        for name in VERDICTS
    ],
)
def test_the_pytest_fixture_passes_or_fails_each_example_loader_by_its_expected_verdict(name: str) -> None:
    workers = 2 if name == "dropping_workers" else 0
    options = {"epochs": 2, "start_methods": ["fork"], "other_ranks": 1, "universe": judged.SAMPLES}
    factory, expected = f"{FILE}:{name}", VERDICTS[name]
    allow = {SOUND: (), NOT_PROVEN: ("not proven",), DISEASED: ()}[expected]
    if expected is not DISEASED:
        examination = Rankfeed().assert_exactly_once(factory, workers=workers, allow=allow, **options)
        assert examination.verdict == expected
        return
    with pytest.raises(AssertionError, match=r"diseased\. Run: 2 ranks"):
        Rankfeed().assert_exactly_once(factory, workers=workers, allow=["not proven"], **options)


@pytest.mark.parametrize("name", judged.PLANS)
def test_verify_plan_gives_each_example_plan_its_expected_verdict(name: str) -> None:
    assert verify_plan(judged.PLANS[name], ranks=2, batch_size=judged.BATCH).verdict == VERDICTS[name]


@pytest.mark.parametrize("name", judged.RUNS)
def test_verify_run_gives_the_ledgers_of_each_example_run_their_expected_verdict(
    name: str, tmp_path: Path
) -> None:
    job = LedgerJob(tmp_path, rf.Plan(judged.SAMPLES, shuffle="none"))
    for passes in judged.RUNS[name][1]:
        job.launch(2, judged.BATCH, passes)
    verdict = verify_run(tmp_path)
    assert verdict.verdict == VERDICTS[name], verdict
