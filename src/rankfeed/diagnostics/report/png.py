"""A page's charts as one picture, for a notebook or a terminal: the same sheets, drawn by Pillow."""

import textwrap
from io import BytesIO
from itertools import pairwise
from typing import Any

from rankfeed.diagnostics.report.charts import sheet_of
from rankfeed.diagnostics.report.drawing import INK_OF, LETTERS, WIDTH, Box, Letters, Line, Sheet, Symbol
from rankfeed.diagnostics.report.escaping import plain
from rankfeed.diagnostics.report.html import WORDS
from rankfeed.diagnostics.report.page import Page
from rankfeed.diagnostics.report.palette import DARK, LIGHT
from rankfeed.diagnostics.report.svg import strokes
from rankfeed.sources.extras import need

#: Pixels of a unit; charts beside each other; room around them; characters in a line of a caption, head and title.
_SCALE, _COLUMNS, _ROOM = 2, 2, 16.0
_LINE, _HEAD, _TITLE = 58, 110, 78


def png_of(page: Page, *, dark: bool = False) -> bytes:
    """The picture: the verdict, and all charts under each other in two columns; tables are left to the page.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    pillow, drawing = need("PIL.Image", extra="image"), need("PIL.ImageDraw", extra="image")
    colours = DARK if dark else LIGHT
    charts = [
        (figure.title, textwrap.wrap(figure.caption, _LINE)[:6], sheet)
        for part in page.parts
        for figure in part.figures
        if (sheet := sheet_of(figure)) is not None
    ]
    sign_and_word = " ".join(WORDS[page.word])
    head = textwrap.wrap(f"{sign_and_word[2:]}: {page.verdict}", _HEAD)
    title_lines = textwrap.wrap(page.title, _TITLE)
    below = _ROOM + 16 + 22 * max(1, len(title_lines))
    tops, bottoms = [], [below + 8 + 16 * len(head)] * _COLUMNS
    for _title, caption, sheet in charts:
        column = bottoms.index(min(bottoms))
        tops.append((column, bottoms[column]))
        bottoms[column] += 22 + 14 * len(caption) + sheet.height + _ROOM
    size = (_ROOM + _COLUMNS * (WIDTH + _ROOM)), max(bottoms)
    image = pillow.new("RGB", tuple(round(each * _SCALE) for each in size), colours["card"])
    pen = _Pen(drawing.Draw(image), colours)
    for number, line in enumerate(title_lines):
        pen.text(_ROOM, _ROOM + 14 + 22 * number, line, "text", 17)
    for number, line in enumerate(head):
        pen.text(_ROOM, below + 16 * number, line, page.word if number == 0 else "text", 12)
    for (title, caption, sheet), (column, top) in zip(charts, tops, strict=True):
        left = _ROOM + column * (WIDTH + _ROOM)
        pen.text(left, top + 12, title, "text", 13)
        for number, line in enumerate(caption):
            pen.text(left, top + 27 + 14 * number, line, "muted", LETTERS)
        pen.sheet(sheet, left, top + 22 + 14 * len(caption))
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class _Pen:
    """Draws marks in units, with colours by name."""

    def __init__(self, draw: Any, colours: dict[str, str]) -> None:
        self.draw, self.colours = draw, colours
        self.fonts: dict[float, Any] = {}

    def sheet(self, sheet: Sheet, left: float, top: float) -> None:
        for mark in sheet.marks:
            if isinstance(mark, Box):
                corners = [mark.x, mark.y, mark.x + mark.width, mark.y + mark.height]
                first, second = self._at(corners[:2], left, top), self._at(corners[2:], left, top)
                last = tuple(max(low, high - 1) for low, high in zip(first, second, strict=True))
                self.draw.rectangle([first, last], fill=self.colours[mark.ink])
            elif isinstance(mark, Letters):
                self.text(left + mark.x, top + mark.y, mark.text, mark.ink, LETTERS, mark.anchor)
            elif isinstance(mark, Line):
                for stroke in _dashed(mark.points, mark.dash):
                    self._line(stroke, left, top, mark.ink, mark.width)
            else:
                self._sign(mark, left, top)

    def text(self, x: float, y: float, text: str, ink: str, size: float, anchor: str = "start") -> None:
        if size not in self.fonts:
            self.fonts[size] = need("PIL.ImageFont", extra="image").load_default(size * _SCALE)
        side = {"start": "l", "middle": "m", "end": "r"}[anchor]
        place = x * _SCALE, y * _SCALE
        told = plain(text).replace("…", "...").replace("–", "-").encode("latin-1", "replace").decode("latin-1")
        self.draw.text(place, told, fill=self.colours[ink], font=self.fonts[size], anchor=f"{side}s")

    def _sign(self, mark: Symbol, left: float, top: float) -> None:
        for ink, width in (("card", 4.5), (INK_OF[mark.sign], 2.0)):
            for stroke in strokes(mark.sign, mark.x, mark.y, mark.size):
                self._line(stroke, left, top, ink, width)

    def _line(self, points: Any, left: float, top: float, ink: str, width: float) -> None:
        places = [self._at(point, left, top) for point in points]
        self.draw.line(places, fill=self.colours[ink], width=round(width * _SCALE), joint="curve")

    def _at(self, point: Any, left: float, top: float) -> tuple[int, int]:
        return round((left + point[0]) * _SCALE), round((top + point[1]) * _SCALE)


def _dashed(points: Any, dash: tuple[float, ...]) -> list[list[tuple[float, float]]]:
    """The strokes of a line that is broken: of lengths that are drawn and left out by turns.

    Examples:
        >>> _dashed([(0.0, 0.0), (10.0, 0.0)], (4.0, 4.0))
        [[(0.0, 0.0), (4.0, 0.0)], [(8.0, 0.0), (10.0, 0.0)]]
    """
    if not dash:
        return [list(points)]
    strokes_, stroke = [], [points[0]]
    turn, left = 0, dash[0]
    for (x, y), (to_x, to_y) in pairwise(points):
        while (far := ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5) > left:
            x, y = x + (to_x - x) * left / far, y + (to_y - y) * left / far
            if turn % 2 == 0:
                strokes_.append([*stroke, (x, y)])
            turn += 1
            left, stroke = dash[turn % len(dash)], [(x, y)]
        left -= far
        stroke.append((to_x, to_y))
    return strokes_ + ([stroke] if turn % 2 == 0 and len(stroke) > 1 else [])
