"""The numbers in a report are those of the plan, the audit, the run or the snapshots that it is about."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.diagnostics.ledger_jobs import random_job
from tests.diagnostics.test_plans import Broken
from tests.support.memory import peak

import rankfeed as rf
from rankfeed.diagnostics import AuditReport, verify_plan, verify_run
from rankfeed.diagnostics.report import (
    Figure,
    Page,
    audit_page,
    joined,
    plan_page,
    read_stats,
    run_page,
    stats_page,
)
from rankfeed.errors import ArgumentError, CorruptError, PlanError, RankfeedError, SourceError
from rankfeed.plan import Plan
from rankfeed.storage.ledger import SUFFIX


def figure(page: Page, title: str) -> Figure:
    (match,) = [chart for part in page.sections for chart in part.figures if chart.title.startswith(title)]
    return match


def values(chart: Figure, series: str | None = None) -> list[Any]:
    """The last column, of one series."""
    return [row[-1] for row in chart.rows if series in (None, row[1])]


def planned(plan: Plan, ranks: int, batch_size: int, **options: Any) -> Page:
    topology = rf.Topology(world_size=ranks, local_world_size=ranks)
    return plan_page(rf.Schedule(plan, batch_size=batch_size, topology=topology, **options))


def records(chart: Figure) -> list[dict[str, Any]]:
    return [dict(zip(chart.columns, row, strict=True)) for row in chart.rows]


@settings(max_examples=25, deadline=None)
@given(
    sizes=some.lists(some.integers(0, 40), min_size=1, max_size=50).filter(lambda sizes: sum(sizes) >= 4),
    ranks=some.integers(1, 4),
    batch_size=some.integers(1, 9),
    kind=some.sampled_from(["none", "global", "window"]),
    tail=some.sampled_from(["even", "drop", "pad"]),
)
def test_the_figures_on_the_page_of_a_plan_match_the_batches_of_its_schedules(
    sizes: list[int], ranks: int, batch_size: int, kind: Any, tail: Any
) -> None:
    plan = Plan(sizes, shuffle=kind, window=16)
    try:
        page = planned(plan, ranks, batch_size, tail=tail)
    except PlanError:  # fewer samples than ranks
        assert plan.num_samples < ranks
        return
    assert page.verdict is not None
    assert page.verdict.sound
    schedules = [
        rf.Schedule(plan, batch_size=batch_size, topology=rf.Topology(rank=rank, world_size=ranks), tail=tail)
        for rank in range(ranks)
    ]
    first = schedules[0]
    if not len(first):
        return
    for step, _, rank, place in figure(page, "Where each rank reads").rows:
        schedule = schedules[int(str(rank))]
        ids = schedule.batch(int(step))[schedule.valid(int(step))]  # type: ignore[arg-type]
        assert place == pytest.approx(ids[0] / plan.num_samples * 100, abs=0.006)
    if plan.num_samples < 100:
        return
    times = figure(page, "When each part")
    spans = dict.fromkeys((row[0], row[1]) for row in times.rows)
    assert [low for low, _ in spans] == [first.start, *(high for _, high in spans)][:-1]
    assert [*spans][-1][1] == first.end
    starts = [int(str(row[2]).replace(",", "")) for row in times.rows]
    bounds = [*dict.fromkeys(starts), plan.num_samples]
    for low, high in spans:  # the samples of a column are somewhere
        shares = [row[3] for row in times.rows if row[0] == low]
        covered = sum(
            share * (end - start) / plan.num_samples * (high - low)
            for share, start, end in zip(shares, bounds[:-1], bounds[1:], strict=True)
        )
        assert covered == pytest.approx(high - low, rel=0.01)


def test_cells_of_the_reading_times_of_a_shuffled_plan_lie_in_the_range_of_the_caption() -> None:
    """The caption states the range that chance explains; a plan without shuffling exceeds it."""
    for n in (100, 1000, 20_000, 10**9):
        chart = figure(planned(Plan(n), 4, 8), "When each part")
        low, high = (
            float(word.rstrip("."))
            for word in chart.caption.split()
            if word.rstrip(".").replace(".", "").isdigit() and "." in word.rstrip(".")
        )
        inside = [low - 0.05 <= value <= high + 0.05 for value in values(chart)]
        assert np.mean(inside) > 0.85, n
        assert max(values(chart)) < 3
    stored = figure(planned(Plan(20_000, shuffle="none"), 4, 8), "When each part")
    assert max(values(stored)) > 10


def test_the_page_of_a_plan_that_repeats_samples_is_unsound_and_counts_them() -> None:
    page = planned(Broken(100), 2, 5)
    assert page.verdict is not None
    assert page.verdict.sound is False
    (finding,) = page.findings
    assert (finding.code, finding.severity) == ("repeated-samples", "error")
    assert "epoch 0: 10 of 100 samples are not delivered" in finding.evidence
    assert "10 missing, 10 repeated" in page.summary


def test_the_page_of_a_plan_shows_the_last_steps_for_each_tail_and_the_start_position() -> None:
    page = planned(Plan(100), 3, 8, tail="pad", start=20)
    end = figure(page, "How the epoch ends")
    assert (values(end, "samples"), values(end, "padding rows")) == ([8, 8, 2], [0, 0, 6])
    assert "80 deliveries" in page.summary
    assert page.facts["consumed before"] == 20
    assert "4 left out by tail=drop" in planned(Plan(100), 3, 8, tail="drop").summary
    assert not planned(Plan(10), 1, 8, start=10).sections
    assert [section.title for section in planned(Plan(1), 1, 1).sections] == ["Who reads what"]


def test_the_page_of_a_trillion_samples_on_a_thousand_ranks_is_small_and_shows_32_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examined = verify_plan(Plan(10**8), ranks=100, batch_size=10, count=False)  # of all it takes seconds
    monkeypatch.setattr("rankfeed.diagnostics.report.plan.verify_plan", lambda *_, **__: examined)
    most, page = peak(lambda: planned(Plan(np.full(1000, 10**9)), 1000, 1000))
    assert most < 64 * 2**20
    assert page.verdict is not None
    assert page.verdict.sound is None  # examined at some positions, not counted
    assert len(json.dumps(page.as_dict())) < 2**19
    places = figure(page, "Where each rank reads")
    assert len(places.rows) == 32 * 60
    assert (places.rows[-1][2], places.rows[-1][0]) == ("999", 999_999)
    assert "32 of 1,000 ranks are shown. 60 of 1,000,000 steps are shown." in places.caption
    assert "examined" in figure(page, "When each part").caption


def audited() -> AuditReport:
    batches = [{"id": np.array(ids)} for ids in ([5, 1], [2, 5], [7], [5])]
    return rf.audit(batches, key="id", universe=[1, 2, 3, 5, 6], epochs=2)


def test_the_page_of_an_audit_counts_repeated_and_missing_samples_and_lists_examples() -> None:
    page = audit_page(audited(), title="mine")
    assert page.verdict is not None
    assert (page.title, page.verdict.sound) == ("mine", False)
    assert page.findings == audited().findings
    epochs = figure(page, "Samples by epoch")
    counted = {name: values(epochs, name) for name in ("delivered once", "delivered again", "missing")}
    assert counted == {"delivered once": [4, 4], "delivered again": [2, 2], "missing": [2, 2]}
    assert [row[:2] for row in figure(page, "Examples").rows][:3] == [
        ["5", "came 3 times"],
        ["3", "did not come"],
        ["6", "did not come"],
    ]


def test_the_page_of_an_audit_draws_repeats_at_the_steps_at_which_they_occurred() -> None:
    """Half of all deliveries are repeats, all of them in the second half of the epoch."""
    batches = [{"id": np.arange(20) + 20 * (step % 50)} for step in range(100)]
    page = audit_page(rf.audit(batches, key="id", universe=1000))
    chart = figure(page, "Samples by epoch")
    assert (values(chart, "delivered once"), values(chart, "delivered again")) == ([1000], [1000])
    where = figure(page, "Where samples repeat").rows
    assert {row[3] for row in where if row[1] <= 50} == {0}  # type: ignore[operator]
    assert {row[3] for row in where if row[0] >= 50} == {20}  # type: ignore[operator]


def test_a_chart_with_values_in_only_one_series_has_no_legend() -> None:
    chart = figure(audit_page(rf.audit([{"id": [0, 1]}, {"id": [2]}], key="id", universe=3)), "Samples by epoch")
    assert {row[1] for row in chart.rows} == {"delivered once"}
    assert chart.spec is not None
    assert chart.spec["encoding"]["color"]["legend"] is None


@pytest.mark.parametrize(
    ("options", "sound"), [({"universe": 3}, True), ({}, None), ({"universe": 3, "max_steps": 1}, None)]
)
def test_the_page_of_an_audit_is_sound_only_with_a_universe_and_all_steps(
    options: dict[str, int], sound: bool | None
) -> None:
    verdict = audit_page(rf.audit([{"id": [0, 1]}, {"id": [2]}], key="id", **options)).verdict
    assert verdict is not None
    assert verdict.sound is sound


def test_the_page_of_an_audit_with_the_same_order_in_each_epoch_is_sound_with_a_finding() -> None:
    page = audit_page(rf.audit([{"id": [3, 1]}, {"id": [0, 2]}], key="id", universe=4, epochs=2))
    assert page.findings[0].code == "same-order-every-epoch"
    assert page.verdict is not None
    assert page.verdict.sound


def test_the_page_of_an_audit_lists_a_sample_that_is_not_in_the_universe() -> None:
    epochs = iter([[{"id": [0, 1]}], [{"id": [0, 1, 9]}]])

    class Changing:
        def __iter__(self) -> Any:
            return iter(next(epochs))

    rows = figure(audit_page(rf.audit(Changing(), key="id", universe=2, epochs=2)), "Examples").rows
    assert rows == [["9", "is not in the universe", ""]]


def test_the_page_of_an_audit_shows_the_steps_and_samples_of_each_rank() -> None:
    report = audited()
    page = audit_page(report)
    assert values(figure(page, "Steps of each rank")) == [4]
    assert figure(page, "Samples of each rank").caption == "All the same."


def test_an_audit_report_is_equal_after_save_and_load_and_can_be_written_as_html(tmp_path: Path) -> None:
    report = audited()
    assert AuditReport.load(report.save(tmp_path / "audit.json")) == report
    assert "Samples by epoch" in report.html(tmp_path / "audit.html").read_text()
    with pytest.raises(ArgumentError, match="cannot be written"):
        report.save(tmp_path / "none" / "audit.json")


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"by_content":false,"cut":false,"epochs":[]}', "[" * 100_000]
)
def test_loading_a_file_that_is_no_audit_report_raises_corrupt_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "a").write_text(content)
    with pytest.raises(CorruptError, match="not the report of an audit"):
        AuditReport.load(tmp_path / "a")
    with pytest.raises(SourceError, match="cannot be read"):
        AuditReport.load(tmp_path / "nowhere")


@settings(max_examples=150, deadline=None)
@given(data=some.data())
def test_a_saved_audit_with_one_changed_value_is_an_error_or_can_be_drawn(
    tmp_path_factory: Any, data: Any
) -> None:
    told: Any = json.loads(json.dumps(audited().as_dict()))
    place, path = told, []
    while isinstance(place, (dict, list)) and place:
        inside, key = (
            place,
            data.draw(some.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))),
        )
        path.append(key)
        place = place[key]
    inside[key] = data.draw(some.sampled_from([None, -1, 0, 1 << 63, 1e308, "", "x", [], {}, [[]], True]))
    file = tmp_path_factory.mktemp("audit") / "a.json"
    file.write_text(json.dumps(told))
    try:
        report = AuditReport.load(file)
    except RankfeedError:
        return
    audit_page(report)


def resumed(ledgers: Path) -> tuple[Any, Page]:
    """Two ranks that resume before where they stopped: the verdict, and the page."""
    source = rf.from_dataset([{"x": i} for i in range(100)])
    state: dict[str, Any] = {}
    for steps in (6, 99):
        for rank in (0, 1):
            here = rf.Topology(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
            loader = rf.Loader(source, 5, shuffle=True, audit=ledgers, topology=here)
            if steps == 99:
                loader.load_state_dict(state)
            for step, _ in enumerate(loader):
                if steps == 6 and step == 3:
                    state = loader.state_dict()
                if step + 1 == steps:
                    break
    verdict = verify_run(ledgers)
    return verdict, run_page(verdict)


def test_the_page_of_a_run_shows_its_launches_and_samples_delivered_again_after_a_resume(tmp_path: Path) -> None:
    verdict, page = resumed(tmp_path)
    (loader,) = verdict.loaders
    epochs = figure(page, "Samples by epoch")
    assert values(epochs, "delivered once") == [epoch.delivered for epoch in loader.epochs]
    assert values(epochs, "again after a resume") == [20] == [epoch.again for epoch in loader.epochs]
    assert {row[1] for row in epochs.rows} == {"delivered once", "again after a resume"}
    assert page.verdict is not None
    assert page.verdict is verdict.verdict
    assert sorted(row[1:3] for row in figure(page, "Which launch").rows) == [[0, 40], [40, 100]]
    (launch,) = records(figure(page, "When the job ran"))
    assert launch["seconds from"] == 0 < launch["seconds to"]


def test_the_page_of_a_run_marks_missing_samples_with_crosses(tmp_path: Path) -> None:
    source = rf.from_dataset([{"x": i} for i in range(1000)])
    for rank, steps in ((0, 100), (1, 60)):
        here = rf.Topology(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        loader = rf.Loader(source, 5, audit=tmp_path, topology=here)
        for epoch in range(2):
            for step, _ in enumerate(loader, 1):
                if step == steps and not epoch:
                    break
            loader.set_epoch(1)
    page = run_page(verify_run(tmp_path))
    assert page.verdict is not None
    assert page.verdict.sound is False
    launches = figure(page, "Which launch")
    assert [row for row in launches.rows if row[3] == "missing"]
    assert launches.spec is not None
    assert launches.spec["layer"][1]["mark"]["shape"] == "cross"


def test_the_page_of_a_run_without_a_delivery_is_not_proven(tmp_path: Path) -> None:
    (tmp_path / f"killed{SUFFIX}").touch()
    page = run_page(verify_run(tmp_path))
    assert page.verdict is not None
    assert page.verdict.sound is None
    assert page.summary.startswith("No ledger has a delivery")


@pytest.mark.parametrize("seed", range(5))
def test_the_page_of_a_job_with_killed_ranks_has_its_launches_and_repeated_deliveries(
    tmp_path: Path, seed: int
) -> None:
    job = random_job(tmp_path / "ledger", seed)
    verdict = verify_run(job.folder)
    page = run_page(verdict)
    (loader,) = verdict.loaders
    assert page.facts["launches"] == len(loader.launches)
    assert page.facts["delivered again after a resume"] == loader.again == job.again.total()
    launches = [(row[1], row[2]) for row in figure(page, "When the job ran").rows]
    assert len(launches) == len(loader.launches)
    # A launch begins after the one before it was killed.
    assert all(before[1] <= after[0] for before, after in pairwise(launches))


#: The values of the figures of snapshots with slow=0.1.
STEADY = {"Samples a second": 5, "Time waited": 5, "Padding": 20, "Cache hits": 90}


def snapshots(path: Path, slow: float, rows: int = 30) -> Path:
    lines = [
        {"steps": i, "samples": 10 * i, "seconds": 2.0 * i, "waited_seconds": slow * i, "padding_share": 0.25}
        | {"cache_lookups": 10 * i, "cache_hits": 9 * i, "padded_bytes": 100 * i, "padding_bytes": 20 * i}
        for i in range(1, rows + 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_page_of_stats_shows_rates_and_waiting_between_snapshots_and_over_ranks(tmp_path: Path) -> None:
    page = stats_page({"rank0": read_stats(snapshots(tmp_path / "rank0.jsonl", slow=0.1))})
    assert page.verdict is None
    assert "does not limit" in page.summary
    for title, value in STEADY.items():
        assert {*values(figure(page, title))} == {value}
    many = {f"rank{i}": read_stats(snapshots(tmp_path / f"{i}", slow=i / 5, rows=10 * i)) for i in range(1, 7)}
    page = stats_page(many)
    assert ": loading limits" in page.summary
    waited = figure(page, "Time waited")
    assert [values(waited, name)[0] for name in ("least", "median", "most")] == [10, 30, 60]
    assert [values(waited, name)[-1] for name in ("least", "median", "most")] == [60, 60, 60]


def test_times_of_snapshots_are_not_rounded_on_the_page_of_stats(tmp_path: Path) -> None:
    """Snapshots within a millisecond were drawn above each other."""
    seconds = [1.0001, 1.0002, 1.0003, 1234567.0004]
    rows = [{"steps": i, "samples": i, "seconds": at, "waited_seconds": 0} for i, at in enumerate(seconds)]
    (tmp_path / "a").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [
        row[0] for row in figure(stats_page({"a": read_stats(tmp_path / "a")}), "Samples a second").rows
    ] == seconds


def test_snapshots_of_a_recreated_loader_continue_the_curves_of_the_loader_before_it(tmp_path: Path) -> None:
    path = snapshots(tmp_path / "rank0.jsonl", slow=0.1)
    path.write_text(2 * path.read_text())
    page = stats_page({"rank0": read_stats(path)})
    assert (page.facts["samples"], page.facts["steps of a rank"]) == (600, 60)
    for title, value in STEADY.items():
        chart = figure(page, title)
        assert {*values(chart)} == {value}
        assert [row[0] for row in chart.rows] == [2.0 * step for step in range(1, 61)]


def test_damaged_snapshots_raise_source_error_except_for_an_incomplete_last_line(tmp_path: Path) -> None:
    path = snapshots(tmp_path / "a", slow=0.1)
    whole = path.read_text()
    path.write_text(whole[:-5])
    assert len(read_stats(path)) == 29
    for content in ("", "nonsense\n", whole + "{}\n", '{"steps": "1"}\n'):
        path.write_text(content)
        with pytest.raises(SourceError):
            read_stats(path)


COUNTS = some.sampled_from([0, 1, 1000, 1 << 62])
SECONDS = some.sampled_from([0, 5e-324, 1e-9, 0.5, 1e12])
SNAPSHOT = some.fixed_dictionaries(
    {"steps": COUNTS, "samples": COUNTS, "seconds": SECONDS, "waited_seconds": SECONDS},
    optional={"padded_bytes": COUNTS, "padding_bytes": COUNTS, "cache_lookups": COUNTS, "cache_hits": COUNTS}
    | {"private_bytes": some.none() | COUNTS, "padding_share": some.floats(0, 1)},
)


@settings(max_examples=100, deadline=None)
@given(
    lines=some.lists(SNAPSHOT, min_size=1, max_size=4), bad=some.sampled_from([-1, 1e308, 1 << 70, "x", [], None])
)
def test_any_valid_snapshots_are_drawn_and_impossible_seconds_raise_corrupt_error(
    tmp_path_factory: Any, lines: list[dict[str, Any]], bad: Any
) -> None:
    path = tmp_path_factory.mktemp("stats") / "a"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_stats(path)
    for names in ("ab", "abcdefg"):
        json.dumps(stats_page({name: read[: 1 + ord(name) % 3] for name in names}).as_dict(), allow_nan=False)
    lines[-1]["seconds"] = bad
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CorruptError):
        read_stats(path)


def test_joined_report_pages_have_the_worst_verdict_and_prefixed_facts() -> None:
    page = joined([replace(planned(Plan(100), 2, 5), title="plan"), audit_page(audited(), title="audit")])
    assert page.verdict is not None
    assert page.verdict.sound is False
    assert (page.facts["plan: ranks"], page.facts["audit: ranks"]) == (2, 1)
    assert page.sections[-2].title == "audit: Shares of the ranks, epoch 0"
    assert all(finding.what.startswith("audit: ") for finding in page.findings)
