"""A page as one HTML file that needs no network, or its charts as a PNG; both are drawn by Vega (vl-convert)."""

import base64
import gzip
import json
import os
import re
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from textwrap import wrap
from typing import Any

from rankfeed._util.imports import need
from rankfeed.diagnostics.findings import has_warnings
from rankfeed.diagnostics.report.page import Figure, Page
from rankfeed.diagnostics.written import written

_VERDICTS = {"sound": "✓ Sound", "diseased": "✕ Diseased", "not proven": "? Not proven"}
#: Width of a chart in a picture, and letters in a line of its title.
_WIDTH, _LETTERS = 720, 110


def write(page: Page, path: str | os.PathLike[str]) -> Path:
    """Write a page as one HTML file, or its charts as a PNG if the name ends in ``.png``; returns the path.

    Raises:
        ArgumentError: the file cannot be written.
        MissingExtraError: the extra ``report`` is not installed.
    """
    as_picture = Path(path).suffix.lower() == ".png"
    return written(path, png(page) if as_picture else html(page).encode())


def html(page: Page) -> str:
    """The document: text from data is escaped; the script fills charts and tables from one copy of the numbers."""
    figures = [figure for section in page.sections for figure in section.figures]
    sections = []
    for part in page.parts or [page]:
        if page.parts:
            sections.append(f'<h2 class="part">{_text(part.title)}</h2>{_facts(part)}')
        for section in part.sections:
            drawn = f'<div class="figures">{"".join(map(_figure, section.figures))}</div>'
            sections.append(f"<section><h2>{_text(section.title)}</h2>{drawn}</section>")
    findings = []
    for item in page.findings:
        texts = [*item.evidence, *([f"remedy: {item.remedy}"] if item.remedy else [])]
        headline = _text(f"{item.severity}: {item.what} [{item.code}]")
        findings.append(f"<li>{headline}{''.join(f'<p>{_text(text)}</p>' for text in texts)}</li>")
    verdict = "" if page.verdict is None else page.verdict.value
    kind, word = verdict.replace(" ", "-"), _VERDICTS.get(verdict, "")
    if has_warnings(page.findings, page.verdict):
        kind, word = "warned", "! Warning" if page.verdict is None else "! Sound, with warnings"
    return Template(_asset("page.html")).substitute(
        title=_text(page.title),
        style=_asset("page.css"),
        kind=kind,
        word=f'<span class="word">{word}</span>' if word else "",  # it is not said by colour alone
        summary=_text(page.summary),
        findings="".join(findings),
        facts="" if page.parts else _facts(page),
        sections="".join(sections),
        config=_asset("vega.json"),
        charts=_json([{"columns": chart.columns, "rows": chart.rows, "spec": chart.spec} for chart in figures]),
        vega=_vega(),
        script=_asset("page.js"),
    )


def png(page: Page) -> bytes:
    """All charts of a page below each other, on a light background."""
    convert: Any = need("vl_convert", extra="report")
    word = "" if page.verdict is None else f"{page.verdict.value.capitalize()}. "
    texts = [word + page.summary, *(line for item in page.findings for line in str(item).splitlines())]
    alone = {"spacing": 36, "resolve": {"scale": {"color": "independent", "strokeDash": "independent"}}}
    charts = [
        {"title": {"text": _lines(part.title), "fontSize": 15}, "vconcat": _charts(part), **alone}
        for part in page.parts
        if _charts(part)
    ] or _charts(page)
    head = {"text": _lines(page.title), "subtitle": [line for text in texts for line in _lines(text)]}
    whole = _json(
        {
            "title": head | {"fontSize": 18, "frame": "bounds", "offset": 24},
            "vconcat": charts or [{"data": {"values": []}, "mark": "point"}],
            **alone,
            "config": json.loads(_asset("vega.json"))
            | {"background": "var(--card)", "padding": 24, "autosize": "pad"},
        }
    )
    for name, colour in re.findall(r"--([\w-]+): (#\w+);", _asset("page.css").partition("@media")[0]):
        whole = whole.replace(f'"var(--{name})"', f'"{colour}"')
    picture: bytes = convert.vegalite_to_png(whole, scale=1.5)
    return picture


def plain(text: str) -> str:
    """Text with unprintable characters (line ends, marks of direction, lone surrogates) as escape sequences."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def _text(text: str) -> str:
    return escape(plain(text))


def _lines(text: str) -> list[str]:
    return wrap(plain(text), _LETTERS) or [""]


def _json(value: Any) -> str:
    """JSON that cannot end a script element."""
    return json.dumps(_printable(value), separators=(",", ":")).replace("<", "\\u003c")


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {plain(name): _printable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return plain(value) if isinstance(value, str) else value


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _vega() -> str:
    """The scripts of Vega, Vega-Lite and Vega-Embed, compressed to less than half of their 900 KB."""
    script: str = need("vl_convert", extra="report").javascript_bundle()
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _figure(figure: Figure) -> str:
    label = f'aria-label="{_text(figure.title)}"'
    body = f'<div class="table" tabindex="0" role="region" {label}></div>'
    if figure.spec is not None:
        chart = f'<div class="chart" role="img" {label}></div>'
        body = f"{chart}<details><summary>Numbers</summary>{body}</details>"
    head = f"<figcaption><h3>{_text(figure.title)}</h3><p>{_text(figure.caption)}</p></figcaption>"
    return f"<figure>{head}{body}</figure>"


def _facts(page: Page) -> str:
    facts = {name: fact if isinstance(fact, str) else f"{fact:,}" for name, fact in page.facts.items()}
    items = (f"<div><dt>{_text(name)}</dt><dd>{_text(fact)}</dd></div>" for name, fact in facts.items())
    return f'<dl class="facts">{"".join(items)}</dl>'


def _charts(page: Page) -> list[dict[str, Any]]:
    """The charts of a page for a picture."""
    charts = []
    for section in page.sections:
        for figure in section.figures:
            if figure.spec:
                records = [dict(zip(figure.columns, row, strict=True)) for row in figure.rows]
                title = {"text": _lines(figure.title), "subtitle": _lines(figure.caption)}
                charts.append(figure.spec | {"width": _WIDTH, "title": title, "data": {"values": records}})
    return charts
