"""A rank that fails, ends, dies or hangs is named on all others, and healthy jobs hear nothing."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.diagnostics.jobs.lockstep import AT_LIMIT, CASES, ENDLESS, HANGING, HEALTHY
from tests.support.jobs import run, started, torchrun
from tests.support.marks import slow, soak

import rankfeed as rf
from rankfeed.diagnostics.lockstep.rank_monitor import EXIT_CODE

JOB = Path(__file__).parent / "jobs" / "lockstep.py"


def played(folder: Path, patience: float, *rounds: str, at_once: int = 1) -> None:
    """Play rounds, some at once; those that have not ended after their patience are killed."""
    run(
        [sys.executable, str(JOB), str(folder), str(at_once), str(patience), *rounds],
        folder / "log",
        60 + patience * len(rounds),
    )


def check(folder: Path, spec: str) -> float:
    """Compare what the ranks of a round reported with what happened; seconds from that to the last one's end.

    For what is seen at the limit, they are seconds beyond it.
    """
    case, bad_, at, ranks, limit, how = spec.split(",")
    bad = int(bad_)
    pattern = CASES[case].format(bad=bad, step=at, before=int(at) - 1)
    happened = float((folder / spec / "happened").read_text())
    codes = json.loads((folder / spec / "codes.json").read_text())
    last = happened
    for rank in range(int(ranks)):
        code, ended = codes[rank]
        log = (folder / spec / f"{rank}.log").read_text()[-6000:]
        if rank == bad:
            expected = {"sys.exit": 3, **dict.fromkeys(HANGING, EXIT_CODE), **dict.fromkeys(ENDLESS, -9)}
            assert code == expected.get(case, 0), f"{spec}: {code}\n{log}"
            last = max(last, 0.0 if case in ENDLESS else ended)
            continue
        assert code in (0, EXIT_CODE), f"{spec}, rank {rank}: {codes}\n{log}"
        assert re.search(rf"rankfeed.Lockstep: {pattern}", log), f"{spec}, rank {rank}:\n{log}"
        last = max(last, ended)
        if code == EXIT_CODE:
            continue
        raised = json.loads((folder / spec / f"{rank}.json").read_text())
        if how == "bare":  # a collective that failed is shown as its cause
            assert re.search(rf"errors\.LockstepError: {pattern}", log), f"{spec}, rank {rank}: {raised}\n{log}"
        else:
            assert raised["kind"] == "LockstepError", f"{spec}, rank {rank}: {raised}"
            assert re.match(pattern, raised["text"]), f"{spec}, rank {rank}: {raised['text']}"
            assert raised["rank"] == bad, spec
    return last - happened - (float(limit) if case in AT_LIMIT else 0.0)


def quiet(folder: Path, spec: str) -> list[float]:
    """Hold that the ranks of a healthy round took all steps and said nothing; what a step cost on each."""
    _, _, steps, ranks, _, _ = spec.split(",")
    ends = [json.loads((folder / spec / f"{rank}.json").read_text()) for rank in range(int(ranks))]
    assert [(one["kind"], one.get("trained")) for one in ends] == [("returned", int(steps))] * int(ranks), ends
    assert [code for code, _ in json.loads((folder / spec / "codes.json").read_text())] == [0] * int(ranks)
    assert [(folder / spec / f"{rank}.log").read_text() for rank in range(int(ranks))] == [""] * int(ranks)
    return [one.get("cost", 0.0) for one in ends]


@pytest.mark.timeout(600)
def test_lockstep_names_the_failed_rank_on_all_other_ranks_and_is_silent_in_a_healthy_job(
    thorough: bool, tmp_path: Path
) -> None:
    rounds = [
        "raise,1,6,2,4,with",
        "short,0,6,2,4,with",
        "kill,2,10,3,4,with",
        "stop,1,10,2,4,with",
        "sleep,0,1,2,4,with",
        "subgroup,3,5,4,4,subgroups",
        "slow,1,5,2,4,no collectives",
        "return,1,5,2,4,bare",
        "evaluation,1,5,3,4,evaluation",
        "after,0,5,2,4,after",
        "gil,0,5,3,4,with",
        "never,1,5,3,4,with",
        "sys.exit,0,5,2,4,with",
        "leave,1,5,2,4,with",
        "return to barrier,0,5,3,4,with",
        "gather,2,5,3,4,with",
        "pipeline,1,5,3,4,stages",
    ]
    if not thorough:
        rounds = [rounds[1], rounds[2], rounds[3], rounds[-4]]
    well = "healthy,0,400,3,6,healthy"  # of three, since the last ends two seconds after the store
    played(tmp_path, 60, *rounds, well)  # one job for all, since starting it takes longer than a round
    for spec in rounds:
        check(tmp_path, spec)
    quiet(tmp_path, well)


@pytest.mark.slow
def test_a_healthy_job_with_a_slow_store_ends_on_all_ranks_without_a_lockstep_message(tmp_path: Path) -> None:
    """Rank 0 keeps the store until the other ranks need it no longer."""
    spec = "healthy,0,3,2,6,slow store"
    played(tmp_path, 60, spec)
    quiet(tmp_path, spec)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lockstep_is_silent_in_jobs_with_pauses_evaluation_or_pipelines_within_its_limit(
    thorough: bool, tmp_path: Path
) -> None:
    kinds = list(HEALTHY) if thorough else ["common pauses", "long evaluation", "pipeline", "native pauses"]
    rounds = [f"healthy,0,8,{3 if how in ('pipeline', 'groups', 'messages') else 2},4,{how}" for how in kinds]
    played(tmp_path, 60, *rounds, at_once=4)  # they sleep most of the time
    for spec in rounds:
        quiet(tmp_path, spec)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [slow("raise"), *map(soak, ("short", "stop", "sleep", "loader"))])
def test_the_cause_found_by_lockstep_is_in_the_log_when_torchrun_ends_a_failed_job(
    case: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with started(torchrun(2, JOB, tmp_path, case, 9, 4), log) as job:
        try:
            assert job.wait(200) != 0
        except subprocess.TimeoutExpired:
            raise AssertionError(log.read_text()[-6000:]) from None
    pattern = CASES[case].format(bad=1, step=9, before=8)
    assert re.search(rf"^(\[rank\d\]: )?.*{pattern}", log.read_text(), re.MULTILINE), log.read_text()[-6000:]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_lockstep_is_silent_over_ten_thousand_healthy_steps_with_random_delays(tmp_path: Path) -> None:
    spec = "healthy,0,10000,3,6,healthy"
    played(tmp_path, 900, spec)
    costs = quiet(tmp_path, spec)
    print(f"\na step of the watch costs {max(costs) * 1e6:.2f} microseconds")


def test_lockstep_in_a_single_process_passes_batches_len_set_epoch_and_errors_through() -> None:
    class Epochs(list[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    loader = Epochs([1, 2, 3])
    watched = rf.Lockstep(loader)
    with watched as batches:
        assert list(batches) == [1, 2, 3]
        batches.set_epoch(7)
    assert (len(watched), loader.epoch, watched.epoch) == (3, 7, 7)
    with pytest.raises(AttributeError, match="sampler"):
        watched.sampler  # noqa: B018
    with pytest.raises(ValueError, match="own"), rf.Lockstep(loader):
        raise ValueError("its own")


def test_lockstep_raises_argument_error_for_invalid_options_or_without_a_loader() -> None:
    for choice in ({"limit": 0}, {"grace": float("nan")}, {"uneven": "no"}):
        with pytest.raises(rf.errors.ArgumentError):
            rf.Lockstep([], **choice)  # type: ignore[arg-type]
    with pytest.raises(rf.errors.ArgumentError, match="no loader"):
        iter(rf.Lockstep())
