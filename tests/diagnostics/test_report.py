"""What a report says of plans, audits, runs and loaders is what they are."""

import json
import re
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.diagnostics.test_killed_runs import campaign
from tests.support.memory import peak

import rankfeed as rf
from rankfeed.diagnostics import AuditReport, verify_plan, verify_run
from rankfeed.diagnostics.report import (
    Asked,
    Page,
    joined,
    of_audit,
    of_plan,
    of_run,
    of_stats,
    read_stats,
    shuffle,
)
from rankfeed.diagnostics.report.html import html_of
from rankfeed.diagnostics.report.page import Bars, Grid, Lines, Timeline
from rankfeed.diagnostics.verify.ledgers import read_folder
from rankfeed.errors import ArgumentError, CorruptError, RankfeedError, SourceError
from rankfeed.plan import Plan
from rankfeed.storage.ledger import SUFFIX


class Broken(Plan):
    """A plan that reads sample 3 instead of sample 4."""

    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        ids = super().sample_ids(epoch, positions)
        return np.where(ids % 10 == 4, ids - 1, ids)


def drawn(plan: Plan, blocks: Any, asked: Asked) -> Page:
    return of_plan(
        plan,
        blocks,
        asked,
        verify_plan(plan, ranks=asked.ranks, batch_size=asked.batch_size, tail=asked.tail, start=asked.start),
    )


def figure(page: Page, title: str) -> Any:
    (found,) = [each for part in page.parts for each in part.figures if each.title.startswith(title)]
    return found


