"""A page as one HTML file that needs nothing else: no script, no font, no request."""

from importlib.resources import files

from rankfeed.diagnostics.report.charts import sheet_of
from rankfeed.diagnostics.report.escaping import escaped
from rankfeed.diagnostics.report.page import Figure, Listing, Page, Part, Timeline, table_of
from rankfeed.diagnostics.report.palette import DARK, LIGHT
from rankfeed.diagnostics.report.svg import svg_of

#: Sign and word of a verdict: it is not said by colour alone.
WORDS = {"good": ("✓", "Good"), "look": ("!", "Look"), "bad": ("✕", "Broken")}
#: What a browser is to allow: styles in the file, and nothing from anywhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def html_of(page: Page) -> str:
    """The document. All that comes from data is escaped.

    Examples:
        >>> page = Page(title="<b>", word="good", verdict="Fine.", facts={"ranks": "2"}, findings=[], parts=[])
        >>> "<b>" in html_of(page), "&lt;b&gt;" in html_of(page)
        (False, True)
    """
    number = iter(range(10**6))
    parts = "\n".join(_part(part, number) for part in page.parts)
    facts = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(fact)}</dd></div>" for name, fact in page.facts.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escaped(page.title)} · rankfeed</title>
<style>
{_style()}</style>
</head>
<body>
<header>
<p class="brand">rankfeed report</p>
<h1>{escaped(page.title)}</h1>
{_verdict(page)}
<dl class="facts">{facts}</dl>
</header>
<main>
{parts}
</main>
<footer>Made by rankfeed. This page is one file: it loads nothing, and runs nothing.</footer>
</body>
</html>
"""


def _verdict(page: Page) -> str:
    sign, word = WORDS[page.word]
    findings = "".join(f"<li>{escaped(finding)}</li>" for finding in page.findings)
    listed = f"<ul>{findings}</ul>" if findings else ""
    return (
        f'<section class="verdict {page.word}" aria-label="verdict"><span class="word">{sign} {word}</span>'
        f"<div><p>{escaped(page.verdict)}</p>{listed}</div></section>"
    )


def _part(part: Part, number: object) -> str:
    figures = "\n".join(_figure(figure, f"figure-{next(number)}") for figure in part.figures)  # type: ignore[call-overload]
    return f'<section><h2>{escaped(part.title)}</h2><div class="figures">\n{figures}\n</div></section>'


def _figure(figure: Figure, name: str) -> str:
    head = f"<figcaption><h3>{escaped(figure.title)}</h3><p>{escaped(figure.caption)}</p></figcaption>"
    table = _table(figure)
    sheet = sheet_of(figure)
    if sheet is None:
        kind = "listing wide" if isinstance(figure, Listing) and figure.wide else "listing"
        return f'<figure class="{kind}" id="{name}">{head}{table}</figure>'
    drawn = svg_of(sheet, name, figure.title, figure.caption)
    behind = f"<details><summary>The numbers behind it</summary>{table}</details>"
    return f'<figure id="{name}">{head}\n{drawn}\n{behind}</figure>'


def _table(figure: Figure) -> str:
    header, rows = table_of(figure)
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    label = escaped(figure.title)
    texts = isinstance(figure, Timeline) or (isinstance(figure, Listing) and figure.wide)
    kind = "table texts" if texts else "table"
    return (
        f'<div class="{kind}" tabindex="0" role="region" aria-label="{label}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _style() -> str:
    def variables(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{colour};" for name, colour in colours.items())

    inks = "".join(f".fill-{ink}{{fill:var(--{ink})}}.line-{ink}{{stroke:var(--{ink})}}" for ink in LIGHT)
    return (
        f":root{{color-scheme:light dark;{variables(LIGHT)}}}\n"
        # A page on paper is light, whatever the screen is.
        f"@media screen and (prefers-color-scheme: dark){{:root{{{variables(DARK)}}}}}\n"
        f"{files(__package__).joinpath('page.css').read_text(encoding='utf-8')}{inks}\n"
    )
