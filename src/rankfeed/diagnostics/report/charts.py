"""Figures laid out as marks on a sheet: one function for each kind."""

from collections.abc import Sequence

from rankfeed.diagnostics.report.drawing import (
    INK_OF,
    LETTERS,
    MEANING,
    WIDTH,
    Box,
    Frame,
    Letters,
    Line,
    Sheet,
    Symbol,
    clipped,
    dash_of,
    legend,
    thinned,
    ticks,
    width_of,
)
from rankfeed.diagnostics.report.page import (
    Bars,
    Figure,
    Grid,
    Lines,
    Listing,
    Mark,
    Series,
    Timeline,
    number,
    short,
)
from rankfeed.diagnostics.report.palette import LEVELS

#: Heights of what bars and lines are drawn in, and how many series have inks of their own.
_PLOT, SERIES = 150.0, 4
_TOP = 18.0


def sheet_of(figure: Figure) -> Sheet | None:
    """The figure as marks; None where a table says it all.

    Examples:
        >>> steps = [Series("steps", [7, 3])]
        >>> bars = Bars(title="", caption="", axis="rank", labels=["0", "1"], series=steps, unit="")
        >>> sheet = sheet_of(bars)
        >>> [round(mark.height) for mark in sheet.marks if isinstance(mark, Box) and mark.note]
        [138, 59]
    """
    if isinstance(figure, Listing):
        return None
    if isinstance(figure, Grid):
        return _grid(figure)
    if isinstance(figure, Timeline):
        return _timeline(figure)
    return _bars(figure) if isinstance(figure, Bars) else _lines(figure)


def _grid(figure: Grid) -> Sheet:
    sheet = Sheet()
    rows, columns = len(figure.rows), max(1, len(figure.columns))
    left = _margin(figure.rows)
    each = min(18.0, max(5.0, 200.0 / max(1, rows)))
    bottom = _TOP + rows * each
    wide = (WIDTH - 2 - left) / columns
    gap = 0.6 if wide > 4 and each > 4 else 0.0
    _row_names(sheet, figure.row_axis, figure.rows, left, each)
    # By level: marks of one ink that follow each other become one path.
    cells = [
        (level_of(value, figure.low, figure.high), row, column)
        for row, values in enumerate(figure.values)
        for column, value in enumerate(values)
        if value is not None
    ]
    for level, row, column in sorted(cells):
        x, y = left + column * wide, _TOP + row * each
        sheet.marks.append(Box(x, y, wide - gap, each - gap, f"level-{level}"))
    frame = Frame(left, _TOP, WIDTH - 2, bottom, 0, columns, 0, rows)
    for index in thinned(
        len(figure.columns), WIDTH - left, width_of(max(figure.columns, key=len, default="")) + 10
    ):
        x = frame.x(index + 0.5)
        anchor = "start" if x < left + 12 else "middle"
        sheet.marks.append(
            Letters(left if anchor == "start" else x, bottom + 13, figure.columns[index], anchor)  # type: ignore[arg-type]
        )
    sheet.marks.append(Letters(WIDTH - 2, bottom + 28, figure.column_axis, "end"))
    _signs(sheet, figure.marks, frame, each, middle=0.5)
    # The scale: light to dark.
    y = bottom + 46
    sheet.marks.append(Letters(2, y, short(figure.low)))
    x = 8 + width_of(short(figure.low))
    for level in range(1, LEVELS + 1):
        sheet.marks.append(Box(x + (level - 1) * 14, y - 9, 13, 10, f"level-{level}"))
    scale_end = x + LEVELS * 14 + 4
    told = f"{short(figure.high)}  {figure.unit}"
    sheet.marks.append(Letters(scale_end, y, clipped(told, WIDTH - scale_end)))
    end = y + 8
    if figure.marks:
        end = legend(sheet, y + 17, _meanings(figure.marks))
    sheet.height = end
    return sheet


