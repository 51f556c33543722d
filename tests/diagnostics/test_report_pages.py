"""A report is one file that needs no network, shows its numbers, and escapes all text from data."""

import json
import os
import re
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import vl_convert
from PIL import Image
from tests.diagnostics.test_report import audited, planned, resumed, snapshots
from tests.support.browser import Browser, browser, chromium

from rankfeed.diagnostics.audit import AuditReport, EpochReport, Place, RankEpoch, Repeat
from rankfeed.diagnostics.findings import Finding, Verdict
from rankfeed.diagnostics.judge import JudgedFacts as AuditFacts
from rankfeed.diagnostics.report import (
    Figure,
    Page,
    Section,
    StatsSnapshot,
    audit_page,
    joined,
    read_stats,
    stats_page,
    write,
)
from rankfeed.diagnostics.report.charts import bars, heatmap, lines, spans
from rankfeed.diagnostics.report.render import html, plain
from rankfeed.errors import ArgumentError, MissingExtraError
from rankfeed.plan import Plan

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'); DROP TABLE x; --",
    "</title></style></script><svg onload=alert(1)>",
    "&lt;b&gt; ]]> <!-- --> ${alert(1)} $title",
    "https://example.org/x.js",
    "\u202eleft\u0000\x1b[31m\nline\ud800",
]


