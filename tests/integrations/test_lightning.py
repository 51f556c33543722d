"""A Trainer is fed by our loaders as they are: each sample once an epoch, resumed anywhere, means exact."""

import json
import re
import sys
from collections import Counter
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.jobs import run
from tests.support.marks import soak
from tests.support.packages import need_package

import rankfeed as rf
from rankfeed.plan import Schedule

need_package("lightning")
need_package("pytorch_lightning")
from rankfeed.integrations.lightning import log_mean  # noqa: E402

#: Seconds in which a job has to end: far more than it takes.
HANG = 280
pytestmark = pytest.mark.timeout(2 * HANG + 60)
SCRIPT = Path(__file__).parent / "jobs" / "lightning_train.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_ragged.py"
SAMPLES, ROWS, STEPS = 22, 3, 4
CELLS = [
    *("whole", "processes", "limited", "stopped", "again", "several", "overfit", "last_batch"),
    *("failed", "validated", "stock", "uneven"),
]

Lines = list[list[Any]]


def job(ranks: int, out: Path, *cells: str, package: str = "lightning.pytorch") -> list[str]:
    return [sys.executable, str(SCRIPT), package, str(ranks), str(out), *cells]


def lines(out: Path, cell: str, ranks: int = 2) -> Lines:
    return [
        [json.loads(line) for line in (out / f"{cell}-{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    ]


def steps(of_rank: list[Any], fit: int = 0) -> list[Any]:
    """The steps of a fit: [epoch, sample ids]."""
    return [[line[1], line[2]] for line in of_rank if isinstance(line, list) and line[0] == fit]


def facts(of_rank: list[Any]) -> list[dict[str, Any]]:
    return [line for line in of_rank if isinstance(line, dict)]


def planned(rank: int, epochs: range, ranks: int = 2, samples: int = SAMPLES, take: int = STEPS) -> list[Any]:
    """What a plain loop over the loader would have had."""
    plan = rf.Plan(samples, shuffle="global")
    topology = rf.Topology(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    epoch_of = {epoch: Schedule(plan, batch_size=ROWS, topology=topology, epoch=epoch) for epoch in epochs}
    return [
        [epoch, schedule.batch(step).tolist()]
        for epoch, schedule in epoch_of.items()
        for step in range(min(take, len(schedule)))
    ]


@pytest.fixture(scope="module", params=["lightning.pytorch", soak("pytorch_lightning")])
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all cells told, run in one pair of processes."""
    folder = tmp_path_factory.mktemp("cells")
    run(job(2, folder, *CELLS, package=request.param), folder / "log", HANG)
    return folder


def test_lightning_trains_on_each_sample_once_per_epoch_in_equal_steps_and_planned_order(out: Path) -> None:
    told = lines(out, "whole")
    for rank in range(2):
        assert steps(told[rank]) == planned(rank, range(3))
    for epoch in range(3):
        ids = chain.from_iterable(ids for rank in told for at, ids in steps(rank) if at == epoch)
        assert Counter(ids) == Counter(range(SAMPLES))
    assert planned(0, range(1))[0][1] != planned(0, range(1, 2))[0][1]


def test_lightning_trainer_uses_the_original_loader_and_its_audit_report_is_complete(out: Path) -> None:
    for told in lines(out, "whole"):
        assert facts(told)[-1]["same"] is True
        assert facts(told)[-1]["audit"].startswith(
            "epoch 2: 22 samples, ranks [0, 1] of 2, steps [4, 4], 0 missing"
        )


def test_lightning_validation_covers_all_samples_once_and_log_mean_is_exact(out: Path) -> None:
    told = [facts(of_rank) for of_rank in lines(out, "whole")]
    ids = Counter(chain.from_iterable(fact["validated"] for rank in told for fact in rank if "validated" in fact))
    assert ids == Counter(dict.fromkeys(range(13), 6))  # twice in each of three epochs
    assert [rank[-1]["mean"] for rank in told] == [float(Fraction(sum(range(13)), 13 * 7))] * 2


def test_lightning_training_reuses_worker_processes_between_epochs(out: Path) -> None:
    for rank, told in enumerate(lines(out, "processes")):
        assert steps(told) == planned(rank, range(3))
        first, *later = facts(told)[0]["workers"]
        assert len(first) == 2
        assert later == [first, first]


def test_lightning_epochs_limited_in_batches_are_followed_by_the_order_of_the_next_epoch(out: Path) -> None:
    for rank, told in enumerate(lines(out, "limited")):
        assert steps(told) == planned(rank, range(3), take=2)


def test_lightning_early_stop_stops_all_ranks_and_the_loader_can_train_again(out: Path) -> None:
    told = lines(out, "stopped")
    for rank in range(2):
        assert steps(told[rank], fit=0) == [*planned(rank, range(1)), *planned(rank, range(1, 2), take=2)]
        assert steps(told[rank], fit=1) == planned(rank, range(1))
    validated = chain.from_iterable(fact["validated"] for rank in told for fact in facts(rank))
    assert Counter(validated) == Counter(dict.fromkeys(range(12), 3)), "two of three batches, three times"


def test_lightning_trainer_epoch_determines_the_order_of_a_previously_used_loader(out: Path) -> None:
    for rank, told in enumerate(lines(out, "again")):
        assert steps(told, fit=0) == planned(rank, range(2), take=3)
        assert steps(told, fit=1) == planned(rank, range(1))
        assert steps(told, fit=2) == planned(rank, range(1, 3))


def test_lightning_reads_the_longest_of_several_loaders_once_and_restarts_the_shorter(out: Path) -> None:
    for rank, told in enumerate(lines(out, "several")):
        assert [[epoch, ids["long"]] for epoch, ids in steps(told)] == planned(rank, range(2))
        short = [ids["short"] for _, ids in steps(told)]
        expected = [planned(rank, range(epoch, epoch + 2), samples=8) for epoch in range(2)]
        assert short == [ids for epoch in expected for _, ids in epoch]


def test_lightning_overfit_batches_repeats_the_same_batches_and_raises_with_shuffle(out: Path) -> None:
    for told in lines(out, "overfit"):
        first, second = ([ids for at, ids in steps(told) if at == epoch] for epoch in range(2))
        assert first == second
        assert len(first) == 2
        assert facts(told)[0]["error"] == "ArgumentError"
        assert "overfit_batches needs the same batches" in facts(told)[0]["says"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, soak(1)])
def test_lightning_checkpoint_resumes_on_another_number_of_ranks(ranks: int, out: Path) -> None:
    """After the last batch and after an exception; a killed job: tests/launch/test_frameworks.py."""
    cells = {"last_batch": STEPS, "failed": 2}
    run(job(ranks, out, *(f"after_{cell}" for cell in cells)), out / f"log-{ranks}", HANG)
    for cell, kept in cells.items():
        told = lines(out, f"after_{cell}", ranks)
        for rank in range(ranks):
            (out / f"after_{cell}-{rank}.jsonl").unlink()
        assert len({len(rank) for rank in told}) == 1
        before = chain.from_iterable(ids for rank in lines(out, cell) for _, ids in steps(rank)[:kept])
        after = chain.from_iterable(ids for rank in told for epoch, ids in steps(rank) if epoch == 0)
        assert Counter([*before, *after]) == Counter(range(SAMPLES)), cell
        for rank in range(ranks):
            later = [step for step in steps(told[rank]) if step[0] > 0]
            assert later == planned(rank, range(1, 3), ranks, take=SAMPLES)


def test_training_resumes_in_the_middle_of_its_epoch_from_a_checkpoint_saved_after_a_validation(out: Path) -> None:
    for rank, told in enumerate(lines(out, "validated")):
        assert steps(told, fit=1) == planned(rank, range(2))[2:]


def test_lightning_with_rankfeed_samplers_in_a_stock_dataloader_reads_each_sample_once(out: Path) -> None:
    told = lines(out, "stock")
    for fit in range(2):
        for epoch in range(2):
            ids = chain.from_iterable(ids for rank in told for at, ids in steps(rank, fit) if at == epoch)
            assert Counter(ids) == Counter(range(SAMPLES))
        assert len({len(steps(rank, fit)) for rank in told}) == 1


def test_a_batch_sampler_that_lightning_would_shard_again_raises_argument_error(out: Path) -> None:
    for told in lines(out, "stock"):
        assert [fact["error"] for fact in facts(told)] == ["ArgumentError"] * 2  # in fit, and in predict
        assert all("Trainer(use_distributed_sampler=False)" in fact["says"] for fact in facts(told))


def test_dataloaders_of_unequal_length_on_the_ranks_raise_plan_error_before_training(out: Path) -> None:
    for told in lines(out, "uneven"):
        assert steps(told) == []
        assert [fact["error"] for fact in facts(told)] == ["PlanError"] * 2  # in fit, and in validate
        assert all("rank 0: 8, rank 1: 6" in fact["says"] for fact in facts(told))


def test_log_mean_with_a_mismatched_mask_or_sync_dist_raises_argument_error() -> None:
    with pytest.raises(rf.errors.ArgumentError, match="the mask does not fit"):
        log_mean(None, "loss", torch.tensor(1.0), torch.tensor([True]))
    with pytest.raises(rf.errors.ArgumentError, match="found: sync_dist"):
        log_mean(None, "loss", torch.ones(2), sync_dist=False)


@pytest.mark.soak
def test_the_documented_commands_of_the_example_train_resume_and_print_one_validation_mean(tmp_path: Path) -> None:
    documented = re.findall(r"^ +python (examples/.*)$", EXAMPLE.read_text(), re.MULTILINE)
    assert [("--resume" in each, "--devices 1" in each) for each in documented] == [(False, False), (True, True)]
    said, finished = [], documented[1].replace(" --epochs 3", "")
    for number, command in enumerate([documented[0], finished, documented[1]]):
        script, *arguments = command.replace("data/", f"{tmp_path}/data/").split()
        log = tmp_path / str(number)
        run([sys.executable, str(EXAMPLE.parents[1] / script), *arguments], log, HANG)
        said.append(re.findall(r"^(rows \S+, mean length \S+)\nval_loss (\S+)$", log.read_text(), re.MULTILINE))
        assert ("nothing left of 2 epochs" in log.read_text()) == (command == finished)
    (trained,), (again,), (more,) = said
    assert trained[0] == again[0] == more[0]
    assert trained[1] == again[1] != more[1]
