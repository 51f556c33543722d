"""What an audit says of loaders that deliver everything once, and of those that do not."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import jobs
from tests.support.environ import of_no_launcher
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import rankfeed as rf
from rankfeed.errors import ArgumentError, AuditError

SCRIPT = Path(__file__).parent / "jobs" / "audited.py"


class Numbers(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sample_id": index, "x": torch.ones(2) * index}


class Stream(IterableDataset[dict[str, Any]]):
    """Takes no notice of workers."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"sample_id": sample} for sample in range(8))


class Noisy(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sample_id": index, "x": np.random.rand()}


def seeded_alike(_: int) -> None:
    np.random.seed(7)


def findings(report: rf.AuditReport) -> dict[str, str]:
    """Severity by code."""
    return {finding.code: finding.severity for finding in report.findings}


def test_an_audit_of_a_loader_that_delivers_each_sample_once_is_sound_without_findings() -> None:
    source = rf.from_dataset([{"x": float(i % 3)} for i in range(47)])
    for options in ({}, {"num_workers": 2}, {"tail": "pad"}):
        loader = rf.Loader(source, 4, shuffle=True, id_column="number", **options)  # type: ignore[arg-type]
        report = rf.audit(loader, epochs=2)
        report.check()
        assert report.sound
        assert [(epoch.samples, epoch.unique, epoch.missing, epoch.unknown) for epoch in report.epochs] == [
            (47, 47, 0, 0)
        ] * 2
        assert str(report).endswith("verdict: sound")
        assert json.loads(json.dumps(report.as_dict()))["findings"] == []
    assert rf.audit(DataLoader(Numbers(), 3, shuffle=True), epochs=2, universe=20).sound


def test_an_audit_reports_missing_and_unknown_keys_and_where_a_repeated_key_was_delivered() -> None:
    batches = [{"id": np.array(ids)} for ids in ([5, 1], [2, 5], [7], [5])]
    report = rf.audit(batches, key="id", universe=[1, 2, 3, 5, 6])
    (epoch,) = report.epochs
    assert (epoch.samples, epoch.unique, epoch.repeated, epoch.missing, epoch.unknown) == (6, 4, 2, 2, 1)
    assert (epoch.missing_keys, epoch.unknown_keys) == (("3", "6"), ("7",))
    (repeat,) = epoch.repeats
    assert (repeat.key, repeat.times) == ("5", 3)
    assert [(place.step, place.row) for place in repeat.places] == [(0, 0), (1, 1), (3, 0)]
    assert epoch.ranks[0].batch_sizes == {1: 2, 2: 2}
    assert (epoch.interval, epoch.ranks[0].repeated) == (1, (0, 1, 0, 1))
    with pytest.raises(AuditError, match=r"(?s)2 of 6 deliveries; sample 5 at rank 0, step 0, row 0"):
        report.check()


def test_an_audit_reports_missing_and_repeated_string_keys_in_quotes() -> None:
    report = rf.audit([{"id": ["a", "b"]}, {"id": ["b"]}], key="id", universe=["a", "b", "c"])
    assert report.epochs[0].missing_keys == ("'c'",)
    assert report.epochs[0].repeats[0].key == "'b'"


def test_an_audit_with_little_memory_counts_the_same_and_leaves_no_file_in_its_folder(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    ids = chance.integers(0, 30_000, 40_000)
    batches = [{"id": part} for part in np.array_split(ids, 300)]
    reports = [rf.audit(batches, key="id", universe=30_000, memory=size) for size in (1 << 30, 1 << 16)]
    counted = Counter(ids.tolist())
    for report in reports:
        (epoch,) = report.epochs
        assert (epoch.samples, epoch.unique) == (40_000, len(counted))
        assert epoch.missing == 30_000 - len(counted)
        for repeat in epoch.repeats:
            assert repeat.times == counted[int(repeat.key)]
    assert rf.audit(batches, key="id", folder=tmp_path).epochs[0].missing is None
    assert not list(tmp_path.iterdir())


def test_an_audit_finds_workers_that_each_read_the_whole_iterable_dataset() -> None:
    report = rf.audit(DataLoader(Stream(), 2, num_workers=2))
    assert (report.epochs[0].samples, report.epochs[0].unique) == (16, 8)
    assert findings(report) == {"duplicated-by-workers": "error", "expected-unknown": "unproven"}
    (epoch,) = report.epochs
    assert (epoch.between_workers, epoch.ranks[0].repeated) == (8, (0, 2) * 4), "every repeat can be drawn"
    assert "epoch 0: workers 0, 1 of rank 0" in str(report)


def test_an_audit_warns_of_the_same_order_in_every_epoch_unless_set_epoch_is_called() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(), 1, 0, shuffle=True)  # type: ignore[arg-type]
    loader = DataLoader(Numbers(), 5, sampler=sampler)
    report = rf.audit(loader, epochs=2)
    assert findings(report) == {"same-order-every-epoch": "warning"}
    assert report.sound
    assert not findings(rf.audit(loader, epochs=2, before_epoch=sampler.set_epoch))


def test_an_audit_finds_workers_with_the_same_random_state_only_if_they_draw_from_it() -> None:
    alike = DataLoader(Noisy(), 2, num_workers=2, worker_init_fn=seeded_alike)
    report = rf.audit(alike, epochs=2)
    assert findings(report)["same-randomness-in-workers"] == "error"
    assert "workers draw the same numbers from numpy: rank 0 worker 0 epoch 0 and rank 0 worker 1" in str(report)
    own = alike.collate_fn
    assert "same-randomness-in-workers" not in findings(rf.audit(DataLoader(Noisy(), 2, num_workers=2)))
    assert alike.collate_fn is own
    first_batches = DataLoader(Noisy(), 10, num_workers=2, worker_init_fn=seeded_alike)
    assert "same-randomness-in-workers" in findings(rf.audit(first_batches))
    # Seeded alike, and never drawn from: no harm.
    calm = DataLoader(Numbers(), 2, num_workers=2, worker_init_fn=seeded_alike)
    assert not findings(rf.audit(calm))


class Looking(DataLoader[Any]):
    """Looks into its batches."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield dict(batch.items())


def test_an_audited_dataloader_can_be_iterated_again_and_keeps_its_worker_init_fn() -> None:
    persistent = DataLoader(Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True)
    assert rf.audit(persistent, epochs=2, universe=20).sound
    assert isinstance(next(iter(persistent)), dict)
    assert rf.audit(Looking(Numbers(), 4, num_workers=1), universe=20).sound
    plain = DataLoader(Numbers(), 4, num_workers=1, worker_init_fn=seeded_alike)
    assert rf.audit(plain, universe=20).sound
    assert plain.worker_init_fn is seeded_alike


def test_an_audit_finds_no_error_in_a_rankfeed_loader_with_any_collate_fn_or_padding() -> None:
    rows = [{"id": i, "valid": i % 2, "x": torch.ones(1 + i % 3)} for i in range(31)]
    source = rf.from_dataset(rows)
    for options in (
        {"id_column": "number"},
        {"id_column": "number", "columns": ["id", "x"], "tail": "pad", "shuffle": True},
        {"collate_fn": lambda samples: [sample["id"] for sample in samples]},
        {"collate_fn": lambda samples: torch.tensor([[sample["id"], 1] for sample in samples])},
        {"collate_fn": lambda samples: (np.array([sample["id"] for sample in samples]), 5)},
        {},
    ):
        report = rf.audit(rf.Loader(source, 4, **options), epochs=2)  # type: ignore[arg-type]
        assert report.sound is (True if report.facts.keys == "ids" else None), (options, report)
        assert report.epochs[0].unique == 31
    loader = rf.Loader(source, 4, id_column="number", shuffle=True)
    next(iter(loader))
    resumed = rf.Loader(source, 4, id_column="number", shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert findings(rf.audit(resumed)) == {"expected-unknown": "unproven"}


def test_an_audit_names_two_later_epochs_that_have_the_same_order() -> None:
    epochs = iter([[3, 1, 2], [2, 3, 1], [2, 3, 1]])

    class Orders:
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            return iter([{"sample_id": next(epochs)}])

    assert "epochs 1, 2" in str(rf.audit(Orders(), epochs=3))


def test_an_audit_raises_audit_error_when_its_temporary_file_exceeds_the_file_size_limit(tmp_path: Path) -> None:
    code = """
import resource, signal, rankfeed as rf
batches = [{"id": list(range(start, start + 100))} for start in range(0, 3000, 100)]
import rankfeed.diagnostics.audit.reader, rankfeed.loading, torch
resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, 24_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    print(rf.audit(batches, key="id", universe=6000, memory=1 << 16))
except rf.errors.AuditError as error:
    print("AuditError", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=of_no_launcher(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "AuditError the loader failed on rank 0" in done.stdout, (done.stdout, done.stderr)
    assert "File too large" in done.stdout


def test_an_audit_counts_samples_without_ids_by_their_content() -> None:
    report = rf.audit(DataLoader([torch.tensor([float(i // 2)]) for i in range(6)], 2))  # type: ignore[arg-type]
    assert report.facts.keys == "content"
    assert (report.epochs[0].samples, report.epochs[0].unique) == (6, 3)
    assert findings(report) == {"not-counted": "unproven", "expected-unknown": "unproven"}


def test_an_audit_of_an_endless_loader_stops_after_max_steps_with_an_unfinished_epoch() -> None:
    class Endless:
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            sample = 0
            while True:
                yield {"sample_id": [sample]}
                sample += 1

    report = rf.audit(Endless(), max_steps=30, universe=1000)
    assert report.epochs[0].steps == (30,)
    assert findings(report) == {"epoch-not-finished": "unproven"}


def test_an_audit_raises_for_a_failing_loader_mixed_key_types_and_invalid_arguments() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            yield {"sample_id": [0]}
            raise OSError("the user's own")

    with pytest.raises(AuditError, match=r"(?s)the loader failed on rank 0.*the user's own"):
        rf.audit(Broken())
    with pytest.raises(AuditError, match="whole numbers in some batches"):
        rf.audit([{"id": [1]}, {"id": ["a"]}], key="id")
    with pytest.raises(AuditError, match="of another kind"):
        rf.audit([{"id": [1]}], key="id", universe=["a"])
    kinds = iter([[1, 2, 3], ["a"]])

    class Changing:
        def __iter__(self) -> Iterator[Any]:
            return iter([{"sample_id": next(kinds)}])

    with pytest.raises(AuditError, match="whole numbers in some batches"):
        rf.audit(Changing(), epochs=2)
    for universe in (2.0, "ab", True, np.array(2.5)):
        with pytest.raises(ArgumentError, match=r"(?s)invalid universe.*a number of samples"):
            rf.audit([{"id": [1]}], key="id", universe=universe)
    assert rf.audit([{"id": [0, 1]}], key="id", universe=np.int64(2)).sound
    assert rf.audit([], universe=["a"]).epochs[0].missing == 1
    with pytest.raises(ArgumentError, match="invalid key"):
        rf.audit([], key=["x"])  # type: ignore[arg-type]
    with pytest.raises(AuditError, match="could not begin"):
        rf.audit([], folder="/nowhere")
    for wrong in ({"epochs": 0}, {"max_steps": 0}, {"memory": 0.5}, {"universe": 0}):
        with pytest.raises((ArgumentError, AuditError)):
            rf.audit([{"id": [1]}], key="id", **wrong)  # type: ignore[arg-type]
    assert rf.audit([]).epochs[0].samples == 0


@pytest.mark.timeout(200)
def test_an_audit_on_two_ranks_gives_both_the_same_findings_for_sound_and_faulty_loaders(tmp_path: Path) -> None:
    jobs.run(jobs.torchrun(2, SCRIPT, tmp_path), tmp_path / "log", 150)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0] == told[1]
    outcomes = told[0]
    assert outcomes["ours"] == outcomes["sampler"] == outcomes["peers"] == {}
    assert outcomes["padding"] == {"padded-with-repeats": "note"}
    assert outcomes["unsharded"] == {"not-sharded-by-rank": "error"}
    assert outcomes["uneven"] == {"uneven-steps": "error", "expected-unknown": "unproven"}
    assert "the loader failed on rank 1" in outcomes["failing"]
    assert "of another kind" in outcomes["other kind"]
    assert "called with different arguments" in outcomes["other epochs"]
    assert "called with different arguments" in outcomes["other universe"]
    assert "the audit could not begin on rank 1" in outcomes["other folder"]
    assert "the audit could not begin on rank 1" in outcomes["no number"]
    assert "the loader failed on rank 1" in outcomes["mixed keys"]


class Rows(Dataset[torch.Tensor]):
    """Without ids."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2) * index


class Augmented(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2)


def test_an_audit_by_content_is_sound_only_if_two_epochs_have_it_in_different_orders() -> None:
    assert rf.audit(DataLoader(Rows(), 4, shuffle=True), epochs=2).sound
    for loader in (DataLoader(Rows(), 4), DataLoader(Augmented(), 4, shuffle=True)):
        report = rf.audit(loader, epochs=2)
        assert findings(report)["not-counted"] == "unproven"
        assert report.sound is None
    assert rf.audit(DataLoader(Rows(), 4, shuffle=True)).sound is None, "one epoch"


def test_an_audit_considers_replacement_drop_last_and_subset_samplers_of_a_dataloader() -> None:
    """Replacement is unproven, a dropped last batch is a note; a subset is unsound if the universe is declared."""
    draws = torch.utils.data.RandomSampler(Numbers(), replacement=True)  # type: ignore[arg-type]
    for universe in (None, 20):
        report = rf.audit(DataLoader(Numbers(), 4, sampler=draws), universe=universe)
        assert (report.sound, findings(report)["drawn-with-replacement"]) == (None, "unproven")
    report = rf.audit(DataLoader(Numbers(), 3, drop_last=True), universe=20)
    assert (report.sound, findings(report)) == (True, {"missing-samples": "note"})
    subset = torch.utils.data.SubsetRandomSampler(range(10))
    assert rf.audit(DataLoader(Numbers(), 4, sampler=subset)).sound is None
    assert rf.audit(DataLoader(Numbers(), 4, sampler=subset), universe=20).sound is False
    assert rf.audit(DataLoader(Numbers(), 4)).sound, "as many as the dataset has"


def test_an_audit_of_batches_without_recognisable_rows_counts_steps_but_no_samples() -> None:
    report = rf.audit([{"x": torch.zeros(3), "y": torch.zeros(2)}, object()])
    assert (report.epochs[0].steps, findings(report)) == ((2,), {"not-counted": "unproven"})


def test_an_audit_of_an_iterator_reports_an_error_since_its_second_epoch_yields_nothing() -> None:
    report = rf.audit(iter([{"sample_id": [0, 1]}]), epochs=2)
    assert findings(report)["yields-nothing"] == "error"


def test_check_of_an_unproven_audit_raises_audit_error_unless_allow_unproven() -> None:
    report = rf.audit([{"sample_id": [0, 1]}])
    with pytest.raises(AuditError, match="not proven: which samples are expected is not known"):
        report.check()
    report.check(allow_unproven=True)


def test_an_audit_of_a_rankfeed_loader_does_not_take_a_sample_id_column_for_the_index() -> None:
    source = rf.from_dataset([{"sample_id": 1000 + i} for i in range(9)])
    assert rf.audit(rf.Loader(source, 4, shuffle=True)).sound
    dropping = rf.audit(rf.Loader(source, 4, shuffle=True, tail="drop"))
    assert (dropping.sound, findings(dropping)) == (True, {"missing-samples": "note"})
