"""The verdict on a run is what its ranks delivered, for ranks killed at any time."""

import json
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.diagnostics.ledger_jobs import Job, random_job

import rankfeed as rf
from rankfeed.diagnostics import RunVerdict, verify_run
from rankfeed.errors import SourceError
from rankfeed.storage import ledger
from rankfeed.storage.ledger import PassHeader, decode_ledger, encode_header


def codes(verdict: RunVerdict) -> dict[str, str]:
    return {finding.code: finding.severity for finding in verdict.findings}


def agrees(verdict: RunVerdict, job: Job) -> None:
    """Hold a verdict against the counted truth."""
    (told,) = verdict.loaders
    assert max(job.counts.values(), default=1) == 1
    delivered = Counter(epoch for epoch, _ in job.counts)
    assert {e.epoch: e.delivered + e.ahead for e in told.epochs if e.delivered + e.ahead} == dict(delivered)
    assert {e.epoch: e.again for e in told.epochs if e.again} == dict(+job.again)
    for epoch in told.epochs:
        n = epoch.samples
        assert n == epoch.delivered + epoch.missing + epoch.dropped + epoch.left_early + epoch.under_way
        reach = epoch.delivered + epoch.missing
        absent = sum((epoch.epoch, place) not in job.counts for place in range(reach))
        assert epoch.missing == absent


@pytest.mark.parametrize("seed", range(40))
def test_verify_run_counts_what_ranks_delivered_over_random_launches_and_kills(seed: int, tmp_path: Path) -> None:
    job = random_job(tmp_path / "run", seed)
    verdict = verify_run(tmp_path / "run")
    assert verdict.sound, str(verdict)
    agrees(verdict, job)
    json.dumps(verdict.as_dict())


@dataclass(frozen=True)
class History:
    """Launches of a job of 100 samples, and the verdict on them.

    Attributes:
        launches: ranks, batch size, passes of (epoch, start, steps of each rank), and options of a launch.
        missing: samples of all epochs.
        codes: of all findings, with their severities; None: not compared.
        epochs: attributes of the epochs, of which the value of each epoch is given.
        text: of the verdict as people read it.
    """

    launches: Sequence[tuple[Any, ...]]
    sound: bool | None = True
    missing: int = 0
    codes: dict[str, str] | None = None
    epochs: dict[str, list[int]] = field(default_factory=dict)
    text: str = ""

    @property
    def overlaps(self) -> bool:
        """Whether launches overlap, of which what counts is not defined."""
        return "overlapping-launches" in (self.codes or ())


NOT_BEGUN, UNPROVEN = {"not-begun": "note"}, "unproven"
ABSENT, OVERLAP = NOT_BEGUN | {"absent-ledger": UNPROVEN}, {"overlapping-launches": UNPROVEN}
NOT_RECORDED, EARLIER = {"not-recorded": UNPROVEN}, {"seconds": -2}

