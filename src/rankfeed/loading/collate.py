"""Collates columns and samples into tensors; ``columns/columns.py`` gathers and pads the rows.

Also counts the rows of a batch that a function of the user returned.
"""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from rankfeed._util.validate import check_choice, check_int
from rankfeed.columns.buffers import retain_heap
from rankfeed.columns.columns import Allocate, Bytes, Columns, Dense, Ragged
from rankfeed.columns.layout import Layout, Leaf, Mismatch, Path, dotted_name, fit_values, map_leaves
from rankfeed.columns.pointers import PendingCopies
from rankfeed.errors import ArgumentError, RankfeedError, TransformError, listed

RaggedAs = Literal["pad", "nested", "list"]
BytesAs = Literal["bytes", "view"]
#: What a loader yields, unless samples are tuples or a ``collate_fn`` returns something else.
Batch = dict[str, torch.Tensor | list[Any]]
#: A tuple of at most this many entries may have one for each field, and not for each row.
_MAX_FIELDS = 4
#: Elements of a value by which rows are compared.
_KEY_ELEMENTS = 16
#: How to leave samples out so that the counts are right.
LEAVE_OUT = "leave samples out before the Loader (source.select(ids), or a filter in the stream)"
#: Bytes of padding, and of the padded columns.
Padding = tuple[int, int]


def check_ragged(ragged: object, pad_to: object = 1) -> tuple[RaggedAs, int]:
    """The validated options ``ragged`` and ``pad_to``."""
    form: RaggedAs = check_choice("ragged", ragged, get_args(RaggedAs))
    multiple = check_int("pad_to", pad_to, at_least=1, at_most=2**31 - 1)
    if multiple > 1 and form != "pad":
        raise ArgumentError("pad_to is for padded columns", expected='ragged="pad"', found=f"ragged={form!r}")
    return form, multiple


def collate(
    columns: Columns,
    ragged: RaggedAs,
    allocate: Allocate = np.empty,
    copies: PendingCopies | None = None,
    *,
    pad_to: int = 1,
    bytes_as: BytesAs = "bytes",
) -> tuple[dict[str, Any], Padding]:
    """A batch as a dict of tensors, and its padding; bytes and text as lists, bytes also as views of one buffer.

    A ragged column is padded, with ``<name>_lengths`` (int64 [rows]) beside it and its longest length rounded up
    to a multiple of ``pad_to``; or it becomes a jagged nested tensor, or a list of tensors. With ``copies``, rows
    are there when these have been waited for.
    """
    batch: dict[str, Any] = {}
    padding = nbytes = 0
    for name, column in columns.items():
        if isinstance(column, Dense):
            batch[name] = torch.from_numpy(column.gather(allocate, copies))
        elif isinstance(column, Ragged):
            collated = _collate_ragged(column, ragged, allocate, pad_to, copies)
            if isinstance(collated, _Padded):
                if f"{name}_lengths" in columns:
                    raise name_conflict(f"{name}_lengths")
                batch[name], batch[f"{name}_lengths"], (waste, size) = collated
                padding, nbytes = padding + waste, nbytes + size
            else:
                batch[name] = collated
        elif isinstance(column, Bytes) and bytes_as == "view" and column.field.kind == "bytes":
            batch[name] = column.views(allocate, copies)
        elif isinstance(column, Bytes):
            retain_heap()
            batch[name] = column.rows(copies)
        else:
            batch[name] = list(column.rows())
    return batch, (padding, nbytes)


