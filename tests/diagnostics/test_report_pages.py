"""A report's page needs nothing but itself, shows its numbers, and takes no orders from what is in the data."""

import os
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.diagnostics.test_report import audited, drawn, resumed, snapshots
from tests.support.browser import browser, chromium

from rankfeed.diagnostics.audit import AuditReport, EpochReport, Place, RankEpoch, Repeat
from rankfeed.diagnostics.audit.rules import AuditFacts
from rankfeed.diagnostics.report import Asked, Page, joined, of_audit, of_stats, read_stats, write
from rankfeed.diagnostics.report.escaping import plain
from rankfeed.diagnostics.report.html import html_of
from rankfeed.diagnostics.report.page import Bars, Grid, Lines, Listing, Mark, Part, Series, Span, Timeline
from rankfeed.diagnostics.report.palette import DARK, LIGHT
from rankfeed.errors import ArgumentError, MissingExtraError
from rankfeed.plan import Plan

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'); DROP TABLE x; --",
    "</title></style></svg><svg onload=alert(1)>",
    "&lt;b&gt; ]]> <!-- -->",
    "https://example.org/x.js",
    "\u202eleft\u0000\x1b[31m\nline\ud800",
]


class Read(HTMLParser):
    """What a browser would see of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: Counter[str] = Counter()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids.update(value or "" for name, value in attrs if name == "id")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)


def everything(names: list[str]) -> Page:
    """A page with all kinds of figures, in which every text is one of these names."""
    pick = iter(names * 100)
    series = [Series(next(pick), [1.0, None, 3.0]) for _ in range(3)]
    grid = Grid(
        title=next(pick),
        caption=next(pick),
        row_axis=next(pick),
        column_axis=next(pick),
        rows=[next(pick), next(pick)],
        columns=[next(pick)] * 3,
        values=[[0.0, 1.0, 2.0], [None, 1.0, 9.0]],
        unit=next(pick),
        low=0,
        high=2,
        marks=[Mark(0, 1, "again", next(pick)), Mark(1, 2, "gap", next(pick))],
    )
    bars = Bars(
        title=next(pick),
        caption=next(pick),
        axis=next(pick),
        labels=[next(pick)] * 3,
        series=series,
        unit=next(pick),
    )
    lines = Lines(
        title=next(pick), caption=next(pick), axis=next(pick), x=[1, 2, 3], series=series, unit=next(pick)
    )
    timeline = Timeline(
        title=next(pick),
        caption=next(pick),
        axis=next(pick),
        row_axis=next(pick),
        rows=[next(pick)],
        spans=[Span(0, 0, 3, next(pick)), Span(0, 1, 2, next(pick), again=True)],
        marks=[Mark(0, 1, "killed", next(pick)), Mark(0, 2, "resumed", next(pick))],
    )
    listing = Listing(title=next(pick), caption=next(pick), header=[next(pick)], rows=[[next(pick)]], wide=True)
    return Page(
        title=next(pick),
        word="look",
        verdict=next(pick),
        facts={next(pick): next(pick)},
        findings=[next(pick)],
        parts=[Part(next(pick), [grid, bars, lines, timeline, listing])],
    )


def checked(text: str) -> Read:
    """The page is well formed, asks for nothing, runs nothing, and has a table for every chart."""
    page = Read(text)
    assert not page.open
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a", "use", "image"} & {
        *page.tags
    }
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("src", "href", "xlink:href", "srcset", "style"), (tag, name, value)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    assert page.tags["table"] == page.tags["figure"]
    assert page.tags["svg"] == page.tags["details"] == page.tags["desc"]
    assert set(page.ids.values()) == {1}
    named = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-labelledby"]
    assert all(name in page.ids for each in named for name in each.split())
    assert not re.search(
        r"\b(nan|inf)\b", " ".join(f"{value}" for tag, name, value in page.attributes if name != "aria-label")
    )
    return page


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_in_the_data_becomes_a_part_of_the_page(hostile: str, tmp_path: Path) -> None:
    harmless = checked(html_of(everything(["x" * len(plain(hostile))])))
    page = checked(html_of(everything([hostile])))
    for each in (page, harmless):
        del each.tags["text"]  # how many labels there is room for
    assert page.tags == harmless.tags
    assert page.attributes != []
    assert plain(hostile) in page.texts
    assert write(everything([hostile]), tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_names_from_loaders_and_files_come_through_as_text(tmp_path: Path) -> None:
    rank = RankEpoch(0, 2, 4, {2: 2}, {-1: "a"})
    again = tuple(Repeat(name, 2, (Place(0, 0, 0, 0), Place(0, 0, 1, 0))) for name in HOSTILE)
    epoch = EpochReport(0, 11, 4, 2, 0, (rank,), repeats=again, missing_keys=tuple(HOSTILE))
    report = AuditReport(AuditFacts("ids", "declared", 6), (epoch,))
    stats = of_stats({name: read_stats(snapshots(tmp_path / "a", 0.3)) for name in HOSTILE[:4]}, title=HOSTILE[0])
    page = checked(html_of(joined([of_audit(report, title=HOSTILE[3]), stats])))
    assert any(HOSTILE[1] in text for text in page.texts)


def test_every_page_stands_alone_and_every_chart_has_its_table(tmp_path: Path) -> None:
    plans = [
        (Plan(np.full(50, 40), shuffle="window", window=256, lanes=4), np.full(50, 40), Asked(4, 16, tail="pad")),
        (Plan(1), 1, Asked(1, 1)),
        (Plan(3), 3, Asked(1, 4, start=3)),
        (Plan([0, 7, 0]), [0, 7, 0], Asked(8, 4, tail="pad")),
    ]
    for plan, blocks, asked in plans:
        checked(html_of(drawn(plan, blocks, asked)))
    checked(html_of(of_audit(audited())))
    checked(html_of(resumed(tmp_path / "ledgers")[1]))
    one = [Series("a", [None])]
    empty: list[Bars | Lines | Timeline | Grid | Listing] = [
        Bars(title="", caption="", axis="", labels=[], series=[], unit=""),
        Lines(title="", caption="", axis="", x=[1.0], series=one, unit=""),
        Lines(title="", caption="", axis="", x=[], series=[], unit=""),
        Timeline(title="", caption="", axis="", row_axis="", rows=[], spans=[]),
        Grid(
            title="",
            caption="",
            row_axis="",
            column_axis="",
            rows=[],
            columns=[],
            values=[],
            unit="",
            low=0,
            high=0,
        ),
    ]
    page = Page(title="", word="bad", verdict="", facts={}, findings=[], parts=[Part("", [*empty])])
    checked(html_of(page))
    assert write(page, tmp_path / "empty.png").stat().st_size


def test_a_long_title_has_room_on_a_picture(tmp_path: Path) -> None:
    sizes = []
    for title in ("short", "a/long/path" * 30):
        page = Page(title=title, word="good", verdict="Fine.", facts={}, findings=[], parts=[])
        with Image.open(write(page, tmp_path / "a.png")) as picture:
            sizes.append(picture.size)
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] == sizes[0][1] + 4 * 44  # pixels of four more lines


def test_only_files_are_written_over(tmp_path: Path) -> None:
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


def test_a_picture_needs_pillow_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match="image"):
        write(everything(["x"]), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
    with pytest.raises(ArgumentError, match="cannot be written"):
        write(everything(["x"]), tmp_path / "no" / "a.html")


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 has it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, two: str) -> float:
    high, low = sorted([luminance(one), luminance(two)], reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_all_that_is_read_has_the_contrast_that_wcag_asks_for(palette: dict[str, str]) -> None:
    for ink in ("text", "muted", "good", "look", "bad"):
        assert contrast(palette[ink], palette["card"]) >= 4.5, ink
        assert contrast(palette[ink], palette["ground"]) >= 4.5, ink
    for ink in ("series-1", "series-2", "series-3", "series-4"):
        assert contrast(palette[ink], palette["card"]) >= 3, ink
    levels = [luminance(palette[f"level-{level}"]) for level in range(1, 7)]
    assert levels == sorted(levels, reverse=palette is LIGHT)


@pytest.mark.soak
def test_a_browser_draws_every_page_without_a_request_or_an_error(tmp_path: Path) -> None:
    if chromium() is None:
        pytest.skip("Chromium is not installed")
    plan = Plan(np.full(500, 200), shuffle="window", window=4096, lanes=8)
    pages = {
        "plan": drawn(plan, np.full(500, 200), Asked(8, 32, tail="pad")),
        "audit": of_audit(audited()),
        "rates": of_stats({f"rank {i}": read_stats(snapshots(tmp_path / str(i), i / 5)) for i in range(1, 7)}),
        "run": resumed(tmp_path / "ledgers")[1],
        "hostile": everything(HOSTILE),
        "joined": joined([of_audit(audited(), title="a/long/path" * 12), drawn(Plan(100), 100, Asked(2, 5))]),
    }
    with browser() as tab:
        for name, page in pages.items():
            path = write(page, tmp_path / f"{name}.html")
            for width in (360, 390, 1280):
                for dark in (False, True):
                    tab.open(path, width=width, dark=dark)
                    assert tab.said == []
                    assert tab.requests == [path.as_uri()]
                    assert tab.value("document.documentElement.scrollWidth") <= width
                    drawn_ = tab.value("[...document.querySelectorAll('svg')].map(s => s.getBBox().width > 100)")
                    assert drawn_
                    assert all(drawn_)
                    # No letter leaves its chart, and none is too small.
                    out = tab.value(
                        "[...document.querySelectorAll('svg text')].filter(t => {"
                        "const r = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();"
                        "return r.left < b.left - 2 || r.right > b.right + 2 || r.height < 9})"
                        ".map(t => t.textContent)"
                    )
                    assert name == "hostile" or out == [], (name, width)
                    ground = tab.value("getComputedStyle(document.body).backgroundColor")
                    light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 3 * 128
                    assert light != dark
            tab.open(path, width=1280, dark=True, media="print")
            card = tab.value("getComputedStyle(document.documentElement).getPropertyValue('--card').trim()")
            assert card == LIGHT["card"]
            assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
            assert tab.value("getComputedStyle(document.documentElement).colorScheme") == "light"
            printed = tmp_path / f"{name}.pdf"
            tab.pdf(printed)
            print(f"{name}: {path.stat().st_size >> 10} KiB, printed {printed.stat().st_size >> 10} KiB")
