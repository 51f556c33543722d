"""Collates columns and samples into tensors."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from rankfeed._util.validate import check_choice, check_int
from rankfeed.columns import Allocate, Bytes, Columns, Dense, Layout, Leaf, Ragged, retain_heap
from rankfeed.columns.layout import Mismatch, Path, dotted_name, fit_values, map_leaves
from rankfeed.errors import ArgumentError

RaggedAs = Literal["pad", "nested", "list"]
#: What a loader yields, unless samples are tuples or a ``collate_fn`` returns something else.
Batch = dict[str, torch.Tensor | list[Any]]
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
    columns: Columns, ragged: RaggedAs, allocate: Allocate = np.empty, *, pad_to: int = 1
) -> dict[str, Any]:
    """A batch as a dict of tensors; bytes and text as lists.

    A ragged column is padded, with ``<name>_lengths`` (int64 [rows]) beside it and its longest length rounded up
    to a multiple of ``pad_to``; or it becomes a jagged nested tensor, or a list of tensors.

    Examples:
        >>> rows = Columns.from_samples([{"x": [1, 2], "y": 5}, {"x": [3], "y": 6}])
        >>> batch = collate(rows, "pad")
        >>> batch["x"].tolist(), batch["x_lengths"].tolist(), batch["y"].tolist()
        ([[1, 2], [3, 0]], [2, 1], [5, 6])
    """
    batch: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Dense):
            batch[name] = torch.from_numpy(column.gather(allocate))
        elif isinstance(column, Ragged):
            batch[name] = _collate_ragged(column, ragged, allocate, pad_to)
        elif isinstance(column, Bytes):
            retain_heap()
            batch[name] = column.rows()
        else:
            batch[name] = list(column.rows())
    return _spread_lengths(batch)


def collate_samples(
    samples: Sequence[Any],
    layout: Layout,
    ragged: RaggedAs = "pad",
    allocate: Allocate = np.empty,
    *,
    pad_to: int = 1,
) -> tuple[Any, Padding]:
    """A batch of samples one by one, of a wrapped Dataset, a transform or a stream: dicts, tuples or values.

    Examples:
        >>> from rankfeed.columns.layout import infer_layout
        >>> samples = [(1, "a", [5, 6]), (2, "b", [])]
        >>> collate_samples(samples, infer_layout(samples))[0]
        (tensor([1, 2]), ['a', 'b'], (tensor([[5, 6],
                [0, 0]]), tensor([2, 0])))
    """
    waste = total = 0

    def tensors(leaf: Leaf, path: Path, values: Sequence[Any]) -> Any:
        nonlocal waste, total
        rows: Any = fit_values(values, leaf, path)
        if leaf.how == "torch":
            return torch.utils.data.default_collate(list(rows))
        if leaf.how == "arrays":
            return [torch.from_numpy(np.array(row)) for row in rows]
        if leaf.how != "tensor":
            return list(rows)
        field = leaf.field
        if field.kind == "dense":
            if isinstance(rows, np.ndarray):
                return torch.from_numpy(rows)
            return torch.from_numpy(np.stack(rows, out=allocate((len(rows), *field.shape), np.dtype(field.dtype))))
        column = Ragged.of(rows)
        collated = _collate_ragged(column, ragged, allocate, pad_to)
        if isinstance(collated, _Padded):
            total += collated.values.nbytes
            waste += collated.values.nbytes - column.nbytes
        return collated

    return _with_lengths(map_leaves(samples, layout, tensors), layout), (waste, total)


def check_collated(leaf: Leaf, path: Path, values: Sequence[Any]) -> None:
    """Raise Mismatch for values that cannot be collated: ``None``, an object."""
    if leaf.how != "torch":
        return
    for row, value in enumerate(values):
        try:
            torch.utils.data.default_collate([value])
        except Exception as error:
            summary = f"field {dotted_name(path)!r} cannot be collated" if path else "samples cannot be collated"
            expected, found = "numbers, arrays, tensors, text, or lists or dicts of these", type(value).__name__
            raise Mismatch.of(summary, path, "value", expected=expected, found=found, row=row) from error


class _Padded(NamedTuple):
    values: torch.Tensor
    lengths: torch.Tensor


def _with_lengths(batch: Any, layout: Layout) -> Any:
    """The batch with the lengths of padded fields added."""
    if isinstance(layout, Leaf):
        return tuple(batch) if isinstance(batch, _Padded) else batch
    if layout.kind is not dict:
        parts = [_with_lengths(value, part) for value, part in zip(batch, layout.parts.values(), strict=True)]
        return layout.kind(*parts) if hasattr(layout.kind, "_fields") else layout.kind(parts)
    fields = {name: batch[name] for name in layout.parts}
    for name, part in layout.parts.items():
        if not isinstance(part, Leaf):
            fields[name] = _with_lengths(batch[name], part)
    return _spread_lengths(fields)


def _spread_lengths(batch: dict[Any, Any]) -> dict[Any, Any]:
    """The batch with the lengths of each padded field after it."""
    found: dict[Any, Any] = {}
    for name, value in batch.items():
        found[name] = value
        if isinstance(value, _Padded):
            if f"{name}_lengths" in batch or f"{name}_lengths" in found:
                raise name_conflict(f"{name}_lengths")
            found[name], found[f"{name}_lengths"] = value
    return found


def name_conflict(name: str) -> ArgumentError:
    """The error for a column of lengths, ids or padding rows that would replace another one."""
    return ArgumentError(
        "the loader would add a column whose name is taken",
        found=repr(name),
        remedy='rename that column or leave it out (columns=), choose another id_column, or take ragged="list"',
    )


def _collate_ragged(column: Ragged, ragged: RaggedAs, allocate: Allocate, pad_to: int) -> Any:
    if ragged == "pad":
        padded = column.pad(allocate, multiple=pad_to)
        return _Padded(torch.from_numpy(padded), torch.from_numpy(column.lengths.copy()))
    values, offsets = map(torch.from_numpy, column.compact(allocate))
    if ragged == "nested":
        return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
    return list(values.split(offsets.diff().tolist()))
