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
        return ({"sample_id": number} for number in range(8))


class Noisy(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sample_id": index, "x": np.random.rand()}


def seeded_alike(_: int) -> None:
    np.random.seed(7)


def test_a_sound_loader_has_nothing_wrong_with_it() -> None:
    source = rf.from_dataset([{"x": float(i % 3)} for i in range(47)])
    for options in ({}, {"num_workers": 2}, {"tail": "pad"}):
        loader = rf.Loader(source, 4, shuffle=True, id_column="number", **options)  # type: ignore[arg-type]
        report = rf.audit(loader, epochs=2)
        report.check()
        assert report.ok
        assert [(each.samples, each.unique, each.missing, each.unknown) for each in report.epochs] == [
            (47, 47, 0, 0)
        ] * 2
        assert "nothing is wrong" in str(report)
        assert json.loads(json.dumps(report.as_dict()))["findings"] == []
    assert rf.audit(DataLoader(Numbers(), 3, shuffle=True), epochs=2, universe=20).ok


def test_what_is_missing_and_what_comes_twice_is_named_with_its_places() -> None:
    batches = [{"id": np.array(ids)} for ids in ([5, 1], [2, 5], [7], [5])]
    report = rf.audit(batches, key="id", universe=[1, 2, 3, 5, 6])
    (epoch,) = report.epochs
    assert (epoch.samples, epoch.unique, epoch.repeated, epoch.missing, epoch.unknown) == (6, 4, 2, 2, 1)
    assert (epoch.missing_keys, epoch.unknown_keys) == (("3", "6"), ("7",))
    (repeat,) = epoch.repeats
    assert (repeat.key, repeat.times) == ("5", 3)
    assert [(place.step, place.row) for place in repeat.places] == [(0, 0), (1, 1), (3, 0)]
    assert epoch.ranks[0].batch_sizes == {1: 2, 2: 2}
    with pytest.raises(AuditError, match="2 of 6 deliveries repeat a sample: 5 at rank 0, step 0, row 0"):
        report.check()


def test_names_that_are_no_numbers_are_told_as_they_were_declared() -> None:
    report = rf.audit([{"id": ["a", "b"]}, {"id": ["b"]}], key="id", universe=["a", "b", "c"])
    assert report.epochs[0].missing_keys == ("'c'",)
    assert report.epochs[0].repeats[0].key == "'b'"


def test_samples_are_counted_the_same_in_little_memory(tmp_path: Path) -> None:
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


def test_workers_that_each_read_everything_are_found() -> None:
    report = rf.audit(DataLoader(Stream(), 2, num_workers=2))
    assert (report.epochs[0].samples, report.epochs[0].unique) == (16, 8)
    assert any("between workers" in each for each in report.findings)
    assert any(
        "workers 0, 1 of rank 0 read the same samples in the same order" in each for each in report.findings
    )


def test_an_order_that_repeats_is_found_and_one_that_changes_is_not() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(), 1, 0, shuffle=True)  # type: ignore[arg-type]
    loader = DataLoader(Numbers(), 5, sampler=sampler)
    assert any("epochs 0, 1 have the same order" in each for each in rf.audit(loader, epochs=2).findings)
    assert rf.audit(loader, epochs=2, before_epoch=sampler.set_epoch).ok


def test_workers_that_draw_the_same_numbers_are_found_and_others_are_not() -> None:
    alike = DataLoader(Noisy(), 2, num_workers=2, worker_init_fn=seeded_alike)
    findings = rf.audit(alike, epochs=2).findings
    assert any(
        "rank 0 worker 0, rank 0 worker 1 draw the same random numbers from numpy" in each for each in findings
    )
    assert any("random numbers from numpy in each epoch" in each for each in findings)
    own = alike.collate_fn
    assert not [each for each in rf.audit(DataLoader(Noisy(), 2, num_workers=2)).findings if "random" in each]
    assert alike.collate_fn is own
    # Seeded alike, and never drawn from: no harm.
    calm = DataLoader(Numbers(), 2, num_workers=2, worker_init_fn=seeded_alike)
    assert not [each for each in rf.audit(calm).findings if "numpy" in each]


def test_workers_that_draw_the_same_numbers_are_found_from_their_first_batch_on() -> None:
    alike = DataLoader(Noisy(), 10, num_workers=2, worker_init_fn=seeded_alike)
    assert any("rank 0 worker 0, rank 0 worker 1 draw" in each for each in rf.audit(alike).findings)


