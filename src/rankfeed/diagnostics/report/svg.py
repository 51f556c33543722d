"""A sheet as inline SVG: shapes and text by class, so that the page's own style gives them their colours."""

from itertools import groupby

from rankfeed.diagnostics.report.drawing import INK_OF, WIDTH, Box, Letters, Line, Sheet, Symbol
from rankfeed.diagnostics.report.escaping import escaped


def svg_of(sheet: Sheet, name: str, title: str, text: str) -> str:
    """The element.

    Args:
        sheet: what is drawn.
        name: an id that nothing else in the document has.
        title: what the chart is, for who does not see it.
        text: what it shows.

    Examples:
        >>> print(svg_of(Sheet(20.0, [Letters(1, 12, "a < b")]), "c", "A title", "text"))
        <svg viewBox="0 0 360 20" role="img" aria-labelledby="c-title c-text">
        <title id="c-title">A title</title><desc id="c-text">text</desc>
        <text x="1" y="12" class="muted">a &lt; b</text>
        </svg>
    """
    lines = [
        f'<svg viewBox="0 0 {WIDTH:g} {_(sheet.height)}" role="img" aria-labelledby="{name}-title {name}-text">',
        f'<title id="{name}-title">{escaped(title)}</title><desc id="{name}-text">{escaped(text)}</desc>',
    ]
    for key, group in groupby(sheet.marks, key=_kind):
        if key[0] == "cells":  # one path for all of a colour: thousands of cells stay small
            path = "".join(
                f"M{_(mark.x)} {_(mark.y)}h{_(mark.width)}v{_(mark.height)}h{_(-mark.width)}z"
                for mark in group
                if isinstance(mark, Box)
            )
            lines.append(f'<path class="fill-{key[1]}" d="{path}"/>')
        else:
            lines.extend(map(_element, group))
    return "\n".join([*lines, "</svg>"])


def _kind(mark: Box | Line | Letters | Symbol) -> tuple[str, str]:
    return ("cells", mark.ink) if isinstance(mark, Box) and not mark.note else ("one", "")


def _element(mark: Box | Line | Letters | Symbol) -> str:
    if isinstance(mark, Letters):
        anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
        return f'<text x="{_(mark.x)}" y="{_(mark.y)}" class="{mark.ink}"{anchor}>{escaped(mark.text)}</text>'
    if isinstance(mark, Box):
        place = f'x="{_(mark.x)}" y="{_(mark.y)}" width="{_(mark.width)}" height="{_(mark.height)}"'
        return f'<rect {place} class="fill-{mark.ink}"><title>{escaped(mark.note)}</title></rect>'
    if isinstance(mark, Line):
        points = " ".join(f"{_(x)},{_(y)}" for x, y in mark.points)
        dash = f' stroke-dasharray="{" ".join(map(_, mark.dash))}"' if mark.dash else ""
        return f'<polyline points="{points}" class="line-{mark.ink}" stroke-width="{_(mark.width)}"{dash}/>'
    ink, shape = INK_OF[mark.sign], _shape(mark)
    note = f"<title>{escaped(mark.note)}</title>" if mark.note else ""
    # A halo of the ground's colour keeps a sign apart from a cell of any darkness.
    return (
        f'<g>{note}<path d="{shape}" class="line-card" stroke-width="4.5"/>'
        f'<path d="{shape}" class="line-{ink}" stroke-width="2"/></g>'
    )


def _shape(mark: Symbol) -> str:
    return "".join(
        "M" + "L".join(f"{_(x)} {_(y)}" for x, y in stroke)
        for stroke in strokes(mark.sign, mark.x, mark.y, mark.size)
    )


def strokes(sign: str, x: float, y: float, size: float) -> list[list[tuple[float, float]]]:
    """The lines of a sign: a cross, a square, a bar, or an arrow head."""
    if sign == "again":
        return [[(x - size, y - size), (x + size, y + size)], [(x - size, y + size), (x + size, y - size)]]
    if sign == "gap":
        corners = [(x - size, y - size), (x + size, y - size), (x + size, y + size), (x - size, y + size)]
        return [[*corners, corners[0]]]
    if sign == "killed":
        return [[(x, y - size - 1), (x, y + size + 1)], [(x - size, y - size - 1), (x, y - size - 1)]]
    return [[(x - size / 2, y - size), (x + size / 2, y), (x - size / 2, y + size)]]


def _(value: float) -> str:
    """A length in few characters."""
    return f"{value:.1f}".removesuffix(".0")
