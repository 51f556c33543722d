"""The audit proves an epoch, or says how many samples are missing and repeated, and which."""

from __future__ import annotations

import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.loading.feeds import ENGINES, NAMES, Tuples, delivered, feed, state_after, take
from torch.nn.utils.rnn import pad_sequence

import rankfeed as rf
from rankfeed.errors import AuditError, TransformError
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
def test_a_single_rank_loader_with_audit_reports_each_epoch_when_it_ends(engine: dict[str, Any]) -> None:
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
def test_merged_epoch_audits_of_all_ranks_prove_that_no_sample_is_missing_or_repeated(
    world_size: int, tail: str, shuffle: str
) -> None:
    parts = [report(rank, world_size, tail=tail, shuffle=shuffle) for rank in range(world_size)]
    together = EpochAudit.merge(parts)
    together.check()
    assert together.complete
    assert (together.missing, together.repeated) == (0, 0)
    assert len(together.delivered) == (50 // (4 * world_size) * 4 * world_size if tail == "drop" else 50)
    # In any order, and in several goes.
    EpochAudit.merge([EpochAudit.merge(parts[1:]), parts[0]]).check()


# reports that do not fit together: the rank, number of ranks and options of each, the error
UNFIT: list[tuple[list[tuple[int, int, dict[str, Any]]], str]] = [
    (
        [(0, 2, {"batch_size": 5})] * 2,
        r"(?s)25 samples missing.*ranks \[0\], none from \[1\].*every process its own rank",
    ),
    ([(0, 1, {}), (1, 2, {})], "different parts of the data"),
    ([(rank, 4, {}) for rank in (0, 1, 3)], r"none from \[2\]"),
    ([(0, 2, {}), (0, 2, {"batch_size": 5}), (1, 2, {})], "processes of one rank delivered different samples"),
    ([(0, 2, {}), (1, 2, {"seed": 9})], r"(?s)different parts of the data.*plan"),
    ([(0, 2, {}), (1, 2, {"batch_size": 5})], r"(?s)different parts of the data.*batches of 4.*batches of 5"),
    ([], "no reports"),
]


@pytest.mark.parametrize(("parts", "said"), UNFIT)
def test_merging_inconsistent_epoch_audits_raises_audit_error(parts: list[Any], said: str) -> None:
    with pytest.raises(AuditError, match=said):
        EpochAudit.merge([report(rank, ranks, **options) for rank, ranks, options in parts]).check()


def test_duplicate_audits_of_the_same_rank_count_once_when_merged() -> None:
    together = EpochAudit.merge([report(rank, 2) for rank in (0, 1, 0, 1)])
    together.check()
    assert len(together.delivered) == 50


def counted(steps: Sequence[int], size: int = 100) -> EpochAudit:
    """What a rank reports that delivered these steps."""
    schedule = Schedule(Plan(size), batch_size=10, topology=Topology())
    audit = EpochAudit.of_rank(schedule, "plan")
    for step in steps:
        audit.add(schedule, step, schedule.batch(step))
    return audit


@pytest.mark.parametrize("lost", [1, 3, 10])
def test_audit_error_names_the_count_and_range_of_missing_positions(lost: int) -> None:
    first = 100 - 10 * lost
    with pytest.raises(AuditError, match=rf"{10 * lost} samples missing, 0 repeated") as caught:
        counted(range(10 - lost)).check()
    assert f"positions {first} to 100 missing" in str(caught.value)


@pytest.mark.parametrize("steps", [[0, 1, 1], [0, 2], [1]])
def test_a_repeated_or_skipped_step_raises_audit_error(steps: list[int]) -> None:
    with pytest.raises(AuditError, match=r"(?s)other samples than the plan.*expected: step \d"):
        counted(steps)


def test_merged_audits_of_ranks_with_different_numbers_of_steps_raise_audit_error() -> None:
    parts = [report(0, 2), report(1, 2)]
    parts[1].delivered.steps[1] -= 1
    with pytest.raises(AuditError, match="different numbers of steps"):
        EpochAudit.merge(parts).check()


@pytest.mark.parametrize("new", [1, 2, 3])
def test_audit_of_a_resumed_epoch_covers_the_positions_from_the_resume_on(new: int) -> None:
    together = EpochAudit.merge([report(rank, new, state_after(3, 0, 2)) for rank in range(new)])
    together.check()
    assert (together.start, together.end, len(together.delivered)) == (24, 50, 26)


def test_audit_after_resuming_at_the_end_of_an_epoch_covers_the_whole_next_epoch() -> None:
    after = report(0, 1, state_after(len(feed())))
    after.check()
    assert (after.epoch, after.start, len(after.delivered)) == (1, 0, 50)


def test_an_epoch_left_early_has_no_audit_report() -> None:
    loader = feed(audit=True)
    take(iter(loader), 3)
    assert loader.audit_report is None
    list(loader)
    assert loader.audit_report is not None


def test_one_rank_of_several_without_a_process_group_has_an_incomplete_audit_report() -> None:
    loader = feed(1, 2, audit=True)
    list(loader)
    assert isinstance(loader.audit_report, EpochAudit)
    assert not loader.audit_report.complete


def test_a_batch_built_for_another_step_raises_audit_error(monkeypatch: pytest.MonkeyPatch) -> None:
    build_step = BatchBuilder.build_step

    def wrong(self: BatchBuilder, schedule: Schedule, step: int, *copies: Any) -> Any:
        return build_step(self, schedule, 0 if step == 2 else step, *copies)._replace(step=step)

    monkeypatch.setattr(BatchBuilder, "build_step", wrong)
    with pytest.raises(AuditError, match=r"(?s)other samples than the plan.*rank 0, epoch 0, step 2"):
        list(feed(audit=True))


def test_a_pickled_epoch_audit_is_small_for_any_number_of_samples() -> None:
    assert max(len(pickle.dumps(report(size=size, batch_size=1))) for size in (10, 5000)) < 2048


def test_world_size_1_inside_a_larger_process_group_raises_audit_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    source = rf.from_dataset([{"x": 1}] * 4)
    with pytest.raises(rf.errors.AuditError, match="has world size 1"):
        list(rf.Loader(source, 2, topology=rf.Topology(), audit=True))
    peers = rf.Topology(launcher="mesh")  # the only data-parallel rank, with tensor-parallel peers
    assert len(list(rf.Loader(source, 2, topology=peers, audit=True))) == 2


# What the user's functions return: rows are delivered, or it is an error, or "not proven".


@dataclass
class Graphs:
    x: torch.Tensor
    y: torch.Tensor


def rows_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"y": torch.tensor([int(sample["y"]) for sample in samples]), "name": [s["name"] for s in samples]}


