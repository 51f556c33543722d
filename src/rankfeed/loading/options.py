"""What a loader is asked for, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rankfeed.errors import ArgumentError
from rankfeed.plan import Plan, Shuffle, Tail
from rankfeed.plan.plan import DEFAULT_LANES, DEFAULT_WINDOW
from rankfeed.sources import Source

_Value = TypeVar("_Value")


def plan_of(source: Source, shuffle: bool | str, seed: int, window: int, lanes: int | None) -> Plan:
    """The order that a loader's own arguments ask for."""
    kinds: dict[bool | str, Shuffle] = {
        False: "none",
        True: source.default_shuffle,
        "none": "none",
        "global": "global",
        "window": "window",
    }
    if shuffle not in kinds:
        raise ArgumentError("unknown kind of shuffle", expected='False, True, "global" or "window"', found=shuffle)
    kind = kinds[shuffle]
    if lanes is None:
        lanes = DEFAULT_LANES[kind]
    if shuffle is True and window == DEFAULT_WINDOW and source.best_window is not None:
        window = min(window, source.best_window)
    return Plan(source.blocks, shuffle=kind, seed=seed, window=window, lanes=lanes)


def check_names(
    source: Source, columns: Sequence[str] | None, id_column: str | None, tail: Tail, ragged: str
) -> None:
    """Refuse columns that are not there, and names that the loader would write over."""
    if id_column == "valid":
        raise ArgumentError("the name 'valid' is taken: it is the mask's", remedy="choose another id_column")
    fields = source.fields
    if "" in fields:  # samples that are no dicts: nothing can be added to them
        for name, value, given in (
            ("id_column", id_column, id_column is not None),
            ('tail="pad"', "it marks rows", tail == "pad"),
            ("columns", columns, columns is not None),
        ):
            if given and (name == "columns" or source.annotate is None):
                raise ArgumentError(
                    f"{name} needs samples that are dicts",
                    found=f"{value!r} for a Dataset whose samples are something else",
                    remedy="return dicts from the Dataset's __getitem__",
                )
        return
    missing = [name for name in columns or () if name not in fields]
    if isinstance(columns, str) or missing:
        raise ArgumentError(
            "no such column",
            expected="a list of some of " + ", ".join(fields),
            found=repr(columns) if isinstance(columns, str) else ", ".join(map(repr, missing)),
        )
    names = list(fields if columns is None else columns)
    added = [f"{name}_lengths" for name in names if ragged == "pad" and fields[name].kind == "ragged"]
    added += [id_column] if id_column is not None else []
    added += ["valid"] if tail == "pad" else []
    for name in added:
        if name in names or added.count(name) > 1:
            raise ArgumentError(
                "the loader would add a column whose name is taken",
                found=repr(name),
                remedy='choose another id_column, leave that column out with columns=, or take ragged="list"',
            )


def one_of(name: str, value: _Value, allowed: Sequence[object]) -> _Value:
    """``value``, if it is one of those allowed; else an ArgumentError that names them."""
    if value not in allowed:
        expected = " | ".join(repr(each) for each in allowed)
        raise ArgumentError(f"{name} cannot be used", expected=expected, found=repr(value))
    return value