def collate_steps(
    columns: Columns,
    edges: Sequence[int],
    allocate: Allocate = np.empty,
    copies: PendingCopies | None = None,
    *,
    pad_to: int = 1,
) -> list[tuple[dict[str, Any], Padding]]:
    """What `collate` returns of the rows between each two edges, for dense columns and padded ragged ones."""
    batches: list[dict[str, Any]] = [{} for _ in edges[1:]]
    paddings, intervals = [(0, 0)] * len(batches), list(pairwise(edges))
    for name, column in columns.items():
        if isinstance(column, Dense):
            array = column.gather(allocate, copies)
            for batch, (first, last) in zip(batches, intervals, strict=True):
                batch[name] = torch.from_numpy(array[first:last])
        elif isinstance(column, Ragged):
            lengths, width = column.lengths.copy(), column.pointers.width
            values = column.pad_steps(edges, allocate, copies, multiple=pad_to)
            for step, (first, last) in enumerate(intervals):
                padded = _padded(values[step], lengths[first:last], width)
                batches[step][name], batches[step][f"{name}_lengths"], (waste, size) = padded
                paddings[step] = paddings[step][0] + waste, paddings[step][1] + size
    return list(zip(batches, paddings, strict=True))


def collate_samples(
    samples: Sequence[Any],
    layout: Layout,
    ragged: RaggedAs = "pad",
    allocate: Allocate = np.empty,
    *,
    pad_to: int = 1,
    bytes_as: BytesAs = "bytes",
) -> tuple[Any, Padding]:
    """A batch of samples one by one, of a wrapped Dataset, a transform or a stream: dicts, tuples or values."""
    padded: list[Padding] = []

    def tensors(leaf: Leaf, path: Path, values: Sequence[Any]) -> Any:
        rows: Any = fit_values(values, leaf, path)
        if leaf.how == "torch":
            return torch.utils.data.default_collate(list(rows))
        if leaf.how == "arrays":
            return [torch.from_numpy(np.array(row)) for row in rows]
        if bytes_as == "view" and leaf.field.kind == "bytes":
            return Bytes.views_of(rows, allocate)
        if leaf.how != "tensor":
            return list(rows)
        field = leaf.field
        if field.kind == "dense":
            if isinstance(rows, np.ndarray):
                return torch.from_numpy(rows)
            return torch.from_numpy(np.stack(rows, out=allocate((len(rows), *field.shape), np.dtype(field.dtype))))
        collated = _collate_ragged(Ragged.of(rows), ragged, allocate, pad_to)
        if isinstance(collated, _Padded):
            padded.append(collated.padding)
        return collated

    batch = _with_lengths(map_leaves(samples, layout, tensors), layout)
    return batch, (sum(waste for waste, _ in padded), sum(size for _, size in padded))


def check_collated(leaf: Leaf, path: Path, values: Sequence[Any]) -> None:
    """Raise Mismatch for values that cannot be collated: ``None``, an object."""
    if leaf.how != "torch":
        return
    for row, value in enumerate(values):
        try:
            torch.utils.data.default_collate([value])
        except Exception as error:
            summary = f"field {dotted_name(path)!r} cannot be collated" if path else "samples cannot be collated"
            expected, actual = "numbers, arrays, tensors, text, or lists or dicts of these", type(value).__name__
            raise Mismatch.of(summary, path, "value", expected=expected, found=actual, row=row) from error


class _Padded(NamedTuple):
    values: torch.Tensor
    lengths: torch.Tensor
    padding: Padding


def _with_lengths(batch: Any, layout: Layout) -> Any:
    """The batch with the lengths of each padded field after it."""
    if isinstance(layout, Leaf):
        return batch[:2] if isinstance(batch, _Padded) else batch
    if layout.kind is not dict:
        parts = [_with_lengths(value, part) for value, part in zip(batch, layout.parts.values(), strict=True)]
        return layout.kind(*parts) if hasattr(layout.kind, "_fields") else layout.kind(parts)
    fields: dict[Any, Any] = {}
    for name, part in layout.parts.items():
        collated = batch[name]
        if not isinstance(collated, _Padded):
            fields[name] = _with_lengths(collated, part)
            continue
        if f"{name}_lengths" in layout.parts or f"{name}_lengths" in fields:
            raise name_conflict(f"{name}_lengths")
        fields[name], fields[f"{name}_lengths"] = collated[:2]
    return fields


