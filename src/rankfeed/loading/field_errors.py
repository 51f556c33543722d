"""The error for a sample that does not fit the fields of the batches, with the remedy that makes it fit."""

from __future__ import annotations

from rankfeed.columns import Layout, Mismatch
from rankfeed.columns.layout import dotted_name, flat_fields
from rankfeed.errors import RankfeedError, SourceError, StreamError, TransformError
from rankfeed.sources.source import Declared

#: A suggested fields= with more entries is shortened.
_MAX_FIELDS_SHOWN = 8


def field_error(
    error: Mismatch,
    where: str,
    *,
    declared: Declared | None,
    transformed: bool,
    ragged: str,
    layout: Layout | None,
) -> RankfeedError:
    """The error to raise for a mismatch."""
    kind: type[RankfeedError] = TransformError if transformed else SourceError
    if kind is SourceError and declared is not None and declared.what == "the stream":
        kind = StreamError
    owner = "the transform" if transformed else declared.what if declared is not None else "the Dataset"
    if layout is None:
        summary = f"samples of {owner} do not have the same fields: {error.summary}"
    else:
        summary = f"a sample of {owner} does not fit the fields of the batches: {error.summary}"
    return kind(
        summary,
        expected=error.expected,
        found=error.found,
        where=f"{error.where}, {where}" if error.where else where,
        remedy=_remedy(error, declared, ragged, layout),
    )


def _remedy(error: Mismatch, declared: Declared | None, ragged: str, layout: Layout | None) -> str:
    name = dotted_name(error.path)
    key = error.path[0] if len(error.path) == 1 and isinstance(error.path[0], int) else name
    if error.cure == "keys":
        return "return the same keys for every sample, or pass a collate_fn to the Loader"
    if error.cure == "names":
        return "leave it out of ragged="
    if error.cure == "list":
        if ragged == "list":
            return "pass a collate_fn to the Loader"
        return 'use Loader(..., ragged="list"), which delivers lists of tensors, or pass a collate_fn'
    if error.cure == "ragged":
        if declared is None or not error.path:
            return f"return {name or 'it'} as a list (lists are ragged in every batch), or pass a collate_fn"
        if declared.layout is not None:
            return f'declare it in fields=: {key!r}: "{error.becomes}"'
        names = [int(each) if each.isdigit() else each for each in declared.ragged]
        return f"rankfeed.{declared.call}, ragged={[*names, key]!r})"
    if error.cure == "type" and error.becomes:
        fields = flat_fields(layout) if layout is not None else None
        if declared is not None and declared.what == "the Dataset" and len(error.path) == 1 and fields is not None:
            types = {key: str(field) for key, field in fields.items()} | {name: error.becomes}
            more = ""
            if len(types) > _MAX_FIELDS_SHOWN:
                types, more = {name: error.becomes}, ", ..."
            text = ", ".join(f"{key!r}: {each!r}".replace("'", '"') for key, each in types.items())
            return f"rankfeed.{declared.call}, fields={{{text}{more}}})"
        return f"return {name or 'it'} as {error.becomes} for every sample, or pass a collate_fn"
    return "convert it to the type of the others, or pass a collate_fn to the Loader"
