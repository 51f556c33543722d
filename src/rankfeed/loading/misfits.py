"""What is said of a sample that does not fit the fields of the batches, and what to write so that it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankfeed.columns import Layout, Mismatch
from rankfeed.columns.layout import dotted_name, flat_fields
from rankfeed.errors import RankfeedError, SourceError, StreamError, TransformError

if TYPE_CHECKING:
    from rankfeed.loading.maker import Maker

#: A line with more fields than this is shortened.
_MOST_FIELDS = 8


def misfit(maker: Maker, error: Mismatch, where: str, layout: Layout | None = None) -> RankfeedError:
    """The error that a user sees.

    Args:
        maker: whose batches they are.
        error: what does not fit.
        where: which sample, rank and step.
        layout: fixed for all batches; None while it is learned.
    """
    declared = maker.source.declared
    kind: type[RankfeedError] = TransformError if maker.transform is not None else SourceError
    if kind is SourceError and declared is not None and declared.what == "the stream":
        kind = StreamError
    what = (
        "the transform"
        if maker.transform is not None
        else declared.what
        if declared is not None
        else "the Dataset"
    )
    if layout is None:
        summary = f"samples of {what} do not go together: {error.summary}"
    else:
        summary = f"a sample of {what} does not fit the fields of the batches: {error.summary}"
    return kind(
        summary,
        expected=error.expected,
        found=error.found,
        where=f"{error.where}, {where}" if error.where else where,
        remedy=_remedy(maker, error, layout),
    )


def _remedy(maker: Maker, error: Mismatch, layout: Layout | None) -> str:
    declared, name = maker.source.declared, dotted_name(error.path)
    shown = error.path[0] if len(error.path) == 1 and isinstance(error.path[0], int) else name
    if error.cure == "keys":
        return "return the same keys for every sample, or give the Loader a collate_fn"
    if error.cure == "names":
        return "leave it out of ragged="
    if error.cure == "list":
        if maker.ragged == "list":
            return "give the Loader a collate_fn"
        return 'take Loader(..., ragged="list"), which delivers lists of tensors, or give a collate_fn'
    if error.cure == "ragged":
        if declared is None or not error.path:
            return f"return {name or 'it'} as a list (lists are ragged in every batch), or give a collate_fn"
        if declared.layout is not None:
            return f'declare it in fields=: {shown!r}: "{error.becomes}"'
        names = [int(each) if each.isdigit() else each for each in declared.ragged]
        return f"rankfeed.{declared.call}, ragged={[*names, shown]!r})"
    if error.cure == "type" and error.becomes:
        if declared is not None and declared.what == "the Dataset" and len(error.path) == 1:
            fields = flat_fields(layout) if layout is not None else None
            if fields is not None:
                line = {key: str(field) for key, field in fields.items()} | {name: error.becomes}
                more = ", ..." if len(line) > _MOST_FIELDS else ""
                kept = {name: error.becomes} if more else line
                text = ", ".join(f"{key!r}: {each!r}".replace("'", '"') for key, each in kept.items())
                return f"rankfeed.{declared.call}, fields={{{text}{more}}})"
        return f"return {name or 'it'} as {error.becomes} for every sample, or give a collate_fn"
    return "turn it into what the others hold, or give the Loader a collate_fn"