def name_conflict(name: str, where: str | None = None, kind: type[RankfeedError] = ArgumentError) -> RankfeedError:
    """The error for a column of lengths, ids or padding rows that would replace another one."""
    return kind(
        "a column with a name that the loader needs exists already",
        found=repr(name),
        where=where,
        remedy='rename that column or leave it out (columns=), choose another id_column, or take ragged="list"',
    )


def _padded(values: npt.NDArray[Any], lengths: npt.NDArray[np.int64], width: int) -> _Padded:
    padding = values.nbytes - int(lengths.sum()) * width
    return _Padded(torch.from_numpy(values), torch.from_numpy(lengths), (padding, values.nbytes))


def _collate_ragged(
    column: Ragged, ragged: RaggedAs, allocate: Allocate, pad_to: int, copies: PendingCopies | None = None
) -> Any:
    if ragged == "pad":
        values = column.pad(allocate, copies, multiple=pad_to)
        return _padded(values, column.lengths.copy(), column.pointers.width)
    elements, offsets = map(torch.from_numpy, column.compact(allocate, copies))
    if ragged == "nested":
        return torch.nested.nested_tensor_from_jagged(elements, offsets=offsets)
    return list(elements.split(offsets.diff().tolist()))


def check_rows(
    batch: Any, sample_ids: npt.NDArray[np.int64], id_column: str | None, function: str, where: str
) -> bool:
    """Whether a batch of a user's function is known to have every row; raises TransformError if it lacks some.

    The ids prove it if the batch has them; otherwise the first dimension that all arrays have in common.
    """
    rows, ids = len(sample_ids), None if id_column is None else batch_field(batch, id_column)
    if ids is not None:
        returned = _integers(ids)
        if returned is None or np.array_equal(np.sort(returned), np.sort(sample_ids)):
            return returned is not None
        missing = sorted(Counter(sample_ids.tolist()) - Counter(returned.tolist()))
        if missing:
            absent = f"no {listed([*map(str, missing)], 8)} in column {id_column!r}"
            raise _rows_missing(function, sample_ids, absent, where)
        return False
    counts = _row_counts(batch, rows)
    certain = [count for count in counts if count is not None]
    if certain and len(certain) == len(counts) and max(certain) < rows:
        raise _rows_missing(function, sample_ids, f"{max(certain)} rows in every array", where)
    return counts == {rows}


def check_order(batch: Any, samples: Sequence[Any], sample_ids: npt.NDArray[np.int64], where: str) -> None:
    """Raise TransformError if rows without ids are seen to be in another order, or to be copies of others.

    A field shows the order if its values differ between the samples and the batch has it under the same name.
    """
    unlike = None
    for name in samples[0] if isinstance(samples[0], Mapping) else ():
        column = batch_field(batch, name)
        if not isinstance(column, torch.Tensor | np.ndarray | list):
            continue
        with suppress(KeyError, TypeError, ValueError, RuntimeError):  # not comparable
            if len(column) != len(samples):
                continue
            values = column.tolist() if isinstance(column, torch.Tensor) and column.ndim == 1 else column
            keys = _row_keys([*(sample[name] for sample in samples), *values])
            given_keys, batch_keys = keys[: len(samples)], keys[len(samples) :]
            if len({*given_keys}) == len({*sample_ids.tolist()}):
                if given_keys == batch_keys:
                    return
                if {*given_keys} >= {*batch_keys}:
                    unlike = name
    if unlike is not None:
        raise TransformError(
            "the batch of the collate_fn is not in the order of its samples, and has no ids",
            expected="one row for each sample, in the order of the samples; or the ids of the rows",
            found=f"values of other samples in {unlike!r}",
            where=_ids_range(sample_ids, where),
            remedy="set id_column= and return that column of the samples (those that are dicts have it)",
        )


