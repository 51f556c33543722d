"""A batch as columns."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import numpy as np

from rankfeed.columns.arrays import as_array
from rankfeed.columns.column import Bytes, Column, Dense, Objects, Ragged
from rankfeed.columns.field import Field
from rankfeed.columns.layout import (
    fit_values,
    flat_fields,
    infer_layout,
    leaf_of_field,
    mismatch_of_keys,
    resolve_dtypes,
)
from rankfeed.errors import ArgumentError


class Columns(Mapping[str, Column]):
    """The columns of a batch by name, all with the same number of rows.

    Examples:
        >>> batch = Columns.from_samples([{"x": 1.0, "name": "a"}, {"x": 2.0, "name": "b"}])
        >>> batch["x"].gather(), batch.samples()[1]["name"]
        (array([1., 2.]), 'b')
    """

    def __init__(self, columns: Mapping[str, Column], num_rows: int, *, as_dicts: bool = True) -> None:
        self._columns = dict(columns)
        self.num_rows = num_rows
        self.as_dicts = as_dicts

    @classmethod
    def of_objects(cls, samples: Sequence[Any]) -> Columns:
        """Samples that are no dicts of columns: one column "", with ``as_dicts`` False."""
        return cls({"": Objects(samples)}, len(samples), as_dicts=False)

    @classmethod
    def from_samples(
        cls, samples: Sequence[Mapping[str, Any]], fields: Mapping[str, Field] | None = None
    ) -> Columns:
        """Columns of dicts that have the same keys.

        Args:
            samples: dicts of numbers, strings, bytes, arrays, tensors, (nested) lists of numbers.
            fields: types of some of them, to which values are converted without loss; the dtype of a ragged one
                may be left empty.

        Raises:
            Mismatch: keys differ, or a value does not fit its column; names field and row.
        """
        names = list(samples[0]) if samples else []
        for row, sample in enumerate(samples):
            if sample.keys() != samples[0].keys():
                missing = [name for name in names if name not in sample]
                extra = [name for name in sample if name not in samples[0]]
                raise mismatch_of_keys(dict, names, missing, extra, ()).at(row)
        known = fields or {}
        columns = {name: make_column(name, [each[name] for each in samples], known.get(name)) for name in names}
        return cls(columns, len(samples))

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    # The views of the dict: those of Mapping look each column up by its name.
    def items(self) -> ItemsView[str, Column]:
        return self._columns.items()

    def values(self) -> ValuesView[Column]:
        return self._columns.values()

    def samples(self) -> list[Any]:
        """Each row as a sample: a dict, unless samples are something else."""
        if not self.as_dicts:
            return list(self._columns[""].rows())
        rows = [column.rows() for column in self._columns.values()]
        if not rows:
            return [{} for _ in range(self.num_rows)]
        return [dict(zip(self._columns, row, strict=True)) for row in zip(*rows, strict=True)]


def make_column(name: str, values: Sequence[Any], field: Field | None = None) -> Column:
    """The column of some values (at least one).

    Raises:
        Mismatch: the values have no common type, do not fit the field, or are objects that no column holds.
    """
    if field is None or (field.kind in ("dense", "ragged") and not field.dtype):
        known = None if field is None else {name: field}
        found = flat_fields(resolve_dtypes(infer_layout([{name: value} for value in values], known)))
        if found is None:
            as_array(name, values[0])  # raises a more precise error for most values
            raise ArgumentError(f"{name!r} is not a number, string, bytes or numeric array")
        field = found[name]
    rows: Any = fit_values(values, leaf_of_field(field), (name,))
    if field.kind == "object":
        return Objects(rows)
    if field.kind in ("bytes", "str"):
        return Bytes.of(rows, text=field.kind == "str")
    if field.kind == "ragged":
        return Ragged.of(rows)
    return Dense.of(rows if isinstance(rows, np.ndarray) else np.stack(rows))
