"""Figures as Vega-Lite specifications: heat maps, bars, lines and spans (https://vega.github.io/vega-lite/docs).

Names that come from data are values of a column, never names of fields, which Vega parses. Series differ in
lightness, dash or shape too, so that they can be distinguished without colour.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rankfeed.diagnostics.report.page import Cell, Figure

Spec = dict[str, Any]

#: Height of a chart, most points that are drawn as such, and the number from which an axis uses SI units.
_HEIGHT, _POINTS, _LARGE = 200, 40, 1_000_000


def heatmap(title: str, caption: str, columns: Sequence[str], rows: list[list[Cell]], darkest: float) -> Figure:
    """Cells shaded by a number. Columns: start and end on the x axis, row, and value (0 to ``darkest``)."""
    start, end, row, value = columns
    count = len({each[2] for each in rows})
    encoding = {
        "x": _axis(start, rows, 0, {"nice": False, "zero": False}) | {"title": start.removesuffix(" from")},
        "x2": {"field": end},
        "y": {"field": row, "type": "ordinal", "sort": None},
        "color": _number(value)
        | {"scale": {"type": "quantize", "domain": [0, darkest]}, "legend": {"format": ".3~g"}},
    }
    size = {"height": min(240, max(60, 18 * count)), "mark": "rect", "params": _zoom()}
    return _figure(title, caption, columns, rows, size | {"encoding": encoding})


def bars(
    title: str,
    caption: str,
    axis: str,
    unit: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    stacked: bool = False,
) -> Figure:
    """Bars beside each other or stacked; a series without any value is left out."""
    kept = {name: values for name, values in series.items() if any(values)} or dict([*series.items()][:1])
    rows: list[list[Cell]] = [
        [label, name, values[place]] for place, label in enumerate(labels) for name, values in kept.items()
    ]
    encoding: Spec = {
        "x": {"field": axis, "type": "ordinal", "sort": None, "axis": {"labelAngle": 0}},
        "y": _axis(unit, rows, 2) | {"stack": "zero" if stacked else None},
    }
    spec: Spec = {"height": _HEIGHT, "mark": "bar"}
    if len(series) > 1:
        encoding["color"] = _series(kept)
    if stacked:
        spec["transform"] = [{"calculate": f"indexof({json.dumps([*kept])}, datum.series)", "as": "order"}]
        encoding["order"] = _number("order")
    elif len(kept) > 1:
        encoding["xOffset"] = {"field": "series", "sort": None}
    if stacked or len(kept) == 1:
        spec["mark"] = {"type": "bar", "width": {"expr": "min(60, 0.9 * bandwidth('x'))"}}
    return _figure(title, caption, [axis, "series", unit], rows, spec | {"encoding": encoding})


def lines(
    title: str,
    caption: str,
    axis: str,
    unit: str,
    series: Mapping[str, Iterable[tuple[float, float | None]]],
    *,
    log: bool = False,
) -> Figure:
    """Lines through points, with gaps where a value is None; a point has a tooltip even where it is not drawn."""
    rows: list[list[Cell]] = [[at, name, value] for name, points in series.items() for at, value in points]
    scale: Spec = {"type": "log", "base": 2} if log else {"zero": False}
    encoding = {"x": _axis(axis, rows, 0, scale | {"nice": False}), "y": _axis(unit, rows, 2)}
    if len(series) > 1:
        dash = {"field": "series", "type": "nominal", "scale": {"domain": [*series]}}
        color = _series(series)
        color["legend"] = {"title": None, "symbolType": "stroke", "symbolSize": 400}
        encoding |= {"color": color, "strokeDash": dash}
    few = len(rows) <= _POINTS * len(series)
    mark = {"type": "line", "point": {"size": 40 if few else 60, "opacity": 1 if few else 0}}
    spec = {"height": _HEIGHT, "mark": mark, "params": _zoom(), "encoding": encoding}
    return _figure(title, caption, [axis, "series", unit], rows, spec)


def spans(
    title: str,
    caption: str,
    axis: str,
    row_axis: str,
    rows: Sequence[tuple[str, float, float, str, str]],
    *,
    crosses: str = "",
) -> Figure:
    """Spans by row, start, end, series and note; those of one series are drawn as crosses too, however short."""
    start, end = f"{axis} from", f"{axis} to"
    names = list(dict.fromkeys(row[3] for row in rows))
    cells: list[list[Cell]] = [[*row] for row in rows]
    encoding: Spec = {
        "x": _axis(start, cells, 1, {"nice": False, "zero": False}) | {"title": axis},
        "x2": {"field": end},
        "y": {"field": row_axis, "type": "ordinal", "sort": None},
        "color": _series(names),
    }
    layers: list[Spec] = [
        {"mark": {"type": "bar", "height": {"band": 0.7}}, "params": _zoom(), "encoding": encoding}
    ]
    if crosses in names:
        cross = {"type": "point", "shape": "cross", "angle": 45, "size": 120, "filled": True, "opacity": 1}
        at = {name: part for name, part in encoding.items() if name != "x2"}
        only = [{"filter": {"field": "series", "equal": crosses}}]
        layers.append({"transform": only, "mark": cross, "encoding": at})
    height = min(300, max(60, 24 * len({row[0] for row in rows})))
    return _figure(
        title, caption, [row_axis, start, end, "series", "note"], cells, {"height": height, "layer": layers}
    )


def _figure(title: str, caption: str, columns: Sequence[str], rows: list[list[Cell]], spec: Spec) -> Figure:
    """A figure whose marks have all columns as their tooltip."""
    texts = {place for row in rows for place, cell in enumerate(row) if isinstance(cell, str)}
    tooltip = [
        {"field": name, "type": "nominal"} if place in texts else _number(name) | {"format": ","}
        for place, name in enumerate(columns)
    ]
    for layer in spec.get("layer", [spec]):
        layer["encoding"] = layer["encoding"] | {"tooltip": tooltip}
    return Figure(title, caption, [*columns], rows, spec)


def _number(field: str) -> Spec:
    return {"field": field, "type": "quantitative"}


def _axis(field: str, rows: Sequence[Sequence[Cell]], place: int, scale: Spec | None = None) -> Spec:
    """A numeric axis; its ticks are at whole numbers if all values are whole."""
    values = [cell for row in rows if isinstance(cell := row[place], int | float)]
    ticks: Spec = {"tickMinStep": 1} if all(value == int(value) for value in values) else {}
    if max(map(abs, values), default=0) >= _LARGE:
        ticks["format"] = "~s"
    return _number(field) | {"axis": ticks} | ({"scale": scale} if scale else {})


def _series(names: Iterable[str]) -> Spec:
    domain = [*names]
    legend = {"title": None} if len(domain) > 1 else None
    return {"field": "series", "type": "nominal", "scale": {"domain": domain}, "legend": legend}


def _zoom() -> list[Spec]:
    """Drag to move, Shift and the wheel to zoom: the wheel alone scrolls the page."""
    select = {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"}
    return [{"name": "zoom", "select": select, "bind": "scales"}]