def without_sevens(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return rows_of([sample for sample in samples if sample["y"] % 70])


def batch_without_sevens(batch: dict[str, Any]) -> dict[str, Any]:
    kept = torch.nonzero(batch["y"] % 70).ravel()
    return {name: value[kept] for name, value in batch.items() if isinstance(value, torch.Tensor)}


def flattened(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.cat([torch.from_numpy(sample["x"]) for sample in samples]), "scale": torch.tensor(0.5)}


def batch_flattened(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"].flatten(), "y": batch["y"]}


def flattened_with_ids(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return flattened(samples) | {"id": torch.tensor([sample["id"] for sample in samples[::-1]])}


def packed_in_pairs(samples: list[dict[str, Any]]) -> dict[str, Any]:
    rows = -(-len(samples) // 2)
    return {"x": torch.zeros(rows, 9), "id": [[s["id"] for s in samples[i::rows]] for i in range(rows)]}


def ids_without_sevens(samples: list[dict[str, Any]]) -> dict[str, Any]:
    kept = [sample for sample in samples if sample["y"] % 70]
    return flattened(samples) | {"id": torch.tensor([sample["id"] for sample in kept])}


def two_views(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"views": torch.zeros(2 * len(samples), 3), "y": rows_of(samples)["y"]}


def boxes(samples: list[dict[str, Any]]) -> list[Any]:
    """Images and their targets, as for detection."""
    return [(torch.zeros(3, 4, 4), {"boxes": torch.zeros(i % 3, 4), "area": 0.5}) for i in range(len(samples))]


def zipped_boxes(samples: list[dict[str, Any]]) -> Any:
    return tuple(zip(*boxes(samples), strict=True))


FEWER: list[dict[str, Any]] = [
    {"collate_fn": without_sevens, "id_column": None},
    {"collate_fn": without_sevens},
    {"collate_fn": ids_without_sevens},
    {"batch_transform": batch_without_sevens},
    {"batch_transform": batch_without_sevens, "id_column": None},
    {"collate_fn": rows_of, "batch_transform": batch_without_sevens, "id_column": None},
    {"collate_fn": lambda samples: (*[without_sevens(samples)["y"]] * 2, 3), "id_column": None},
    {"collate_fn": lambda samples: Graphs(*[without_sevens(samples)["y"]] * 2), "id_column": None},
    {"batch_transform": lambda batch: {"nested": [batch_without_sevens(batch)], "none": None}, "id_column": None},
    {"batch_transform": lambda batch: {name: value[:10] for name, value in batch.items()}, "id_column": None},
    {"collate_fn": lambda samples: zipped_boxes(samples[:10]), "id_column": None},
]


@pytest.mark.parametrize("options", FEWER, ids=range(len(FEWER)))
@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_a_collate_fn_or_batch_transform_that_drops_rows_raises_transform_error(
    engine: dict[str, Any], options: dict[str, Any]
) -> None:
    loader = feed(size=50, batch_size=12, shuffle=False, **options, **engine)
    name = "batch_transform" if "batch_transform" in options else "collate_fn"
    with pytest.raises(TransformError, match=f"{name} returned a batch that lacks rows") as caught:
        list(loader)
    assert "samples 0 to 11, rank 0, epoch 0, step 0" in str(caught.value)
    assert "source.select(ids)" in str(caught.value)
    by_ids = options in ({"collate_fn": ids_without_sevens}, {"batch_transform": batch_without_sevens})
    assert ("no 0, 7 in column 'id'" if by_ids else "10 rows in every array") in str(caught.value)
    assert loader.stats()["samples"] == 0


PROVEN: list[dict[str, Any]] = [
    {"collate_fn": rows_of, "id_column": None},
    {"collate_fn": rows_of},
    {"collate_fn": flattened_with_ids},
    {"collate_fn": packed_in_pairs},
    {"collate_fn": list, "id_column": None},
    {"collate_fn": boxes, "id_column": None},
    {"collate_fn": zipped_boxes, "id_column": None},
    {"batch_transform": lambda batch: {**batch, "noise": torch.zeros(3)}},
    {"batch_transform": lambda batch: (batch["y"], [batch["x"]], 5, "a"), "id_column": None},
    {"batch_transform": dict, "ragged": "list", "id_column": None},
    {"batch_transform": dict, "ragged": "nested", "columns": ["y", "tokens"], "id_column": None},
    {"batch_transform": dict, "bytes_as": "view", "id_column": None, "batch_size": 3},
    {"transform": lambda sample: {"y": sample["y"]}},
]


@pytest.mark.parametrize("options", PROVEN, ids=range(len(PROVEN)))
@pytest.mark.parametrize("tail", ["even", "pad"])
def test_audit_is_sound_for_batches_with_a_row_or_id_for_each_sample(
    options: dict[str, Any], tail: str, tmp_path: Path
) -> None:
    options = {"batch_size": 12, "tail": tail, **options}
    if options.get("collate_fn") in (list, boxes, zipped_boxes):  # batches that cannot have a mask
        options["tail"] = "even"
    loader = feed(size=50, audit=True, **options)
    batches = list(loader)
    assert loader.stats()["unproven_samples"] == 0
    assert loader.unproven_samples == {}
    assert loader.audit_report is not None
    assert loader.audit_report.sound
    if loader.id_column is not None and options.get("collate_fn") is not packed_in_pairs:
        once = Counter(sample_id for batch in batches for sample_id in batch["id"].tolist())
        assert once.keys() == Counter(range(50)).keys()
        assert tail == "pad" or once == Counter(range(50))
    list(feed(size=50, audit=tmp_path, **options))
    assert rf.verify_run(tmp_path).sound


UNPROVEN: list[tuple[str, dict[str, Any]]] = [
    ("collate_fn", {"collate_fn": flattened, "id_column": None}),
    ("collate_fn", {"collate_fn": flattened}),  # the loader adds the ids, which show nothing
    ("collate_fn", {"collate_fn": two_views}),
    ("collate_fn", {"collate_fn": lambda samples: rows_of([*samples, *samples]), "id_column": None}),
    ("collate_fn", {"collate_fn": flattened, "batch_transform": dict}),
    ("collate_fn", {"collate_fn": lambda samples: {"graphs": object()}, "id_column": None}),
    ("collate_fn", {"collate_fn": lambda samples: {}, "id_column": None}),
    ("collate_fn", {"collate_fn": lambda samples: boxes(samples[1:]), "id_column": None}),
    ("collate_fn", {"collate_fn": lambda samples: (np.zeros(20), np.zeros(3)), "id_column": None}),
    ("collate_fn", {"collate_fn": lambda samples: [torch.zeros(3, 4)] * 2 * len(samples), "id_column": None}),
    ("batch_transform", {"batch_transform": batch_flattened}),
    ("batch_transform", {"batch_transform": lambda batch: {**batch, "id": batch["id"].repeat(2)}}),
    ("batch_transform", {"collate_fn": rows_of, "batch_transform": lambda batch: {"y": batch["y"].repeat(3)}}),
]


@pytest.mark.parametrize(("function", "options"), UNPROVEN, ids=range(len(UNPROVEN)))
@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_audit_counts_samples_as_not_proven_if_batches_have_no_row_for_each_sample(
    function: str, options: dict[str, Any], engine: dict[str, Any], tmp_path: Path
) -> None:
    loader = feed(size=50, batch_size=12, audit=True, **options, **engine)
    with pytest.warns(UserWarning, match=rf"epoch 0: not proven.*50 samples of batches of {function}.*id_column="):
        list(loader)
    assert loader.stats()["unproven_samples"] == loader.stats()["samples"] == 50
    assert loader.unproven_samples == {function: 50}
    assert loader.audit_report is not None
    assert loader.audit_report.sound is None
    assert "not proven" in str(loader.audit_report)
    list(feed(size=50, batch_size=12, audit=tmp_path, **options, **engine))
    verdict = rf.verify_run(tmp_path)
    assert verdict.sound is None
    (finding,) = verdict.findings
    assert (finding.code, finding.severity) == ("rows-not-proven", "unproven")
    assert function in finding.what
    assert "id_column=" in finding.remedy
    (epoch,) = verdict.loaders[0].epochs
    assert epoch.unproven_steps > 0
    assert not epoch.complete
    assert "exactly once" not in str(epoch)


@pytest.mark.parametrize(
    "options",
    [
        {"collate_fn": two_views},
        {"collate_fn": two_views, "id_column": None},
        {"batch_transform": batch_flattened, "id_column": None},
    ],
)
def test_audit_of_a_loader_with_unrecognisable_rows_is_not_proven_and_names_the_function(
    options: dict[str, Any],
) -> None:
    report = rf.audit(feed(size=50, batch_size=12, **options), epochs=2)
    assert report.sound is None
    (finding,) = [each for each in report.findings if each.code == "rows-not-proven"]
    assert next(iter(options)) in finding.what
    assert "epoch 1, rank 0: 50 samples" in finding.evidence
    loaded = rf.AuditReport.load(report.save(Path(tempfile.mkdtemp(), "audit.json")))
    assert loaded.findings == report.findings


def test_audit_with_key_counts_the_ids_in_a_field_of_the_users_batches() -> None:
    def graphs(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return flattened(samples) | {"number": torch.tensor([int(sample["y"]) // 10 for sample in samples])}

    assert rf.audit(feed(size=50, collate_fn=graphs, id_column=None), key="number", universe=50).sound


def by_length(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """As for packed sequences: the longest first, padded."""
    samples = sorted(samples, key=lambda sample: -len(sample["x"]))
    return {"x": pad_sequence([torch.from_numpy(sample["x"]) for sample in samples], batch_first=True)}


def by_score(samples: list[dict[str, Any]]) -> dict[str, Any]:
    samples = sorted(samples, key=lambda sample: -sample["y"])
    return {"score": torch.tensor([sample["score"] for sample in samples])}  # float64 becomes float32


def by_name(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"constant": torch.ones(len(samples)), "name": sorted([s["name"] for s in samples], reverse=True)}


def copies(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Replaces a bad sample by another one."""
    return {"y": torch.tensor([sample["y"] for sample in [samples[1], *samples[1:]]])}


def in_order(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": pad_sequence([torch.from_numpy(sample["x"]) * 2 for sample in samples], batch_first=True)}


def flipped(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Labels are swapped: a permutation, but no other order."""
    return {"y": torch.tensor([s["y"] for s in samples]), "label": torch.tensor([1 - s["label"] for s in samples])}


def ordered_rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "x": (np.arange(2.0 * (1 + i % 5)) + 100 * i).reshape(-1, 2),
            "y": 3 * i,
            "label": i % 2,
            "score": 0.1 * i,
            "name": f"n{i:03}",
            "constant": 1.0,
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("function", [by_length, by_score, by_name, copies])
@pytest.mark.parametrize("options", [{"id_column": "id"}, {"tail": "pad"}], ids=["ids", "mask"])
@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_a_collate_fn_that_reorders_rows_raises_transform_error_instead_of_adding_wrong_ids_or_mask(
    engine: dict[str, Any], options: dict[str, Any], function: Callable[[list[Any]], Any]
) -> None:
    loader = rf.Loader(rf.from_dataset(ordered_rows(30)), 8, collate_fn=function, **options, **engine)
    with pytest.raises(TransformError, match=r"(?s)order of its samples.*samples 0 to 7.*set id_column="):
        list(loader)


@pytest.mark.parametrize("function", [in_order, flipped, torch.utils.data.default_collate])
@pytest.mark.parametrize("batch_size", [2, 8])
def test_the_id_column_added_after_a_collate_fn_matches_the_order_of_the_rows(
    batch_size: int, function: Callable[[list[Any]], Any]
) -> None:
    rows = ordered_rows(30)
    if function is not in_order:
        rows = [{"y": row["y"], "label": row["label"]} for row in rows]
    loader = rf.Loader(rf.from_dataset(rows), batch_size, collate_fn=function, id_column="id", shuffle=True)
    once: Counter[int] = Counter()
    for batch in loader:
        once.update(batch["id"].tolist())
        if "y" in batch:
            assert (batch["y"] == 3 * batch["id"]).all()
    assert once == Counter(range(30))


def test_incomparable_or_constant_values_in_a_batch_are_not_taken_for_reordered_rows() -> None:
    def summarised(samples: list[dict[str, Any]]) -> dict[str, Any]:
        samples = samples[::-1]
        return {
            "y": torch.tensor(0.5),
            "name": [None for _ in samples],
            "label": [[1] * i for i in range(len(samples))],
            "score": np.array([object() for _ in samples]),
            "constant": torch.full((len(samples),), 1e300, dtype=torch.float64),
            "x": [np.zeros(0)] * len(samples),
        }

    rows = [{**row, "constant": 1e300} for row in ordered_rows(30)]
    loader = rf.Loader(rf.from_dataset(rows), 8, collate_fn=summarised, id_column="id")
    assert Counter(i for batch in loader for i in batch["id"].tolist()) == Counter(range(30))


@pytest.mark.parametrize("batch_size", [4, 12])
def test_the_valid_mask_follows_the_ids_of_reordered_rows(batch_size: int) -> None:
    """Samples that fill the last batch are at its end, unless the function has moved them."""

    def reverse(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return torch.utils.data.default_collate(samples[::-1])

    options: dict[str, Any] = {"tail": "pad", "id_column": "id", "shuffle": True, "batch_size": batch_size}
    plain = rf.Loader(rf.from_dataset([{"y": i} for i in range(10)]), **options)
    loader = rf.Loader(rf.from_dataset([{"y": i} for i in range(10)]), collate_fn=reverse, **options)
    for batch, expected in zip(loader, plain, strict=True):
        assert batch["y"].tolist() == batch["id"].tolist() == expected["id"].tolist()[::-1]
        pairs = Counter(zip(batch["id"].tolist(), batch["valid"].tolist(), strict=True))
        assert pairs == Counter(zip(expected["id"].tolist(), expected["valid"].tolist(), strict=True))


def test_merged_epoch_audits_add_up_unproven_samples_of_all_ranks() -> None:
    with pytest.warns(UserWarning, match="not proven"):
        parts = [report(rank, 2, batch_size=12, collate_fn=flattened) for rank in range(2)]
    together = EpochAudit.merge(parts)
    together.check()
    assert together.unproven == Counter(collate_fn=50)
    assert together.sound is None


@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_a_collate_fn_over_a_stream_that_drops_rows_raises_and_rows_not_proven_are_counted(
    engine: dict[str, Any], tail: Any
) -> None:
    def loader(collate_fn: Callable[[list[Any]], Any], id_column: str | None) -> rf.Loader:
        stream = rf.from_iterable([{"y": 10 * i, "x": np.zeros((1 + i % 3, 2)), "name": "a"} for i in range(31)])
        return rf.Loader(stream, 12, tail=tail, id_column=id_column, collate_fn=collate_fn, **engine)

    with pytest.raises(TransformError, match=r"(?s)lacks rows.*10 rows.*samples 0 to 11"):
        list(loader(without_sevens, None))
    plain = loader(flattened, None)
    list(plain)
    assert plain.unproven_samples == {"collate_fn": 24 if tail == "drop" else 31}
    proven = loader(flattened_with_ids, "id")
    ids = [sample_id for batch in proven for sample_id in batch["id"].tolist()]
    assert proven.stats()["unproven_samples"] == 0
    assert tail == "pad" or Counter(ids) == Counter(range(24 if tail == "drop" else 31))


def test_a_collate_fn_that_drops_a_row_of_tuple_samples_is_an_error() -> None:
    def pairs(samples: list[Any]) -> Any:
        return [torch.stack([sample[0] for sample in samples]), [sample[1] for sample in samples]]

    kept = rf.Loader(rf.from_dataset(Tuples(30)), 12, collate_fn=pairs)
    list(kept)
    assert kept.stats()["unproven_samples"] == 0
    with pytest.raises(TransformError, match=r"(?s)lacks rows.*11 rows in every array"):
        list(rf.Loader(rf.from_dataset(Tuples(30)), 12, collate_fn=lambda samples: pairs(samples[1:])))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_tuple_of_as_many_fields_as_samples_is_not_counted_as_a_list_of_rows(size: int) -> None:
    def fields(samples: list[Any]) -> Any:
        return tuple(torch.zeros(1 + len(samples) // 2, 5) for _ in samples)

    loader = rf.Loader(rf.from_dataset(Tuples(12)), size, collate_fn=fields)
    if size == 3:
        loader = rf.Loader(rf.from_dataset(Tuples(12)), size, collate_fn=lambda samples: fields(samples)[:2])
        with pytest.raises(TransformError, match="lacks rows"):
            list(loader)
        return
    list(loader)
    assert loader.stats()["unproven_samples"] == (0 if size == 2 else 12)


def test_a_sample_field_named_like_the_id_column_raises_transform_error() -> None:
    source = rf.from_dataset([{"id": i} for i in range(4)])
    with pytest.raises(TransformError, match=r"(?s)a name that the loader needs.*'id'"):
        list(rf.Loader(source, 2, id_column="id", collate_fn=lambda samples: {"x": torch.zeros(len(samples))}))


def test_error_for_a_transform_that_returns_none_suggests_select_and_not_collate_fn() -> None:
    with pytest.raises(TransformError, match="the transform returned None") as caught:
        list(feed(transform=lambda sample: None))
    assert "collate_fn" not in str(caught.value)
    assert "source.select(ids)" in str(caught.value)


def test_a_padded_batch_counts_its_padding_rows_when_dropped_rows_are_detected() -> None:
    loader = feed(size=10, batch_size=12, tail="pad", collate_fn=rows_of, audit=True)
    (batch,) = loader
    assert sorted(delivered([batch])) == list(range(10))
    assert loader.stats()["samples"] == 10
    assert loader.audit_report is not None
    assert loader.audit_report.sound

    def unpadded(batch: dict[str, Any]) -> dict[str, Any]:
        return {name: batch[name][batch["valid"]] for name in ("y", "id")}

    with pytest.raises(TransformError, match="lacks rows"):
        list(feed(size=10, batch_size=12, tail="pad", batch_transform=unpadded))