def level_of(value: float, low: float, high: float) -> int:
    """The level of a value, 1 (the lightest) to 6.

    Examples:
        >>> [level_of(value, 0, 6) for value in (-1, 0, 2.5, 6, 9)]
        [1, 1, 3, 6, 6]
    """
    share = (value - low) / ((high - low) or 1)
    return 1 + min(LEVELS - 1, max(0, int(share * LEVELS)))


def _timeline(figure: Timeline) -> Sheet:
    sheet = Sheet()
    rows = len(figure.rows)
    left = _margin(figure.rows)
    each = min(20.0, max(6.0, 220.0 / max(1, rows)))
    bottom = _TOP + rows * each
    times = [time for span in figure.spans for time in (span.start, span.end)] + [m.at for m in figure.marks]
    first, last = min(times, default=0.0), max(times, default=1.0)
    frame = Frame(left + 4, _TOP, WIDTH - 8, bottom, first, last if last > first else first + 1, 0, rows)
    _row_names(sheet, figure.row_axis, figure.rows, left, each)
    _x_axis(sheet, frame, figure.axis)
    for span in figure.spans:
        x, y = frame.x(span.start), _TOP + span.row * each
        wide = max(1.5, frame.x(span.end) - x)
        # What came again stands lower and fuller: it is seen without its colour.
        high = each * (0.9 if span.again else 0.5)
        top = y + (each - high) / 2
        sheet.marks.append(Box(x, top, wide, high, "series-2" if span.again else "series-1", note=span.text))
    _signs(sheet, figure.marks, frame, each, middle=0.0)
    entries = [("delivering", "series-1")]
    if any(span.again for span in figure.spans):
        entries.append(("delivered again", "series-2"))
    sheet.height = legend(sheet, bottom + 48, [*entries, *_meanings(figure.marks)])
    return sheet


def _bars(figure: Bars) -> Sheet:
    sheet = Sheet()
    sums = [sum(each.values[i] or 0 for each in figure.series) for i in range(len(figure.labels))]
    values = sums if figure.stacked else [value or 0 for each in figure.series for value in each.values]
    frame = _plot(sheet, max(values, default=0), figure.unit, 0, max(1, len(figure.labels)))
    room = (frame.right - frame.left) / max(1, len(figure.labels))
    group = min(room * 0.8, 56.0 * (1 if figure.stacked else len(figure.series)))
    wide = group if figure.stacked else group / max(1, len(figure.series))
    heaps = [0.0] * len(figure.labels)
    for place, each in enumerate(figure.series[:SERIES]):
        for index, value in enumerate(each.values):
            if not value:
                continue
            x = frame.left + room * index + (room - group) / 2 + (0 if figure.stacked else wide * place)
            base = heaps[index] if figure.stacked else 0.0
            top, bottom = frame.y(base + value), frame.y(base)
            high = max(1.0, bottom - top)  # what is not nothing is seen
            note = f"{figure.labels[index]}: {number(value)} {each.name}"
            gap = 1.0 if wide > 4 else 0.0
            sheet.marks.append(Box(x, bottom - high, wide - gap, high, f"series-{place + 1}", note))
            heaps[index] += value
    for index in thinned(len(figure.labels), frame.right - frame.left, _longest(figure.labels)):
        x = frame.left + room * (index + 0.5)
        sheet.marks.append(Letters(x, frame.bottom + 14, clipped(figure.labels[index], 110), "middle"))
    sheet.marks.append(Letters(frame.right, frame.bottom + 28, figure.axis, "end"))
    entries = [(each.name, f"series-{place + 1}") for place, each in enumerate(figure.series[:SERIES])]
    sheet.height = legend(sheet, frame.bottom + 46, entries) if len(entries) > 1 else frame.bottom + 34
    return sheet


