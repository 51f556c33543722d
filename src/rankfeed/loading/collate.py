"""Columns into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch

from rankfeed._util.validate import check_choice, check_int
from rankfeed.columns import Allocate, Bytes, Columns, Dense, Ragged, keep_heap
from rankfeed.errors import ArgumentError

RaggedAs = Literal["pad", "nested", "list"]


def check_ragged(ragged: object, pad_to: object = 1) -> tuple[RaggedAs, int]:
    """A way to deliver ragged columns, and the ``pad_to`` that goes with it."""
    form: RaggedAs = check_choice("ragged", ragged, get_args(RaggedAs))
    multiple = check_int("pad_to", pad_to, at_least=1, at_most=2**31 - 1)
    if multiple > 1 and form != "pad":
        raise ArgumentError("pad_to is for padded columns", expected='ragged="pad"', found=f"ragged={form!r}")
    return form, multiple


def collate(
    columns: Columns, ragged: RaggedAs, allocate: Allocate = np.empty, *, pad_to: int = 1
) -> dict[str, Any]:
    """A batch as a dict of tensors.

    Args:
        columns: rows of the batch.
        ragged: "pad" gives a tensor [rows, longest, *inner] and ``<name>_lengths`` (int64 [rows]), "nested" a
            jagged nested tensor, "list" a list of tensors.
        allocate: makes room for the tensors.
        pad_to: the longest is rounded up to a multiple of so many.

    Returns:
        tensors by column name; bytes and text as lists.

    Raises:
        ArgumentError: the lengths of a ragged column would take the name of another column.

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
            if ragged == "pad":
                if f"{name}_lengths" in columns:
                    raise ArgumentError(
                        "the loader would add a column whose name is taken",
                        found=repr(f"{name}_lengths"),
                        remedy='rename that column, or take ragged="list"',
                    )
                batch[name] = torch.from_numpy(column.pad(allocate, multiple=pad_to))
                batch[f"{name}_lengths"] = torch.from_numpy(column.lengths.copy())
            else:
                values, offsets = column.compact(allocate)
                batch[name] = _jagged(values, offsets) if ragged == "nested" else _pieces(values, offsets)
        elif isinstance(column, Bytes):
            keep_heap()
            batch[name] = column.rows()
        else:
            batch[name] = list(column.rows())
    return batch


def collate_samples(samples: Sequence[Any]) -> Any:
    """A batch out of samples that are no dicts of columns, as torch does it; but tuples stay tuples.

    Examples:
        >>> collate_samples([(1, "a"), (2, "b")])
        (tensor([1, 2]), ['a', 'b'])
    """
    first = samples[0]
    if isinstance(first, tuple):
        fields = [collate_samples(field) for field in zip(*samples, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else tuple(fields)
    if isinstance(first, dict):
        return {name: collate_samples([sample[name] for sample in samples]) for name in first}
    return torch.utils.data.default_collate(list(samples))


def _jagged(values: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> torch.Tensor:
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(values), offsets=torch.from_numpy(offsets)
    )
    return nested


def _pieces(values: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> list[torch.Tensor]:
    return list(torch.from_numpy(values).split(np.diff(offsets).tolist()))
