"""A report as data: a verdict, facts, findings, and figures with their numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    figures: list[Figure]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report.

    Attributes:
        title: the subject.
        verdict: sound, diseased or not proven; None if there is nothing to prove (rates of a run).
        summary: the result in one sentence.
        facts: names and values, shown at the top.
        findings: what is wrong, one sentence each.
        sections: the figures.
    """

    title: str
    verdict: Verdict | None
    summary: str
    facts: dict[str, str]
    findings: list[str]
    sections: list[Section]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; a figure is given by its numbers, without the specification of its chart."""
        figures = [
            {"section": section.title, **{name: part for name, part in vars(figure).items() if name != "spec"}}
            for section in self.sections
            for figure in section.figures
        ]
        head = {name: getattr(self, name) for name in ("title", "summary", "facts", "findings")}
        proven = {} if self.verdict is None else {"verdict": self.verdict.value, "sound": self.verdict.sound}
        return {**head, **proven, "figures": figures}


def sentences(findings: Sequence[Finding]) -> list[str]:
    """Findings for the top of a page, one line each; notes are not among them.

    Examples:
        >>> sentences([Finding("slow", "warning", "it is slow", ("rank 0", "rank 1"), "use workers")])
        ['warning: it is slow (rank 0; rank 1). Remedy: use workers']
    """
    lines = []
    for each in findings:
        if each.severity != "note":
            evidence = f" ({'; '.join(each.evidence)})" if each.evidence else ""
            remedy = f". Remedy: {each.remedy}" if each.remedy else ""
            lines.append(f"{each.severity}: {each.what}{evidence}{remedy}")
    return lines


def joined(pages: Sequence[Page]) -> Page:
    """Several pages as one, under the worst of their verdicts.

    Examples:
        >>> fine = Page(title="a", verdict=Verdict.SOUND, summary="Fine.", facts={}, findings=[], sections=[])
        >>> bad = Page(title="b", verdict=Verdict.DISEASED, summary="Bad.", facts={}, findings=["x"], sections=[])
        >>> both = joined([fine, bad])
        >>> both.title, both.verdict.value, both.summary, both.findings
        ('a, b', 'diseased', 'b: Bad. a: Fine.', ['b: x'])
    """
    if len(pages) == 1:
        return pages[0]
    ordered = sorted(pages, key=lambda page: _WORST_FIRST.index(page.verdict))
    return Page(
        title=", ".join(page.title for page in pages),
        verdict=ordered[0].verdict,
        summary=" ".join(f"{page.title}: {page.summary}" for page in ordered),
        facts={f"{page.title}: {name}": fact for page in pages for name, fact in page.facts.items()},
        findings=[f"{page.title}: {finding}" for page in ordered for finding in page.findings],
        sections=[
            Section(f"{page.title}: {part.title}", part.figures) for page in pages for part in page.sections
        ],
    )