def valid_rows(ids: Any, sample_ids: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The mask of rows that are in the order of returned ids."""
    returned = _integers(ids)
    if returned is None or len(returned) != len(sample_ids):
        return valid
    mask = np.empty_like(valid)
    mask[returned.argsort(kind="stable")] = valid[sample_ids.argsort(kind="stable")]
    return mask


def _row_keys(values: Sequence[Any]) -> list[Hashable]:
    """Text, or the elements of each value at some places; a TypeError for anything but numbers and arrays."""
    if all(isinstance(value, str | bytes) for value in values):
        return [*values]
    if all(isinstance(value, int | float | np.number) for value in values):
        rows = np.array(values).reshape(-1, 1)
    else:
        flat = [value.flatten() if isinstance(value, torch.Tensor) else np.ravel(value) for value in values]
        size = min(map(len, flat))  # padded rows begin with the values of their sample
        if not size:
            raise TypeError("an empty row")
        places = np.unique(np.linspace(0, size - 1, _KEY_ELEMENTS).astype(int))
        rows = np.array([array[places].tolist() for array in flat])
    if rows.dtype.kind not in "biuf":
        raise TypeError(rows.dtype)
    with np.errstate(over="ignore"):
        return [*map(tuple, (rows.astype(np.float32) if rows.dtype.kind == "f" else rows).tolist())]


def batch_field(batch: Any, name: str) -> Any:
    """A column of a batch that is a mapping or an object; None if it has none of this name."""
    return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)


def _rows_missing(function: str, sample_ids: npt.NDArray[np.int64], absent: str, where: str) -> TransformError:
    return TransformError(
        f"the {function} returned a batch that lacks rows, which would be counted as delivered",
        expected=f"{len(sample_ids)} rows, one for each sample",
        found=absent,
        where=_ids_range(sample_ids, where),
        remedy=f"return a row for each sample; {LEAVE_OUT}; where rows are packed on purpose, set id_column= and "
        "return that column with the ids of all samples",
    )


def _ids_range(sample_ids: npt.NDArray[np.int64], where: str) -> str:
    return f"samples {sample_ids.min()} to {sample_ids.max()}, {where}"


def _integers(values: Any) -> npt.NDArray[Any] | None:
    """All integers of an array, or of a list of them or of arrays; None for anything else."""
    try:
        parts = values if isinstance(values, list | tuple) and any(map(np.ndim, values)) else [values]
        array = np.concatenate([np.ravel(torch.as_tensor(part).cpu().numpy()) for part in parts])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return array if array.dtype.kind in "iu" else None


def _row_counts(value: Any, rows: int, *, is_batch: bool = True) -> set[int | None]:
    """The numbers of rows that a part of a batch may have, of which ``rows`` went in.

    None stands for arrays that differ in their first dimension, and for objects; nothing has no rows.
    """
    if isinstance(value, Mapping):
        return _common_counts(value.values(), rows)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _common_counts(value, rows)
    if isinstance(value, list | tuple):
        # Entries are fields, or there is one for each row.
        counts, is_short = _common_counts(value, rows), len(value) <= _MAX_FIELDS
        if rows in counts or (len(value) == rows and not is_short):
            return {rows}
        if None in counts and not is_batch and (isinstance(value, list) or not is_short):
            return {len(value)}
        # A few entries without arrays may be fields or rows.
        return {len(value), *(counts or {None})} if is_batch and is_short else {len(value), *counts}
    if isinstance(value, torch.Tensor):
        return {value.size(0)} if value.dim() else set()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _common_counts((getattr(value, field.name) for field in dataclasses.fields(value)), rows)
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return set()
    shape = getattr(value, "shape", None)
    return {None} if shape is None else {int(size) for size in shape[:1]}


def _common_counts(values: Iterable[Any], rows: int) -> set[int | None]:
    counts = [count for part in values if (count := _row_counts(part, rows, is_batch=False))]
    return (set.intersection(*counts) or {None}) if counts else set()