class Looking(DataLoader[Any]):
    """Looks into its batches."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield dict(batch.items())


def test_loaders_are_left_as_they_were() -> None:
    persistent = DataLoader(Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True)
    assert rf.audit(persistent, epochs=2, universe=20).ok
    assert isinstance(next(iter(persistent)), dict)
    assert rf.audit(Looking(Numbers(), 4, num_workers=1), universe=20).ok
    plain = DataLoader(Numbers(), 4, num_workers=1, worker_init_fn=seeded_alike)
    assert rf.audit(plain, universe=20).ok
    assert plain.worker_init_fn is seeded_alike


def test_loaders_of_ours_of_any_kind_have_nothing_wrong_with_them() -> None:
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
        assert report.ok, (options, report)
        assert report.epochs[0].unique == 31
    loader = rf.Loader(source, 4, id_column="number", shuffle=True)
    next(iter(loader))
    resumed = rf.Loader(source, 4, id_column="number", shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert rf.audit(resumed).ok, "what came before was never asked for"


def test_any_two_epochs_of_one_order_are_found() -> None:
    epochs = iter([[3, 1, 2], [2, 3, 1], [2, 3, 1]])

    class Orders:
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            return iter([{"sample_id": next(epochs)}])

    assert "epochs 1, 2 have the same order" in rf.audit(Orders(), epochs=3).findings[0]


def test_a_full_disk_is_an_error_and_no_miscount(tmp_path: Path) -> None:
    code = """
import resource, signal, rankfeed as rf
batches = [{"id": list(range(start, start + 100))} for start in range(0, 3000, 100)]
import rankfeed.diagnostics.audit.trace, rankfeed.loading, torch
resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, 24_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    print(rf.audit(batches, key="id", universe=6000))
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
    assert "AuditError keys could not be sorted on rank 0" in done.stdout, (done.stdout, done.stderr)


def test_samples_without_ids_are_known_by_their_content() -> None:
    report = rf.audit(DataLoader([torch.tensor([float(i // 2)]) for i in range(6)], 2))  # type: ignore[arg-type]
    assert report.by_content
    assert (report.epochs[0].samples, report.epochs[0].unique) == (6, 3)
    assert "repeat a sample's content" in report.findings[0]


def test_a_loader_without_an_end_is_read_for_so_many_steps() -> None:
    class Endless:
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            number = 0
            while True:
                yield {"sample_id": [number]}
                number += 1

    report = rf.audit(Endless(), max_steps=30, universe=1000)
    assert report.cut
    assert report.epochs[0].steps == (30,)
    assert report.ok, "the rest was never asked for"


def test_what_an_audit_cannot_count_is_an_error_that_says_why() -> None:
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

    with pytest.raises(AuditError, match="whole numbers in some epochs"):
        rf.audit(Changing(), epochs=2)
    for universe in (2.0, "ab", True, np.array(2.5)):
        with pytest.raises(ArgumentError, match=r"(?s)invalid universe.*a number of samples"):
            rf.audit([{"id": [1]}], key="id", universe=universe)
    assert rf.audit([{"id": [0, 1]}], key="id", universe=np.int64(2)).ok
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
def test_ranks_are_counted_together_and_hear_the_same(tmp_path: Path) -> None:
    jobs.run(jobs.torchrun(2, SCRIPT, tmp_path), tmp_path / "log", 150)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0] == told[1]
    found = told[0]
    assert found["ours"] == found["sampler"] == found["peers"] == []
    assert "ranks 0, 1 read the same samples in the same order" in found["unsharded"][-1]
    assert "between ranks" in found["unsharded"][0]
    assert found["padding"] == [
        "epoch 0: 1 of 8 deliveries repeat a sample (between ranks): 0 at rank 0, step 0, row 0; "
        "rank 1, step 3, row 0"
    ]
    assert found["uneven"] == [
        "epoch 0: rank 1 ends after 3 steps and rank 0 goes on to 4: a collective in step 3 "
        "(from 0) would wait for ever"
    ]
    assert "the loader failed on rank 1" in found["failing"]
    assert "keys could not be sorted on rank 0" in found["other kind"]
    assert "asked for different audits" in found["other epochs"]
    assert "asked for different audits" in found["other universe"]
    assert "the audit could not begin on rank 1" in found["other folder"]
    assert "the audit could not begin on rank 1" in found["no number"]
    assert "the loader failed on rank 1" in found["mixed keys"]
