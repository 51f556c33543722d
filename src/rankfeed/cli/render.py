"""Formats numbers, sizes, bars and values of samples as text."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.filesize import pick_unit_and_suffix

#: Characters, bytes and elements of a value that are shown.
_TEXT, _BYTES, _ELEMENTS = 72, 16, 8
_EIGHTHS = " ▏▎▍▌▋▊▉"


def count_of(count: int, noun: str) -> str:
    """A count with its noun."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def format_figure(value: Any) -> str:
    """A figure for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {format_figure(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(format_figure(item) for item in value)
    return str(value)


def format_bytes(size: float) -> str:
    """A number of bytes for people."""
    unit, name = pick_unit_and_suffix(int(size), ["bytes", "KiB", "MiB", "GiB", "TiB"], 1024)
    figure = f"{size / unit:.3g}" if size < 100 * unit else f"{size / unit:,.0f}"
    return f"{figure} {'byte' if size == 1 else name}"


def format_bar(share: float, width: int) -> str:
    """A bar of a share of the width, to an eighth of a character; visible if the share is not 0."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def format_value(value: Any) -> str:
    """The value of a column on one line, shortened."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _TEXT else f"{len(value):,} characters  {value[:_TEXT]!r} ..."
    if isinstance(value, bytes):
        return f"{count_of(len(value), 'byte')}  {value[:_BYTES].hex(' ')}" + " ..." * (len(value) > _BYTES)
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind == "O":
        return f"{type(value).__name__}  {reprlib.repr(value)}"
    first = " ".join(
        f"{item:.4g}" if isinstance(item, float) else str(item) for item in value.ravel()[:_ELEMENTS].tolist()
    )
    shape = f"{value.dtype}[{', '.join(map(str, value.shape))}]  " if value.ndim else ""
    return shape + first + " ..." * (value.size > _ELEMENTS)


def value_as_json(value: Any) -> Any:
    """The value of a column for JSON: numbers and short texts as they are, others by their beginning."""
    if isinstance(value, str):
        return value if len(value) <= _TEXT else {"characters": len(value), "head": value[:_TEXT]}
    if isinstance(value, bytes):
        return {"bytes": len(value), "head": value[:_BYTES].hex()}
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind == "O":
        return {"type": type(value).__name__, "repr": reprlib.repr(value)}
    if not value.ndim:
        return _number_as_json(value.item())
    first = [_number_as_json(item) for item in value.flat[:_ELEMENTS].tolist()]
    return {"dtype": str(value.dtype), "shape": list(value.shape), "first": first}


def _number_as_json(value: Any) -> Any:
    is_number = isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if is_number else str(value)
