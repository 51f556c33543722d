"""What a report says, before anybody draws it: a verdict, facts, and figures with their numbers.

A plan, an audit and a run each fill a `Page` (``of_plan``, ``of_audit``, ``of_run``, ``of_stats``); what draws one
knows nothing of them. A figure carries no more numbers than a screen can show: whoever fills it bins or samples,
and says so in the caption.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from rankfeed.storage.commit import decodable

#: "good": as it should be; "look": something to look at; "bad": a promise is broken. From best to worst.
Word = Literal["good", "look", "bad"]
_WORDS: tuple[Word, ...] = ("good", "look", "bad")
#: Signs on a chart that do not rely on colour: delivered again, not delivered, ended early, went on.
Sign = Literal["again", "gap", "killed", "resumed"]


@decodable
class Series(msgspec.Struct, frozen=True):
    """Numbers that belong together; None where there is none."""

    name: str
    values: Sequence[float | None]


@decodable
class Mark(msgspec.Struct, frozen=True):
    """A sign in a cell of a grid, or at a time of a row of a timeline, and what it means there."""

    row: int
    at: float
    sign: Sign
    text: str


@decodable
class Span(msgspec.Struct, frozen=True):
    """A stretch of a timeline's row; ``again``: what was delivered in it had been delivered before."""

    row: int
    start: float
    end: float
    text: str
    again: bool = False


@decodable
class Grid(msgspec.Struct, frozen=True, kw_only=True, tag="grid"):
    """Cells whose darkness is a number.

    Args:
        title, caption: of the figure.
        row_axis, column_axis: what rows and columns are.
        rows, columns: their names.
        values: [rows][columns]; None where nothing is.
        unit: what a value is.
        low, high: values of the lightest and the darkest cell.
        marks: signs in cells (``at``: the column).
    """

    title: str
    caption: str
    row_axis: str
    column_axis: str
    rows: list[str]
    columns: list[str]
    values: list[list[float | None]]
    unit: str
    low: float
    high: float
    marks: list[Mark] = []


@decodable
class Bars(msgspec.Struct, frozen=True, kw_only=True, tag="bars"):
    """Bars in groups, or stacked."""

    title: str
    caption: str
    axis: str
    labels: list[str]
    series: list[Series]
    unit: str
    stacked: bool = False


@decodable
class Lines(msgspec.Struct, frozen=True, kw_only=True, tag="lines"):
    """Numbers over a number that grows; ``low`` and ``high`` are shown whatever they are."""

    title: str
    caption: str
    axis: str
    x: list[float]
    series: list[Series]
    unit: str
    low: float = 0.0
    high: float = 0.0


@decodable
class Timeline(msgspec.Struct, frozen=True, kw_only=True, tag="timeline"):
    """Who did something when: spans and signs in rows."""

    title: str
    caption: str
    axis: str
    row_axis: str
    rows: list[str]
    spans: list[Span]
    marks: list[Mark] = []


@decodable
class Listing(msgspec.Struct, frozen=True, kw_only=True, tag="listing"):
    """A table that needs no chart; ``wide`` if its cells are texts."""

    title: str
    caption: str
    header: list[str]
    rows: list[list[str]]
    wide: bool = False


Figure = Grid | Bars | Lines | Timeline | Listing


@decodable
class Part(msgspec.Struct, frozen=True):
    """Figures under one heading."""

    title: str
    figures: list[Figure]


@decodable
class Page(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report says.

    Attributes:
        title: of what.
        word: how it stands.
        verdict: the same in a sentence.
        facts: names and values for the head of the page.
        findings: what is wrong, a sentence each.
        parts: the figures.

    Examples:
        >>> page = Page(title="a plan", word="good", verdict="Fine.", facts={}, findings=[], parts=[])
        >>> msgspec.json.decode(msgspec.json.encode(page), type=Page) == page
        True
    """

    title: str
    word: Word
    verdict: str
    facts: dict[str, str]
    findings: list[str]
    parts: list[Part]


def joined(pages: Sequence[Page]) -> Page:
    """Several pages as one: the worst of their verdicts stands at its head.

    Examples:
        >>> one = Page(title="a", word="good", verdict="Fine.", facts={}, findings=[], parts=[])
        >>> two = Page(title="b", word="bad", verdict="Broken.", facts={"ranks": "2"}, findings=["x"], parts=[])
        >>> both = joined([one, two])
        >>> both.title, both.word, both.verdict, both.findings
        ('a, b', 'bad', 'Broken. (b) Fine. (a)', ['x (b)'])
    """
    if len(pages) == 1:
        return pages[0]
    by_need = sorted(pages, key=lambda page: -_WORDS.index(page.word))
    facts: dict[str, str] = {}
    for page in pages:
        for name, fact in page.facts.items():
            facts[name if facts.get(name, fact) == fact else f"{name} ({page.title})"] = fact
    return Page(
        title=", ".join(page.title for page in pages),
        word=by_need[0].word,
        verdict=" ".join(f"{page.verdict} ({page.title})" for page in by_need),
        facts=facts,
        findings=[f"{finding} ({page.title})" for page in by_need for finding in page.findings],
        parts=[Part(f"{part.title} ({page.title})", part.figures) for page in pages for part in page.parts],
    )


def table_of(figure: Figure) -> tuple[list[str], list[list[str]]]:
    """The numbers of a figure as a table: its header, and its rows.

    Examples:
        >>> steps = [Series("steps", [7])]
        >>> bars = Bars(title="", caption="", axis="rank", labels=["0"], series=steps, unit="steps")
        >>> table_of(bars)
        (['rank', 'steps'], [['0', '7']])
    """
    if isinstance(figure, Listing):
        return figure.header, figure.rows
    if isinstance(figure, Timeline):
        spans = [(s.row, s.start, number(s.end), s.text) for s in figure.spans]
        found = sorted([*spans, *((m.row, m.at, "", m.text) for m in figure.marks)])
        rows = [[figure.rows[row], number(start), end, text] for row, start, end, text in found]
        return [figure.row_axis, f"from ({figure.axis})", "to", "what"], rows
    if isinstance(figure, Grid):
        told = {(mark.row, int(mark.at)): mark.sign for mark in figure.marks}
        cells = [
            [f"{number(value)} {told.get((row, column), '')}".strip() for column, value in enumerate(values)]
            for row, values in enumerate(figure.values)
        ]
        corner = f"{figure.row_axis} \\ {figure.column_axis}"
        rows = [[name, *each] for name, each in zip(figure.rows, cells, strict=True)]
        return [corner, *figure.columns], rows
    labels = figure.labels if isinstance(figure, Bars) else [number(x) for x in figure.x]
    columns = [[number(value) for value in each.values] for each in figure.series]
    header = [figure.axis, *(each.name for each in figure.series)]
    return header, [list(row) for row in zip(labels, *columns, strict=True)]


def number(value: float | None) -> str:
    """A number as people read it.

    Examples:
        >>> number(None), number(1234567.0), number(0.123456), number(98765.4)
        ('', '1,234,567', '0.1235', '98,765')
    """
    if value is None:
        return ""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def short(value: float) -> str:
    """A number for an axis, in few characters.

    Examples:
        >>> short(0), short(0.25), short(1500), short(2e12), short(20000), short(-1e6), short(999_999)
        ('0', '0.25', '1.5k', '2T', '20k', '-1M', '1M')
    """
    size = abs(value)
    for at, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= at * 0.9995:  # what three digits round up to it
            return f"{value / at:.3g}{unit}"
    return f"{value:.3g}"
