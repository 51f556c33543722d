"""A report page as data, before it is rendered: verdict, facts, findings, and figures with their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rankfeed.diagnostics.findings import Finding, Verdict

Cell = str | float | None

_WORST_FIRST = (Verdict.DISEASED, Verdict.NOT_PROVEN, Verdict.SOUND, None)


@dataclass(frozen=True)
class Figure:
    """A table; ``spec`` is the Vega-Lite specification that draws it, None if it is only a table."""

    title: str
    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    spec: dict[str, Any] | None = None


@dataclass(frozen=True)
class Section:
    """Figures under one heading."""

    title: str
    figures: Sequence[Figure]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report.

    Attributes:
        title: the subject.
        verdict: sound, diseased or not proven; None if there is nothing to prove (rates of a run).
        summary: the result in one sentence.
        facts: names and values, shown at the top.
        findings: what is wrong, could not be shown, or is worth knowing.
        sections: the figures.
        parts: the pages that were joined, in which facts and sections are drawn under one heading each.
    """

    title: str
    verdict: Verdict | None
    summary: str
    facts: Mapping[str, str | int]
    findings: Sequence[Finding] = ()
    sections: Sequence[Section]
    parts: Sequence["Page"] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; a figure is given by its numbers, without the specification of its chart."""
        figures = [
            {"section": section.title, **{name: part for name, part in vars(figure).items() if name != "spec"}}
            for section in self.sections
            for figure in section.figures
        ]
        proven = {} if self.verdict is None else {"verdict": self.verdict.value, "sound": self.verdict.sound}
        findings = [item.as_dict() for item in self.findings]
        head = {"title": self.title, **proven, "summary": self.summary, "facts": {**self.facts}}
        return {**head, "findings": findings, "figures": figures}


def shown(count: int, total: int, noun: str) -> str:
    """A sentence for a caption if not all are shown."""
    return "" if count == total else f" {count:,} of {total:,} {noun} are shown."


def joined(pages: Sequence[Page]) -> Page:
    """Several pages as one, under the worst of their verdicts.

    Examples:
        >>> fine = Page(title="a", verdict=Verdict.SOUND, summary="Fine.", facts={}, sections=[])
        >>> bad = Page(title="b", verdict=Verdict.DISEASED, summary="Bad.", facts={"ranks": 2}, sections=[])
        >>> both = joined([fine, bad])
        >>> both.title, both.verdict.value, both.summary, both.facts
        ('a, b', 'diseased', 'b: Bad. a: Fine.', {'b: ranks': 2})
    """
    if len(pages) == 1:
        return pages[0]
    ordered = sorted(pages, key=lambda page: _WORST_FIRST.index(page.verdict))
    return Page(
        title=", ".join(page.title for page in pages),
        verdict=ordered[0].verdict,
        summary=" ".join(f"{page.title}: {page.summary}" for page in ordered),
        facts={f"{page.title}: {name}": fact for page in pages for name, fact in page.facts.items()},
        findings=[replace(item, what=f"{page.title}: {item.what}") for page in ordered for item in page.findings],
        sections=[replace(item, title=f"{page.title}: {item.title}") for page in pages for item in page.sections],
        parts=tuple(pages),
    )