HISTORIES = {
    "a gap between launches": History(
        [(2, 5, [(0, 0, [4, 4])]), (1, 10, [(0, 60, [4])])], False, 20, text="positions 40 to 60"),
    "an epoch that begins again in the next launch": History(
        [(2, 5, [(0, 0, [10, 10]), (1, 0, [4, 4])]), (1, 10, [(0, 0, [4])])], codes={"began-again": "note"},
        text=r"launch 2 of[\s\S]*set_epoch"),
    "an absent ledger": History([(3, 5, [(0, 0, [7, 7, 7])], {"absent": [1]})], None, 33, ABSENT, text="rank 1"),
    **{f"an absent ledger of an epoch of {steps} steps": History(
        [(2, 5, [(0, 0, [10, 10])]), (2, 5, [(1, 0, [steps, steps])], {"absent": [1]})], None, 0, ABSENT)
       for steps in (1, 2)},
    "a rank killed before the others in an unfinished epoch": History(
        [(3, 5, [(0, 0, [4, 3, 4])])], epochs={"ahead": [10]}, text="rank 1 on here after 3"),
    "a rank that continues with the next epoch with fewer steps": History(
        [(2, 5, [(0, 0, [10, 9]), (1, 0, [10, 10])])], False, 5),
    "a rank that ends an epoch before the others leave it": History(
        [(2, 5, [(0, 0, [10, 10]), (1, 0, [4, -1])])], codes=NOT_BEGUN),
    "an epoch that is left early": History(
        [(2, 5, [(0, 0, [3, 3]), (1, 0, [10, 10])])], epochs={"left_early": [70, 0]}),
    "an epoch that is left by a pass without a step": History(
        [(2, 5, [(0, 0, [3, 3]), (1, 0, [0, 0])])], epochs={"left_early": [70, 0], "under_way": [0, 100]}),
    "epochs that begin again take back what was delivered": History(
        [(2, 5, [(0, 0, [3, 3]), (0, 0, [10, 10]), (1, 0, [4, 4]), (0, 50, [5, 5])])], epochs={"again": [80, 40]}),
    "a look of one rank at the first batch": History([(2, 5, [(0, 0, [1, -1]), (0, 0, [10, 10])])]),
    "an epoch that is skipped": History(
        [(1, 10, [(0, 0, [10])]), (1, 10, [(2, 0, [10])])], False, 100, epochs={"missing": [0, 100, 0]}),
    "a start up to which nothing is recorded": History([(1, 10, [(0, 20, [8])])], None, 20, NOT_RECORDED),
    # As limit_train_batches and limit_val_batches: the next launch begins the next epoch.
    "a limit of steps in all launches": History(
        [(2, 5, [(0, 0, [3, 3]), (1, 0, [3, 3])]), (1, 10, [(2, 0, [3]), (3, 0, [3])])],
        epochs={"left_early": [70, 70, 70, 0]}),
    **{f"a limit of 3 steps, and a launch that stops at {steps}": History(
        [(2, 5, [(0, 0, [3, 3]), (1, 0, steps)]), (1, 10, [(2, 0, [3])])], False, 100 - 5 * sum(steps))
       for steps in ([2, 2], [4, 4], [3, 2])},
    **{f"a loader of each fifth epoch continues with epoch {epoch}": History(
        [(1, 10, [(4, 0, [10]), (9, 0, [10])]), (1, 10, [(epoch, 0, [10])])], not missing, missing)
       for epoch, missing in ((14, 0), (15, 500), (19, 900), (10, 0))},
    "two jobs at one time": History(
        [(1, 10, [(0, 0, [5])]), (1, 10, [(0, 0, [5])], EARLIER)], None, 0, OVERLAP, text="launches 1 and 2"),
    "gaps of two jobs at one time": History(
        [(1, 10, [(0, 0, [5])]), (1, 10, [(1, 0, [10])], EARLIER)], None, 50,
        OVERLAP | {"missing-samples": UNPROVEN}),
    "an epoch of any number, of which a thousand before it are listed": History(
        [(1, 10, [(0, 0, [10])]), (1, 10, [(10**15, 0, [10])])], False, 1000 * 100),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_verify_run_gives_each_history_of_launches_its_expected_verdict_and_counts(
    name: str, tmp_path: Path
) -> None:
    history = HISTORIES[name]
    job = Job(tmp_path, rf.Plan(100))
    for ranks, batch_size, passes, *options in history.launches:
        given = options[0] if options else {}
        job.now += given.get("seconds", 0) * 10**9
        job.launch(ranks, batch_size, passes, absent=given.get("absent", ()))
    verdict = verify_run(tmp_path)
    if not history.overlaps:
        agrees(verdict, job)
    assert verdict.sound is history.sound, str(verdict)
    assert history.codes in (None, codes(verdict))
    assert re.search(history.text, str(verdict))
    (loader,) = verdict.loaders
    assert loader.missing == history.missing
    for name, values in history.epochs.items():
        assert [getattr(epoch, name) for epoch in loader.epochs] == values


@pytest.mark.parametrize("lanes", [1, 3])
def test_verify_run_names_the_rank_and_step_that_fell_short_of_the_start_of_the_next_launch(
    tmp_path: Path, lanes: int
) -> None:
    job = Job(tmp_path, rf.Plan(100, lanes=lanes))
    job.launch(2, 5, [(0, 0, [4, 2])], host="node7")
    job.launch(1, 10, [(0, 33, [7])])
    verdict = verify_run(tmp_path)
    agrees(verdict, job)
    (gap,) = verdict.loaders[0].epochs[0].gaps
    assert (gap.rank, gap.first_step) == (1, 2)
    assert "rank 1 on node7 after 2 of the 4 steps" in str(verdict)


def test_verify_run_counts_ledgers_of_mesh_peers_with_the_same_rank_once(tmp_path: Path) -> None:
    for launch in range(2):  # the same ranks, at the same time
        job = Job(tmp_path, rf.Plan(100), launches=launch, name="one", launcher="mesh")
        job.launch(2, 5, [(0, 0, [10, 10])])
    verdict = verify_run(tmp_path)
    assert verdict.sound, str(verdict)
    assert (verdict.loaders[0].epochs[0].delivered, verdict.loaders[0].again) == (100, 0)


def test_a_run_of_several_processes_that_all_ran_as_rank_0_of_1_is_unsound(tmp_path: Path) -> None:
    for launch in range(3):
        Job(tmp_path, rf.Plan(100), launches=launch, name="one").launch(1, 10, [(0, 0, [10])])
    verdict = verify_run(tmp_path)
    assert verdict.sound is False
    assert "launch 'one': rank 0 of 1" in str(verdict)


def test_verify_run_counts_a_restart_under_the_same_launch_name_as_a_second_launch(tmp_path: Path) -> None:
    job = Job(tmp_path, rf.Plan(100), name="restarted")
    job.launch(2, 5, [(0, 0, [4, 3])])
    job.launch(2, 5, [(0, 20, [8, 8])])
    verdict = verify_run(tmp_path)
    agrees(verdict, job)
    assert verdict.sound
    assert len(verdict.loaders[0].launches) == 2


@pytest.mark.parametrize(("prefix", "cut"), [("z", 0), ("a", 96)], ids=["whole", "shorter, with an earlier name"])
def test_verify_run_reports_a_copied_ledger_and_counts_it_once(prefix: str, cut: int, tmp_path: Path) -> None:
    Job(tmp_path, rf.Plan(100)).launch(1, 10, [(0, 0, [10]), (1, 0, [10])])
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    (tmp_path / f"{prefix}{path.name}").write_bytes(content[: len(content) - cut])
    verdict = verify_run(tmp_path)
    assert verdict.sound, str(verdict)
    assert codes(verdict) == {"copied-ledger": "note"}
    assert verdict.loaders[0].again == 0
    assert [epoch.delivered for epoch in verdict.loaders[0].epochs] == [100, 100]


def test_verify_run_verifies_loaders_with_different_plans_separately(tmp_path: Path) -> None:
    train, valid = Job(tmp_path, rf.Plan(100)), Job(tmp_path, rf.Plan(30, shuffle="none"), launches=7)
    train.launch(2, 5, [(0, 0, [10, 10])])
    valid.launch(2, 5, [(0, 0, [3, 3])])
    verdict = verify_run(tmp_path)
    assert verdict.sound
    assert sorted(loader.epochs[0].delivered for loader in verdict.loaders) == [30, 100]


def test_a_ledger_whose_plan_has_an_unknown_order_version_is_not_proven(tmp_path: Path) -> None:
    Job(tmp_path, rf.Plan(100, shuffle="window", window=10, lanes=4)).launch(1, 5, [(0, 0, [20])])
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        header = next(decode_ledger(file))
    assert isinstance(header, PassHeader)
    content = msgspec.structs.replace(header.content, plan={**header.content.plan, "order": 3})
    path.write_bytes(encode_header(0, content)[0])
    verdict = verify_run(tmp_path)
    assert verdict.sound is None
    assert codes(verdict)["damaged-ledger"] == "unproven"
    assert "invalid order" in str(verdict)


@pytest.mark.parametrize("version", [0, 2, 2**64 - 1])
def test_a_ledger_of_another_format_version_is_not_proven_but_not_reported_as_damaged(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(ledger, "VERSION", version)
        Job(tmp_path, rf.Plan(100)).launch(1, 10, [(0, 0, [10]), (1, 0, [10])])
    verdict = verify_run(tmp_path)
    assert verdict.sound is None
    assert codes(verdict) == {"other-version": "unproven"}
    assert f"offset 0: version {version} of the format, expected 1" in str(verdict)
    assert "with the version of rankfeed that wrote it" in str(verdict)


def test_verify_run_reports_a_ledger_of_null_bytes_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "x.rankfeed-ledger").write_bytes(bytes(320))
    assert codes(verify_run(tmp_path)) == {"damaged-ledger": "unproven"}


def test_verify_run_raises_source_error_for_a_folder_without_ledgers(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("nothing")
    with pytest.raises(SourceError, match="no ledgers"):
        verify_run(tmp_path)


@pytest.mark.timeout(60)
def test_verify_run_reports_a_named_pipe_among_the_ledgers_without_blocking(tmp_path: Path) -> None:
    Job(tmp_path, rf.Plan(100)).launch(1, 10, [(0, 0, [10])])
    os.mkfifo(tmp_path / "x.rankfeed-ledger")
    verdict = verify_run(tmp_path)
    assert verdict.sound is None
    assert "x.rankfeed-ledger, offset 0: it is no file" in str(verdict)


def test_verify_run_names_other_files_and_damaged_ledgers_in_the_folder(tmp_path: Path) -> None:
    Job(tmp_path, rf.Plan(100)).launch(1, 10, [(0, 0, [10])])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "x.rankfeed-ledger").write_text("this is no ledger, but it says that it is one of them")
    verdict = verify_run(tmp_path)
    assert codes(verdict) == {"damaged-ledger": "unproven", "killed-while-writing": "note", "other-files": "note"}
    assert "notes.txt" in str(verdict)
    assert "x.rankfeed-ledger" in str(verdict)


@pytest.mark.parametrize("seed", range(30))
def test_a_mutated_ledger_is_not_proven_or_leaves_the_counts_of_delivered_samples_right(
    seed: int, tmp_path: Path
) -> None:
    mutate(tmp_path, seed)


def mutate(folder: Path, seed: int) -> str:
    """Change a ledger: the verdict is not proven, or right about what is left of it."""
    chance = random.Random(seed)
    folder.mkdir(exist_ok=True)
    job = Job(folder / "run", rf.Plan(60, seed=seed))
    job.launch(2, 3, [(0, 0, [6, 6])])
    job.launch(1, 6, [(0, 30, [5]), (1, 0, [10])])
    job.launch(2, 3, [(1, 48, [2, 2]), (2, 0, [5, 5])])
    assert verify_run(job.folder).sound
    right = verify_run(job.folder).loaders[0].as_dict()
    path = chance.choice(sorted(job.folder.iterdir()))
    content = bytearray(path.read_bytes())
    kind = chance.choice(["flip", "flip", "cut", "lose", "insert", "zero", "swap"])
    place = chance.randrange(len(content))
    if kind == "flip":
        content[place] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "lose":
        del content[place : place + chance.randint(1, 100)]
    elif kind == "insert":
        content[place:place] = chance.randbytes(chance.randint(1, 100))
    elif kind == "zero":
        content[place : place + 32] = bytes(len(content[place : place + 32]))
    else:
        other = chance.randrange(len(content) // 32) * 32
        place -= place % 32
        one, two = content[place : place + 32], content[other : other + 32]
        content[place : place + 32], content[other : other + 32] = two, one
    path.write_bytes(content)
    verdict = verify_run(job.folder)
    assert verdict.sound is not False or kind in ("cut", "lose"), f"{kind}\n{verdict}"
    if not verdict.sound:
        return f"{kind}: {verdict.verdict}"
    if verdict.loaders[0].as_dict() == right:
        return f"{kind}: no difference"
    # What is told as delivered was: the last records alone can be lost without a trace, as by a kill.
    for told in verdict.loaders[0].epochs:
        assert told.missing == 0
        assert told.delivered <= sum(epoch == told.epoch for epoch, _ in job.counts)
        assert told.delivered == told.samples or told.epoch == 2, f"{kind}\n{verdict}"
    return f"{kind}: told as killed earlier"


@pytest.mark.parametrize("bit", range(5, 16))
def test_a_ledger_header_with_a_flipped_bit_in_its_length_is_reported_as_damaged(bit: int, tmp_path: Path) -> None:
    Job(tmp_path, rf.Plan(100)).launch(1, 5, [(0, 0, [20]), (1, 0, [15])])
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[content.rindex(b"\xff\xff\xff\xffRFLG") + 12 + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert "neither a header nor a step" in str(verify_run(tmp_path)), "the steps of epoch 1 are lost"


@pytest.mark.soak
def test_thousands_of_mutated_ledgers_are_not_proven_or_leave_the_counts_right(tmp_path: Path) -> None:
    told = Counter(mutate(tmp_path / str(seed), seed) for seed in range(1000, 4000))
    for outcome, count in sorted(told.items()):
        print(f"{outcome}: {count}")


def test_missing_samples_are_not_proven_if_a_ledger_is_damaged(tmp_path: Path) -> None:
    job = Job(tmp_path, rf.Plan(100))
    job.launch(2, 5, [(0, 0, [8, 8])])
    job.launch(1, 10, [(0, 80, [2])])
    (path,) = tmp_path.glob("rank-00000-of-00002*")
    content = bytearray(path.read_bytes())
    content[-40] ^= 1  # in the last two steps of rank 0
    content[-10] ^= 1
    path.write_bytes(content)
    verdict = verify_run(tmp_path)
    assert verdict.loaders[0].missing == 10
    assert verdict.sound is None
    assert codes(verdict)["missing-samples"] == "unproven"


def test_verify_run_counts_missing_samples_of_a_plan_of_a_trillion_samples(tmp_path: Path) -> None:
    """Ledgers of 10^9 steps are not written here: the ranges of the last steps are the same arithmetic."""
    job = Job(tmp_path, rf.Plan(100))
    job.plan = rf.Plan(10**12, lanes=64)
    start = 10**12 - 6_000
    job.launch(4, 250, [(0, start, [6, 3, 6, 6])])
    job.launch(2, 500, [(1, 0, [2, 2])])
    verdict = verify_run(tmp_path)
    first, second = verdict.loaders[0].epochs
    assert (first.missing, first.delivered) == (start + 750, 10**12 - start - 750)
    assert second.under_way == 10**12 - 2_000
    assert codes(verdict) == {"missing-samples": "error", "not-recorded": "unproven", "uneven-end": "note"}