@settings(max_examples=25, deadline=None)
@given(
    sizes=some.lists(some.integers(0, 40), min_size=1, max_size=50).filter(lambda sizes: sum(sizes) >= 4),
    ranks=some.integers(1, 4),
    batch_size=some.integers(1, 9),
    kind=some.sampled_from(["none", "global", "window"]),
    tail=some.sampled_from(["even", "drop", "pad"]),
)
def test_a_plan_is_drawn_as_it_is_read(
    sizes: list[int], ranks: int, batch_size: int, kind: Any, tail: Any
) -> None:
    plan = Plan(sizes, shuffle=kind, window=16)
    asked = Asked(ranks, batch_size, tail=tail)
    page = drawn(plan, sizes, asked)
    assert page.word == ("look" if "leaves out" in page.verdict else "good")
    schedules = [asked.schedule(plan, rank) for rank in range(ranks)]
    if not len(schedules[0]):
        return
    places = figure(page, "Where each rank reads")
    for row, schedule in zip(places.values, schedules, strict=True):
        for step, value in zip(map(int, places.columns), row, strict=True):
            ids = schedule.batch(step)[schedule.valid(step)]
            assert value == (None if not len(ids) else pytest.approx(ids[0] / plan.num_samples * 100))
    times = figure(page, "When each part")
    assert not times.marks or tail == "drop"
    stretch = schedules[0].end - schedules[0].start
    parts = min(stretch, 60)
    ends = [schedules[0].position_after(step) for step in range(len(schedules[0]))]
    for number, step in enumerate(map(int, times.columns)):  # the step that the first sample of a column is in
        assert sum(end <= number * stretch // parts for end in ends) == step
    cuts = np.unique(np.concatenate([[0], np.cumsum(sizes)]))
    shares = np.diff(cuts[[number * (len(cuts) - 1) // len(times.rows) for number in range(len(times.rows) + 1)]])
    if len(cuts) == 2:  # one block is shown in equal parts
        return
    # Every column is a stretch of the epoch: its samples all lie somewhere.
    assert np.allclose(np.array(times.values).T @ (shares / plan.num_samples), 1, atol=1e-3)


def test_batches_of_numpys_shuffle_are_as_large_as_the_plans() -> None:
    bars = figure(drawn(Plan([1] * 20), [1] * 20, Asked(2, 10)), "Blocks that")
    assert (bars.labels, [list(each.values) for each in bars.series]) == (["10"], [[2], [2]])


def test_one_sample_has_no_neighbours_and_no_order() -> None:
    page = drawn(Plan(1), 1, Asked(1, 1))
    assert [part.title for part in page.parts] == [
        "Who reads what, and when",
        "Padding, and the end of the epoch",
    ]


def test_what_a_plan_repeats_and_leaves_out_is_marked() -> None:
    page = drawn(Broken(100), 100, Asked(2, 5))
    assert page.word == "bad"
    times = figure(page, "When each part")
    signs = [mark.sign for mark in times.marks]
    assert (signs.count("again"), signs.count("gap")) == (10, 10)
    for mark in times.marks:  # in the row that sample 3, 13, ... or 4, 14, ... is in
        low, _, high = times.rows[mark.row].partition("–")
        wanted = 3 if mark.sign == "again" else 4
        assert any(sample % 10 == wanted for sample in range(int(low), int(high or low) + 1))


def test_the_end_of_the_epoch_and_the_start_are_told() -> None:
    page = drawn(Plan(100), 100, Asked(3, 8, tail="pad", start=20))
    end = figure(page, "How the epoch ends")
    assert [list(each.values) for each in end.series] == [[8, 8, 2], [0, 0, 6]]
    assert "80 samples that were left" in page.verdict
    assert page.facts["consumed before"] == "20"
    assert drawn(Plan(100), 100, Asked(3, 8, tail="drop")).word == "look"
    assert drawn(Plan(10), 10, Asked(1, 8, start=10)).parts


def test_a_trillion_samples_on_a_thousand_ranks_fit_a_screen() -> None:
    plan, asked = Plan(10**12), Asked(1000, 1000)
    verdict = verify_plan(Plan(100), ranks=2, batch_size=5)
    most, page = peak(lambda: of_plan(plan, np.full(1000, 10**9), asked, verdict))
    assert most < 64 * 2**20
    assert len(msgspec.json.encode(page)) < 2**19
    places = figure(page, "Where each rank reads")
    assert (len(places.rows), len(places.columns)) == (32, 60)
    assert (places.rows[-1], places.columns[-1]) == ("999", "999999")
    assert "32 of 1,000 ranks and 60 of 1,000,000 steps" in places.caption
    assert "drawn from each column" in figure(page, "When each part").caption


@pytest.mark.parametrize(
    ("plan", "like_perfect", "words"),
    [
        (Plan(np.full(200, 100), shuffle="none"), False, "not shuffled"),
        (Plan(np.full(200, 100), shuffle="global"), True, "No figure tells"),
        (Plan(np.full(200, 100), shuffle="window", window=500), False, "Mixed, but not as a perfect shuffle"),
    ],
    ids=["none", "global", "window"],
)
def test_a_shuffle_is_judged_against_a_perfect_one(plan: Plan, like_perfect: bool, words: str) -> None:
    starts = np.arange(0, 20_001, 100)
    found = shuffle.quality(lambda positions: plan.sample_ids(0, positions), starts, 64)
    judged, sentence = shuffle.judged(found, starts, 64)
    assert judged == like_perfect
    assert words in sentence


def test_numpys_own_shuffles_are_like_perfect_ones() -> None:
    for n, blocks in ((50, 5), (1000, 10), (30_000, 300), (10**13, 1000)):
        starts = np.array([n * number // blocks for number in range(blocks + 1)])
        found = shuffle.quality(shuffle.numpys(n), starts, 32)
        assert shuffle.judged(found, starts, 32)[0], n
        assert sum(found.near) == pytest.approx(1)


@settings(max_examples=20, deadline=None)
@given(sizes=some.lists(some.integers(1, 12), min_size=1, max_size=12), batch=some.integers(1, 40))
def test_the_blocks_of_a_batch_are_expected_as_combinatorics_says(sizes: list[int], batch: int) -> None:
    n = sum(sizes)
    batch = min(batch, n)
    expected = sum(1 - comb(n - size, batch) / comb(n, batch) for size in sizes)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    assert shuffle.perfect(starts, batch)[2] == pytest.approx(expected)
    # Of so many samples it makes no difference whether they are put back.
    assert shuffle.perfect(starts * 10**9, batch)[2] == pytest.approx(
        sum(1 - (1 - size / n) ** batch for size in sizes), rel=1e-6
    )


def audited() -> AuditReport:
    batches = [{"id": np.array(ids)} for ids in ([5, 1], [2, 5], [7], [5])]
    return rf.audit(batches, key="id", universe=[1, 2, 3, 5, 6], epochs=2)


def test_an_audit_is_drawn_with_what_came_twice_and_what_did_not_come() -> None:
    page = of_audit(audited(), title="mine")
    assert (page.title, page.word) == ("mine", "bad")
    assert page.findings == [str(each) for each in audited().findings]
    epochs = figure(page, "Samples by epoch")
    assert [list(each.values) for each in epochs.series] == [[4, 4], [2, 2], [2, 2]]
    who = figure(page, "Who had batches when")
    assert [(mark.sign, mark.at) for mark in who.marks] == [("again", 1), ("again", 3)]
    assert [row[:2] for row in figure(page, "Examples").rows][:3] == [
        ["5", "came 3 times"],
        ["3", "did not come"],
        ["6", "did not come"],
    ]
    sizes = figure(page, "Batches by size")
    assert (sizes.labels, list(sizes.series[0].values)) == (["1", "2"], [2, 2])


def test_a_sound_audit_is_good_and_one_that_was_not_told_what_should_come_is_to_be_looked_at() -> None:
    batches = [{"id": [0, 1]}, {"id": [2]}]
    assert of_audit(rf.audit(batches, key="id", universe=3)).word == "good"
    assert of_audit(rf.audit(batches, key="id")).word == "look"
    assert of_audit(rf.audit(batches, key="id", universe=3, max_steps=1)).word == "look"


def test_an_audit_in_which_the_order_alone_is_wrong_says_so() -> None:
    page = of_audit(rf.audit([{"id": [3, 1]}, {"id": [0, 2]}], key="id", universe=4, epochs=2))
    assert "epochs have the same order" in page.findings[0]
    assert page.word == "good"


def test_an_epoch_with_samples_that_should_not_come_is_the_one_to_look_at() -> None:
    epochs = iter([[{"id": [0, 1]}], [{"id": [0, 1, 9]}]])

    class Changing:
        def __iter__(self) -> Any:
            return iter(next(epochs))

    rows = figure(of_audit(rf.audit(Changing(), key="id", universe=2, epochs=2)), "Examples").rows
    assert rows == [["9", "should not have come", ""]]


def test_an_audit_is_read_as_it_was_saved(tmp_path: Path) -> None:
    report = audited()
    assert AuditReport.load(report.save(tmp_path / "audit.json")) == report
    assert "<svg" in report.html(tmp_path / "audit.html").read_text()
    with pytest.raises(ArgumentError, match="cannot be written"):
        report.save(tmp_path / "none" / "audit.json")


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"by_content":false,"cut":false,"epochs":[]}', "[" * 100_000]
)
def test_a_file_that_is_no_audit_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a").write_text(content)
    with pytest.raises(CorruptError, match="not the report of an audit"):
        AuditReport.load(tmp_path / "a")
    with pytest.raises(SourceError, match="cannot be read"):
        AuditReport.load(tmp_path / "nowhere")


@settings(max_examples=150, deadline=None)
@given(data=some.data())
def test_an_audit_with_anything_changed_is_refused_or_drawn(tmp_path_factory: Any, data: Any) -> None:
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
    report.html(file.with_suffix(".html"))


def resumed(ledgers: Path) -> tuple[Any, Page]:
    """Two ranks that go on from before where they stopped: the verdict, and the page."""
    source = rf.from_dataset([{"x": i} for i in range(100)])
    state: dict[str, Any] = {}
    for steps in (6, 99):
        for rank in (0, 1):
            here = rf.Topology(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
            loader = rf.Loader(source, 5, shuffle=True, audit=ledgers, topology=here)
            if steps == 99:
                loader.load_state_dict(state)
            for number, _ in enumerate(loader):
                if steps == 6 and number == 3:
                    state = loader.state_dict()
                if number + 1 == steps:
                    break
    verdict = verify_run(ledgers)
    return verdict, of_run(verdict, read_folder(ledgers, lambda share: None)[0])


def test_a_run_is_drawn_with_its_launches_and_what_came_again(tmp_path: Path) -> None:
    verdict, page = resumed(tmp_path)
    (loader_run,) = verdict.loaders
    epochs = figure(page, "Samples by epoch")
    assert epochs.series[0].values == [float(each.delivered) for each in loader_run.epochs]
    assert epochs.series[1].values == [float(each.again) for each in loader_run.epochs]
    assert sum(epochs.series[1].values) == 20
    when = figure(page, "Who delivered when")
    assert when.rows == ["0", "1"]
    assert sum(span.again for span in when.spans) == 2
    assert page.word == ({True: "good", False: "bad", None: "look"}[verdict.sound])
    counts = figure(page, "What counts")
    assert sorted((span.start, span.end) for span in counts.spans) == [(0, 40), (40, 100)]


def test_a_job_of_which_nothing_is_known_is_not_called_good(tmp_path: Path) -> None:
    (tmp_path / f"killed{SUFFIX}").touch()
    page = of_run(verify_run(tmp_path), read_folder(tmp_path, lambda share: None)[0])
    assert (page.word, page.verdict[:37]) == ("look", "No ledger says that anything was deli")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_a_job_whose_ranks_were_killed_is_drawn_as_it_went(tmp_path: Path, seed: int) -> None:
    counted = campaign(tmp_path, rounds=3, seed=seed)
    ledgers = tmp_path / "ledger"
    verdict = verify_run(ledgers)
    page = of_run(verdict, read_folder(ledgers, lambda share: None)[0])
    assert (page.word, page.facts["launches"]) == ("good", str(counted["launches"]))
    assert page.facts["delivered again after a resume"] == f"{counted['again']:,}"
    when = figure(page, "Who delivered when")
    signs = [mark.sign for mark in when.marks]
    assert signs.count("killed") >= counted["kills"] - 2  # one may have been killed at its very end
    bars = [span for span in when.spans if not span.again]
    assert len(bars) == verdict.ledgers
    # A launch begins after the one before it was killed: bars of a row follow each other.
    for row in range(len(when.rows)):
        ends = sorted((span.start, span.end) for span in bars if span.row == row)
        assert all(before[1] <= after[0] for before, after in pairwise(ends))
    assert any(span.again for span in when.spans) == bool(counted["again"])
    print(counted, signs.count("killed"), "ends drawn")


def snapshots(path: Path, slow: float, rows: int = 30) -> Path:
    lines = [
        {"steps": i, "samples": 10 * i, "seconds": 2.0 * i, "waited_seconds": slow * i, "padding_share": 0.25}
        | {"cache_lookups": 10 * i, "cache_hits": 9 * i, "padded_bytes": 100 * i, "padding_bytes": 20 * i}
        for i in range(1, rows + 1)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_rates_and_waiting_are_those_between_snapshots(tmp_path: Path) -> None:
    read = read_stats(snapshots(tmp_path / "rank0.jsonl", slow=0.1))
    page = of_stats({"rank0": read})
    assert page.word == "good"
    assert set(figure(page, "Samples a second").series[0].values) == {5.0}
    assert set(figure(page, "Time waited").series[0].values) == {5.0}
    assert set(figure(page, "Padding").series[0].values) == {20.0}
    assert set(figure(page, "Cache hits").series[0].values) == {90.0}
    many = {f"rank{i}": read_stats(snapshots(tmp_path / f"{i}", slow=i / 5, rows=10 * i)) for i in range(1, 7)}
    page = of_stats(many)
    assert page.word == "look"
    waited = figure(page, "Time waited")
    assert [each.name for each in waited.series] == ["least", "median", "most"]
    assert [each.values[0] for each in waited.series] == [10.0, 30.0, 60.0]
    assert [each.values[-1] for each in waited.series] == [60.0, 60.0, 60.0]


def test_a_loader_that_was_made_anew_goes_on_where_the_one_before_it_was(tmp_path: Path) -> None:
    path = snapshots(tmp_path / "rank0.jsonl", slow=0.1)
    path.write_text(2 * path.read_text())
    page = of_stats({"rank0": read_stats(path)})
    assert (page.facts["samples"], page.facts["steps of a rank"]) == ("600", "60")
    for title, value in {"Samples a second": 5.0, "Time waited": 5.0, "Padding": 20.0, "Cache hits": 90.0}.items():
        lines = figure(page, title)
        assert {*lines.series[0].values} == {value}
        assert lines.x == [2.0 * number for number in range(1, 61)]


def test_snapshots_that_are_damaged_are_refused_but_for_a_torn_end(tmp_path: Path) -> None:
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
def test_any_snapshots_are_drawn_and_what_cannot_be_is_refused(
    tmp_path_factory: Any, lines: list[dict[str, Any]], bad: Any
) -> None:
    path = tmp_path_factory.mktemp("stats") / "a"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    read = read_stats(path)
    page = html_of(of_stats({"a": read, "b": read[:1]}))
    assert "<svg" in page
    assert not re.search(r"\b(nan|inf)\b", page)
    lines[-1]["seconds"] = bad
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(CorruptError):
        read_stats(path)


def test_pages_are_joined_under_the_worst_verdict() -> None:
    page = joined([drawn(Plan(100), 100, Asked(2, 5)), of_audit(audited())])
    assert page.word == "bad"
    assert {type(each) for part in page.parts for each in part.figures} >= {Bars, Grid, Lines, Timeline}
    assert page.facts["ranks"] == "2"
    assert page.facts["ranks (An audit)"] == "1"
    assert page.parts[-2].title == "Shares of the ranks, epoch 0 (An audit)"
    assert all(finding.endswith("(An audit)") for finding in page.findings)