def _lines(figure: Lines) -> Sheet:
    sheet = Sheet()
    values = [value for each in figure.series for value in each.values if value is not None]
    low, high = min([figure.low, *values]), max([figure.high, *values])
    first, last = min(figure.x, default=0.0), max(figure.x, default=1.0)
    frame = _plot(sheet, high, figure.unit, first, last, low)
    _x_axis(sheet, frame, figure.axis)
    for place, each in enumerate(figure.series[:SERIES]):
        ink = f"series-{place + 1}"
        for run in _runs(figure.x, each):
            points = tuple((frame.x(x), frame.y(y)) for x, y in run)
            if len(points) == 1:
                sheet.marks.append(Box(points[0][0] - 2, points[0][1] - 2, 4, 4, ink))
            sheet.marks.append(Line(points, ink, 2.0, dash_of(ink)))
    entries = [(each.name, f"dash-series-{place + 1}") for place, each in enumerate(figure.series[:SERIES])]
    sheet.height = legend(sheet, frame.bottom + 46, entries) if len(entries) > 1 else frame.bottom + 34
    return sheet


def _runs(x: Sequence[float], series: Series) -> list[list[tuple[float, float]]]:
    """Stretches of points without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(x, series.values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((at, value))
    return [run for run in runs if run]


def _plot(sheet: Sheet, high: float, unit: str, first: float, last: float, low: float = 0.0) -> Frame:
    """What bars and lines stand in: grid lines with their numbers, and the unit above."""
    marks = ticks(low, high if high > low else low + 1)
    top = max(high, marks[-1]) if high > low else low + 1
    left = max(width_of(short(mark)) for mark in marks) + 10
    frame = Frame(left, _TOP + 6, WIDTH - 8, _TOP + _PLOT, first, last, low, top * 1.04 if top > 0 else top)
    for mark in marks:
        y = frame.y(mark)
        sheet.marks.append(Line(((left, y), (frame.right, y)), "line"))
        sheet.marks.append(Letters(left - 5, y + 4, short(mark), "end"))
    sheet.marks.append(Letters(2, LETTERS, clipped(unit, WIDTH - 4)))
    return frame


def _x_axis(sheet: Sheet, frame: Frame, name: str) -> None:
    for mark in ticks(frame.first, frame.last):
        x = frame.x(mark)
        sheet.marks.append(Line(((x, frame.bottom), (x, frame.bottom + 4)), "line"))
        text = short(mark)
        half = width_of(text) / 2
        sheet.marks.append(Letters(min(max(x, half + 1), WIDTH - half - 1), frame.bottom + 15, text, "middle"))
    sheet.marks.append(Letters(frame.right, frame.bottom + 29, name, "end"))


def _row_names(sheet: Sheet, axis: str, rows: Sequence[str], left: float, each: float) -> None:
    sheet.marks.append(Letters(2, LETTERS, clipped(axis, WIDTH - 4)))
    for index in thinned(len(rows), len(rows) * each, LETTERS + 2):
        y = _TOP + (index + 0.5) * each + 4
        sheet.marks.append(Letters(left - 5, y, clipped(rows[index], left - 5), "end"))


def _margin(names: Sequence[str]) -> float:
    return min(110.0, max((width_of(name) for name in names), default=0.0) + 10)


def _longest(labels: Sequence[str]) -> float:
    return min(110.0, max((width_of(label) for label in labels), default=0.0)) + 8


def _signs(sheet: Sheet, marks: Sequence[Mark], frame: Frame, each: float, middle: float) -> None:
    size = min(5.0, max(3.0, each / 3))
    last: dict[tuple[int, str], float] = {}
    for mark in marks:
        x, y = frame.x(mark.at + middle), _TOP + (mark.row + 0.5) * each
        # One that would lie on its like is left to the table.
        if abs(x - last.get((mark.row, mark.sign), -WIDTH)) > 2 * size:
            last[mark.row, mark.sign] = x
            sheet.marks.append(Symbol(x, y, mark.sign, size, note=mark.text))


def _meanings(marks: Sequence[Mark]) -> list[tuple[str, str]]:
    there = {mark.sign for mark in marks}
    return [(MEANING[sign], sign) for sign in INK_OF if sign in there]