class Read(HTMLParser):
    """What a browser would see of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.scripts: dict[str, str] = {}
        self.open: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append((tag, dict(attrs).get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "script":
            self.scripts[self.open[-1][1]] = data
        elif not self.open or self.open[-1][0] != "style":
            self.texts.append(data)


def everything(names: list[str]) -> Page:
    """A page with all kinds of figures, in which every text from data is one of these names."""
    pick = iter(names * 100)
    one, two, three = (f"{place} {next(pick)}" for place in range(3))
    cells: list[list[Any]] = [[0, 1, one, 0.0], [1, 2, one, 2.0], [0, 1, two, 1.0]]
    figures = [
        heatmap(next(pick), next(pick), ["x from", "x to", "row", "value"], cells, 2),
        bars(next(pick), next(pick), "label", "unit", [one, two], {one: [1, 2], two: [0, 3], three: [0, 0]}),
        bars(next(pick), next(pick), "label", "unit", [one, two], {one: [1, 2], two: [0, 3]}),
        lines(next(pick), next(pick), "x", "unit", {one: [(0, 1.0), (1, np.nan), (2, 3.0)], two: [(0, 2.0)]}),
        spans(next(pick), next(pick), "x", "row", [[one, 0, 3, two, three], [one, 1, 1, "missing", three]]),
        Figure(next(pick), next(pick), ["text", "number"], [[one, 1.5], [two, None]]),
    ]
    return Page(
        title=next(pick),
        verdict=Verdict.NOT_PROVEN,
        summary=next(pick),
        facts={next(pick): next(pick)},
        findings=[Finding("code", "error", next(pick), (next(pick),), next(pick))],
        sections=[Section(next(pick), figures)],
    )


def checked(text: str) -> Read:
    """The page is well formed, asks for nothing, and has the numbers of each figure once."""
    page = Read(text)
    assert not page.open
    assert not {"link", "img", "iframe", "object", "embed", "base", "form", "a", "svg"} & {*page.tags}
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("src", "href", "srcset", "style"), (tag, name, value)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style
    assert not re.search(r"url\(|@import", style[1])
    assert page.tags["script"] == 4
    charts = json.loads(page.scripts["charts"], parse_constant=pytest.fail)
    assert page.tags["figure"] == len(charts)
    assert page.tags["details"] == sum(chart["spec"] is not None for chart in charts)
    assert all(len(row) == len(chart["columns"]) for chart in charts for row in chart["rows"])
    return page


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_text_from_data_adds_no_tag_or_attribute_to_the_html_report(hostile: str, tmp_path: Path) -> None:
    harmless = checked(html(everything(["x" * len(plain(hostile))])))
    page = checked(html(everything([hostile])))
    assert page.tags == harmless.tags
    assert [attribute[:2] for attribute in page.attributes] == [attribute[:2] for attribute in harmless.attributes]
    assert plain(hostile) in page.texts
    assert plain(hostile) in str(json.loads(page.scripts["charts"])) or "\\" in plain(hostile)
    assert write(everything([hostile]), tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_the_html_report_has_evidence_and_remedy_of_a_finding_on_a_line_each() -> None:
    """They were one paragraph in brackets before."""
    finding = Finding("uneven-steps", "note", "ranks differ", ("rank 0: 5", "rank 1: 4"), "cut")
    texts = checked(
        html(Page(title="", verdict=None, summary="", facts={}, findings=[finding], sections=[]))
    ).texts
    at = texts.index("note: ranks differ [uneven-steps]")
    assert texts[at + 1 : at + 4] == ["rank 0: 5", "rank 1: 4", "remedy: cut"]


def test_hostile_sample_keys_and_file_names_appear_as_text_in_the_html_report(tmp_path: Path) -> None:
    rank = RankEpoch(0, 2, 4, {2: 2}, {-1: "a"})
    again = tuple(Repeat(name, 2, (Place(0, 0, 0, 0), Place(0, 0, 1, 0))) for name in HOSTILE)
    epoch = EpochReport(0, 11, 4, 2, 0, (rank,), repeats=again, missing_keys=tuple(HOSTILE))
    report = AuditReport(AuditFacts("ids", "declared", 6), (epoch,))
    stats = stats_page(
        {name: read_stats(snapshots(tmp_path / "a", 0.3)) for name in HOSTILE[:4]}, title=HOSTILE[0]
    )
    page = checked(html(joined([audit_page(report, title=HOSTILE[3]), stats])))
    assert any(HOSTILE[1] in text for text in page.texts)


def test_every_html_report_is_one_self_contained_file_of_less_than_a_megabyte(tmp_path: Path) -> None:
    pages = [
        planned(Plan(np.full(50, 40), shuffle="window", window=256, lanes=4), 4, 16, tail="pad"),
        planned(Plan(1), 1, 1),
        planned(Plan(3), 1, 4, start=3),
        planned(Plan([0, 7, 0]), 8, 4, tail="pad"),
        audit_page(audited()),
        resumed(tmp_path / "ledgers")[1],
    ]
    pages.append(stats_page({f"rank {i}": read_stats(snapshots(tmp_path / str(i), i / 5)) for i in range(1, 7)}))
    pages.append(joined(pages))
    for page in pages:
        text = html(page)
        checked(text)
        assert len(text) < 1_000_000
    empty = [
        bars("", "", "x", "y", [], {}),
        lines("", "", "x", "y", {}),
        spans("", "", "x", "y", []),
        Figure("", "", [], []),
    ]
    empty.append(heatmap("", "", ["a from", "b", "c", "d"], [], 0))
    page = Page(title="", verdict=None, summary="", facts={}, findings=[], sections=[Section("", empty)])
    checked(html(page))
    assert write(page, tmp_path / "empty.png").stat().st_size


def test_a_png_report_has_all_charts_below_each_other(tmp_path: Path) -> None:
    sizes = []
    for page in (everything(["x"]), everything(["a/long/path" * 30])):
        with Image.open(write(page, tmp_path / "a.png")) as picture:
            sizes.append(picture.size)
            pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
            blue = tuple(bytes.fromhex(LIGHT["series-1"][1:]))
            assert (pixels == blue).all(axis=1).sum() > 20_000  # bars are there
    assert sizes[0][0] > 1000
    assert sizes[1][1] > sizes[0][1] > 5 * 200  # lines of the titles, charts


def test_writing_a_report_to_a_pipe_or_directory_is_an_error_and_a_symlink_is_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    for where, message in ((pipe, "cannot be written"), (tmp_path, "cannot be written"), ("", "invalid path")):
        with pytest.raises(ArgumentError, match=message):
            write(everything(["x"]), where)
        with pytest.raises(ArgumentError, match=message):
            audited().save(where)
    assert pipe.is_fifo()
    (tmp_path / "page.html").write_text("of another")
    link.symlink_to(tmp_path / "page.html")
    assert write(everything(["x"]), link) == link
    assert not link.is_symlink()
    assert (tmp_path / "page.html").read_text() == "of another"
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link", "page.html"}


@pytest.mark.parametrize("name", ["a.html", "a.png"])
def test_writing_a_report_without_the_charting_library_raises_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from rankfeed.diagnostics.report import render

    render._vega.cache_clear()
    missing: Any = None
    monkeypatch.setitem(sys.modules, "vl_convert", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankfeed\[report\]'"):
        audited().html(tmp_path / name)
    assert not (tmp_path / name).exists()


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 has it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, two: str) -> float:
    high, low = sorted([luminance(one), luminance(two)], reverse=True)
    return (high + 0.05) / (low + 0.05)


STYLE = files("rankfeed.diagnostics.report").joinpath("page.css").read_text(encoding="utf-8")
LIGHT, DARK = (dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in STYLE.split("@media")[:2])


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_and_series_of_a_report_have_the_contrast_that_wcag_requires(palette: dict[str, str]) -> None:
    for ink in ("text", "muted", "sound", "not-proven", "diseased"):
        assert contrast(palette[ink], palette["card"]) >= 4.5, ink
        assert contrast(palette[ink], palette["ground"]) >= 4.5, ink
    for ink in ("series-1", "series-2", "series-3", "series-4"):
        assert contrast(palette[ink], palette["card"]) >= 3, ink
    levels = [luminance(palette[f"level-{level}"]) for level in range(1, 6)]
    assert levels == sorted(levels, reverse=palette is LIGHT)


def svg(figure: Figure) -> ElementTree.Element:
    """A chart as Vega draws it, in the colours of the light palette."""
    config = files("rankfeed.diagnostics.report").joinpath("vega.json").read_text(encoding="utf-8")
    for name, ink in LIGHT.items():
        config = config.replace(f"var(--{name})", ink)
    records = [dict(zip(figure.columns, row, strict=True)) for row in figure.rows]
    spec = {**(figure.spec or {}), "width": 480, "data": {"values": records}, "config": json.loads(config)}
    return ElementTree.fromstring(vl_convert.vegalite_to_svg(spec))


def drawn_as(chart: ElementTree.Element, role: str) -> list[ElementTree.Element]:
    """The elements of the marks with this class."""
    return [mark for group in chart.iter() if role in (group.get("class") or "").split() for mark in group]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 12, 33])
def test_an_axis_of_whole_numbers_has_no_fractional_tick_labels(most: int) -> None:
    cells: list[list[Any]] = [[step, step + 1, "0", 0.5] for step in range(most)]
    for figure in (
        bars("", "", "rank", "steps", ["0", "1"], {"a": [most, 0]}),
        heatmap("", "", ["step from", "step to", "rank", "share"], cells, 1),
        lines("", "", "step", "samples", {"a": [(step, step) for step in range(most + 1)]}),
        spans("", "", "position", "epoch", [["0", 0, most, "a", ""]]),
    ):
        texts = [label.text or "" for label in drawn_as(svg(figure), "role-axis-label")]
        assert len(texts) >= 3
        assert not [text for text in texts if "." in text]


@pytest.mark.parametrize("darkest", [1, 4, 100, 2.37])
def test_the_legend_of_a_heat_map_ends_at_its_maximum_and_each_value_has_its_colour(darkest: float) -> None:
    values = [darkest * (part + 1) / 8 for part in range(8)]
    cells: list[list[Any]] = [[0, 1, str(rank), value] for rank, value in enumerate(values)]
    chart = svg(heatmap("", "", ["step from", "step to", "rank", "share"], cells, darkest))
    texts = [label.text for label in drawn_as(chart, "role-legend-label")]
    assert [float(text or "nan") for text in texts] == pytest.approx(
        [darkest * part / 4 for part in range(5)], 0.01
    )
    fills = Counter(
        rect.get("fill") for rect in drawn_as(chart, "mark-rect") if (rect.get("fill") or "").startswith("rgb")
    )
    assert len(fills) == 8


def test_no_point_of_a_line_chart_is_cut_by_the_edge_of_the_chart() -> None:
    figure = lines("", "", "seconds", "%", {"a": [(0, 0.0), (5, 100.0), (10, 40.0)], "b": [(0, 0.0), (10, 100.0)]})
    places = [
        tuple(map(float, re.findall(r"-?[\d.]+", symbol.get("transform") or "")[:2]))
        for symbol in drawn_as(svg(figure), "mark-symbol")
        if symbol.get("aria-roledescription") == "point"
    ]
    assert len(places) == 5
    radius = np.sqrt(60 / np.pi)
    for x, y in places:
        assert radius <= x <= 480 - radius
        assert radius <= y <= figure.spec["height"] - radius  # type: ignore[index]


def test_a_report_of_a_rank_that_waits_for_data_is_shown_as_warned_instead_of_sound(tmp_path: Path) -> None:
    waits, keeps_up = (
        stats_page(
            {"rank 0": [StatsSnapshot(steps=1, samples=8, seconds=10, waited_seconds=waited)]}, title="rates"
        )
        for waited in (10.0, 0.1)
    )
    plan = planned(Plan(100), 2, 5)
    assert [finding.code for finding in waits.findings] == ["waits-for-data"]
    assert not keeps_up.findings
    for page, kind in (
        (waits, "warned"),
        (joined([plan, waits]), "warned"),
        (joined([plan, keeps_up]), "sound"),
        (keeps_up, ""),
    ):
        assert f'class="verdict {kind}"' in html(page)
        assert ("✓" in html(page)) == (kind == "sound")


def test_a_joined_report_shows_the_title_of_each_of_its_pages_once(tmp_path: Path) -> None:
    plan, rates = (
        planned(Plan(100), 2, 5),
        stats_page({"0": read_stats(snapshots(tmp_path / "r0", 1))}, title="Rates: r0"),
    )
    page = joined([plan, rates])
    seen = checked(html(page))
    terms = [text for text in seen.texts if text in {*plan.facts, *rates.facts}]
    assert sorted(terms) == sorted([*plan.facts, *rates.facts])
    assert not [text for text in seen.texts if text.startswith("Rates: r0: ")]
    assert seen.texts.count("Rates: r0") == 1
    assert page.as_dict()["facts"]["Rates: r0: samples"] == rates.facts["samples"]


def drawn(tab: Browser) -> None:
    deadline = time.monotonic() + 60
    while tab.value("document.body.dataset.drawn") != "yes":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_browser_draws_every_html_report_without_a_request_or_an_error(tmp_path: Path) -> None:
    if chromium() is None:
        pytest.skip("Chromium is not installed")
    plan = Plan(np.full(500, 200), shuffle="window", window=4096, lanes=8)
    pages = {
        "plan": planned(plan, 8, 32, tail="pad"),
        "rates": stats_page({f"rank {i}": read_stats(snapshots(tmp_path / str(i), i / 5)) for i in range(1, 4)}),
        "run": resumed(tmp_path / "ledgers")[1],
        "hostile": everything(HOSTILE),
        "joined": joined([audit_page(audited(), title="a/long/path" * 12), planned(Plan(100), 2, 5)]),
    }
    with browser() as tab:
        for name, page in pages.items():
            path = write(page, tmp_path / f"{name}.html")
            charts = sum(figure.spec is not None for section in page.sections for figure in section.figures)
            for width, dark in ((390, True), (1280, False)):
                tab.open(path, width=width, dark=dark)
                drawn(tab)
                assert tab.said == []
                assert tab.requests == [path.as_uri()]
                assert tab.value("document.documentElement.scrollWidth") <= width
                assert tab.value("document.querySelectorAll('.chart svg').length") == charts
                assert tab.value("document.querySelectorAll('script:not([id]), img, svg image').length") == 1
                ground = tab.value("getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 3 * 128) == dark
                # A chart has the colours of the page's mode.
                inks = tab.value("getComputedStyle(document.querySelector('.chart svg text')).fill")
                palette = DARK if dark else LIGHT
                assert inks == "rgb({}, {}, {})".format(*bytes.fromhex(palette["muted"][1:]))
                shades = tab.value(
                    "[...document.querySelectorAll('.mark-rect path')].map(each => getComputedStyle(each).fill)"
                )
                assert all(shade.startswith(("rgb(", "url(", "none")) for shade in shades)
                # The table is there once it is asked for.
                tab.value("document.querySelectorAll('details').forEach(each => each.open = true)")
                rows = sum(len(figure.rows) for section in page.sections for figure in section.figures)
                deadline = time.monotonic() + 20
                while tab.value("document.querySelectorAll('figure tbody tr').length") != rows:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)


def test_unprintable_characters_in_the_text_of_a_report_are_escaped() -> None:
    assert plain("a\x1b[31m\u202eb") == "a\\x1b[31m\\u202eb"
