"""Figures as Vega-Lite specifications: heat maps, bars, lines and spans (https://vega.github.io/vega-lite/docs).

Names that come from data are values of a column, never names of fields, which Vega parses. Series differ in
lightness, dash or shape too, so that they can be distinguished without colour. Text, ticks and colours of all
charts are configured in vega.json; page.js adds zoom.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from typing import Any

from rankfeed.diagnostics.report.page import Cell, Figure

Spec = dict[str, Any]

#: Height of a chart, most points of a line that are drawn, and the number from which an axis has SI units.
_HEIGHT, _POINTS, _LARGE = 200, 40, 1_000_000
#: Pixels between the edge of a chart, which clips, and its outermost points; "nice" would add to them.
_MARGIN = {"nice": False, "padding": 8}
_DASHES = [[1, 0], [6, 3], [2, 2], [9, 3, 2, 3]]


def heatmap(title: str, caption: str, columns: Sequence[str], rows: list[list[Cell]], darkest: float) -> Figure:
    """Cells shaded by a number. Columns: start and end on the x axis, row, and value (0 to ``darkest``)."""
    start, end, row, value = columns
    # Not in steps: cells of equal colour have equal values.
    ticks = {"format": ".3~g", "values": [darkest * part / 4 for part in range(5)]}
    color = {"scale": {"type": "linear", "domain": [0, darkest], "clamp": True}, "legend": ticks}
    encoding = _across(start, end, rows, 0) | {"y": _ordinal(row), "color": _number(value) | color}
    height = min(240, max(60, 18 * len({row[2] for row in rows})))
    return _figure(title, caption, columns, rows, {"height": height, "mark": "rect", "encoding": encoding})


def bars(
    title: str, caption: str, axis: str, unit: str, labels: Sequence[str], series: Mapping[str, Sequence[float]]
) -> Figure:
    """Stacked bars; a series without any value is left out."""
    kept = {name: values for name, values in series.items() if any(values)} or dict([*series.items()][:1])
    rows: list[list[Cell]] = [
        [label, name, values[place]] for place, label in enumerate(labels) for name, values in kept.items()
    ]
    order = {"calculate": f"indexof({json.dumps([*kept])}, datum.series)", "as": "order"}
    spec: Spec = {
        "height": _HEIGHT,
        "mark": {"type": "bar", "width": {"band": min(0.9, 0.1 * len(labels))}},
        "transform": [order],
        "encoding": {
            "x": _ordinal(axis) | {"axis": {"labelAngle": 0}},
            "y": _axis(unit, rows, 2),
            "color": _series(kept),
            "order": _number("order"),
        },
    }
    return _figure(title, caption, [axis, "series", unit], rows, spec)


def lines(
    title: str, caption: str, axis: str, unit: str, series: Mapping[str, Iterable[tuple[float, float]]]
) -> Figure:
    """Lines through points, with gaps at NaN; a point has a tooltip even where it is not drawn."""
    rows: list[list[Cell]] = [
        [at, name, None if isnan(value) else float(f"{value:.6g}")]
        for name, points in series.items()
        for at, value in points
    ]
    encoding = {
        "x": _axis(axis, rows, 0) | {"scale": _MARGIN | {"zero": False}},
        "y": _axis(unit, rows, 2) | {"scale": {**_MARGIN}},
        "color": _series(series, symbolType="stroke", symbolSize=400),
        "strokeDash": _series(series) | {"scale": {"domain": [*series], "range": _DASHES}},
    }
    few = len(rows) <= _POINTS * len(series)
    mark = {"type": "line", "point": {"size": 40 if few else 60, "opacity": 1 if few else 0}}
    spec = {"height": _HEIGHT, "mark": mark, "encoding": encoding}
    return _figure(title, caption, [axis, "series", unit], rows, spec)


def spans(title: str, caption: str, axis: str, row_axis: str, rows: list[list[Cell]]) -> Figure:
    """Spans by row, start, end, series and note; those of the series "missing" are crosses too, however short."""
    start, end = f"{axis} from", f"{axis} to"
    color = _series(dict.fromkeys(str(row[3]) for row in rows))
    encoding = _across(start, end, rows, 1) | {"y": _ordinal(row_axis), "color": color}
    encoding["x"]["scale"] |= _MARGIN
    at = {name: part for name, part in encoding.items() if name != "x2"}
    cross = {"type": "point", "shape": "cross", "angle": 45, "size": 120, "filled": True, "opacity": 1}
    only = [{"filter": {"field": "series", "equal": "missing"}}]
    layers: list[Spec] = [{"mark": {"type": "bar", "height": {"band": 0.7}}, "encoding": encoding}]
    if any(row[3] == "missing" for row in rows):
        layers.append({"mark": cross, "encoding": at, "transform": only})
    height = min(300, max(60, 24 * len({row[0] for row in rows})))
    columns = [row_axis, start, end, "series", "note"]
    return _figure(title, caption, columns, rows, {"height": height, "layer": layers})


def _figure(title: str, caption: str, columns: Sequence[str], rows: list[list[Cell]], spec: Spec) -> Figure:
    """A figure whose marks have all columns as their tooltip."""
    tooltip = [
        {"field": name, "type": "nominal"} if isinstance(cell, str) else _number(name) | {"format": ","}
        for name, cell in zip(columns, rows[0] if rows else columns, strict=True)
    ]
    for layer in spec.get("layer", [spec]):
        layer["encoding"]["tooltip"] = tooltip
    return Figure(title, caption, [*columns], rows, spec)


def _number(field: str) -> Spec:
    return {"field": field, "type": "quantitative"}


def _ordinal(field: str) -> Spec:
    return {"field": field, "type": "ordinal", "sort": None}


def _axis(field: str, rows: Sequence[Sequence[Cell]], place: int) -> Spec:
    """A numeric axis; its ticks are at whole numbers if all values are whole."""
    values = [cell for row in rows if isinstance(cell := row[place], int | float)]
    # Vega's number of ticks is the span divided by this, plus one: with 1, a span of 2 has ticks at halves.
    ticks: Spec = {"tickMinStep": 1.5} if all(value == int(value) for value in values) else {}
    if max(map(abs, values), default=0) >= _LARGE:
        ticks["format"] = "~s"
    return _number(field) | {"axis": ticks}


def _across(start: str, end: str, rows: Sequence[Sequence[Cell]], place: int) -> Spec:
    """From one column to another on the x axis."""
    x = _axis(start, rows, place) | {"scale": {"nice": False, "zero": False}, "title": start.removesuffix(" from")}
    return {"x": x, "x2": {"field": end}}


def _series(names: Iterable[str], **symbols: Any) -> Spec:
    domain = [*names]
    legend = {"title": None, **symbols} if len(domain) > 1 else None
    return {"field": "series", "type": "nominal", "scale": {"domain": domain}, "legend": legend}
