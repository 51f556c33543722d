"""Marks on a sheet: what a chart is made of, before it is SVG or pixels.

A sheet is 360 units wide, about as many pixels as a phone has, so that letters have the size there that they were
given. Inks are names of the palette.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rankfeed.diagnostics.report import page

#: Width of a sheet, and the size of its letters.
WIDTH, LETTERS = 360.0, 11.0
#: About how wide a letter is.
_LETTER = 0.56 * LETTERS


@dataclass(frozen=True)
class Box:
    """A filled rectangle; ``note`` is told where a pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    ink: str
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A line through points; ``dash``: lengths drawn and left out, none if it is whole."""

    points: tuple[tuple[float, float], ...]
    ink: str
    width: float = 1.0
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Letters:
    """Text on its base line."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    ink: str = "muted"


@dataclass(frozen=True)
class Symbol:
    """A sign whose shape says what it means."""

    x: float
    y: float
    sign: page.Sign
    size: float = 4.0
    note: str = ""


@dataclass
class Sheet:
    """A chart: its height and its marks, the later over the earlier."""

    height: float = 0.0
    marks: list[Box | Line | Letters | Symbol] = field(default_factory=list)


#: What each sign means, for the legend under a chart.
MEANING: dict[page.Sign, str] = {
    "again": "delivered again",
    "gap": "not delivered",
    "killed": "ended early",
    "resumed": "went on",
}
INK_OF: dict[page.Sign, str] = {"again": "bad", "gap": "bad", "killed": "bad", "resumed": "good"}


@dataclass(frozen=True)
class Frame:
    """The part of a sheet that data are drawn in, and what its edges stand for."""

    left: float
    top: float
    right: float
    bottom: float
    first: float
    last: float
    low: float
    high: float

    def x(self, value: float) -> float:
        """Where a value is, from left to right."""
        return self.left + (value - self.first) / ((self.last - self.first) or 1) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Where a value is, from the bottom up."""
        return self.bottom - (value - self.low) / ((self.high - self.low) or 1) * (self.bottom - self.top)


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers between two.

    Examples:
        >>> ticks(0, 97), ticks(0, 1), ticks(3, 3), ticks(0, 3, most=4)
        ([0.0, 50.0], [0.0, 0.5, 1.0], [3], [0.0, 1.0, 2.0, 3.0])
    """
    if not high > low:
        return [low]
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def width_of(text: str) -> float:
    """About how wide a text is."""
    return len(text) * _LETTER


def clipped(text: str, width: float) -> str:
    """A text that is no wider than so.

    Examples:
        >>> clipped("a long name of a rank", 60)
        'a long n…'
    """
    most = max(2, int(width / _LETTER))
    return text if len(text) <= most else text[: most - 1] + "…"


def thinned(count: int, room: float, each: float) -> list[int]:
    """Which of some places get a label where each label takes so much room: the first always.

    Examples:
        >>> thinned(10, room=100, each=30), thinned(3, room=100, each=30)
        ([0, 4, 8], [0, 1, 2])
    """
    step = max(1, math.ceil(count * each / max(room, 1)))
    nice = next(size for size in (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, 64, 100, step) if size >= step)
    return list(range(0, count, nice))


def legend(sheet: Sheet, y: float, entries: Sequence[tuple[str, str]]) -> float:
    """Names with their inks ("again" and other signs too) in lines under each other; returns where they end."""
    x = 2.0
    for name, ink in entries:
        wide = width_of(name) + 30
        if x > 2 and x + wide > WIDTH:
            x, y = 2.0, y + 16
        if ink in MEANING:
            sheet.marks.append(Symbol(x + 5, y - 4, ink))
        elif ink.startswith("dash-"):
            sheet.marks.append(Line(((x - 2, y - 4), (x + 13, y - 4)), ink[5:], 2.0, dash_of(ink[5:])))
        else:
            sheet.marks.append(Box(x, y - 9, 10, 10, ink))
        sheet.marks.append(Letters(x + 17, y, clipped(name, WIDTH - 24), ink="text"))
        x += wide
    return y + 8


def dash_of(ink: str) -> tuple[float, ...]:
    """How the line of a series is broken, so that it is known without its colour."""
    return {"series-2": (5.0, 3.0), "series-3": (1.5, 2.5), "series-4": (8.0, 2.0, 1.5, 2.0)}.get(ink, ())
