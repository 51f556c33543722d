"""A batch as columns, and columns out of samples."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns.column import Bytes, Column, Dense, Objects, Ragged
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError


class Columns(Mapping[str, Column]):
    """The columns of a batch by name, all of one length.

    Examples:
        >>> batch = Columns.from_samples([{"x": 1.0, "name": "a"}, {"x": 2.0, "name": "b"}])
        >>> batch["x"].gather(), batch.samples()[1]["name"]
        (array([1., 2.]), 'b')
    """

    def __init__(self, columns: Mapping[str, Column], num_rows: int) -> None:
        self._columns = dict(columns)
        self.num_rows = num_rows

    @classmethod
    def from_samples(
        cls, samples: Sequence[Mapping[str, Any]], fields: Mapping[str, Field] | None = None
    ) -> Columns:
        """Columns out of dicts that have the same keys.

        Args:
            samples: dicts of numbers, strings, bytes, arrays, tensors, (nested) lists of numbers.
            fields: kinds that are known already. A field known to be ragged stays so where a batch's rows
                happen to be of one length.

        Raises:
            ArgumentError: keys differ, or a value has no place in a column; names the field.
        """
        names = list(samples[0]) if samples else []
        for sample in samples:
            if sample.keys() != samples[0].keys():
                raise ArgumentError("samples of one batch have different keys", expected=names, found=list(sample))
        known = fields or {}
        columns = {name: column_of(name, [sample[name] for sample in samples], known.get(name)) for name in names}
        return cls(columns, len(samples))

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    # The dict's own views: those that a Mapping makes ask for each column by its name.
    def items(self) -> ItemsView[str, Column]:
        return self._columns.items()

    def values(self) -> ValuesView[Column]:
        return self._columns.values()

    def samples(self) -> list[dict[str, Any]]:
        """Each row as a dict of its own."""
        rows = [column.rows() for column in self._columns.values()]
        if not rows:
            return [{} for _ in range(self.num_rows)]
        return [dict(zip(self._columns, row, strict=True)) for row in zip(*rows, strict=True)]


def column_of(name: str, values: Sequence[Any], field: Field | None = None) -> Column:
    """The column that holds these values.

    Raises:
        ArgumentError: they have nothing in common, or are objects that no column holds.
    """
    first = values[0]
    for kind in (bytes, str):
        if isinstance(first, kind):
            if not all(isinstance(value, kind) for value in values):
                raise _mixture(name, values)
            return Bytes.of(values)
    if field is not None and field.kind == "object":
        return Objects(values)
    arrays = [as_array(name, value) for value in values]
    shapes = {array.shape for array in arrays}
    if len({array.shape[1:] for array in arrays}) > 1 or len({array.ndim for array in arrays}) > 1:
        raise ArgumentError(
            f"rows of {name!r} differ in more than their first dimension",
            found=", ".join(map(str, sorted(shapes)[:4])),
            remedy="store them flat with a column for the shape, or as bytes",
        )
    dtype = np.result_type(*{array.dtype for array in arrays})
    ragged = len(shapes) > 1 or (field is not None and field.kind == "ragged" and arrays[0].ndim > 0)
    if ragged:
        return Ragged.of([array.astype(dtype, copy=False) for array in arrays])
    return Dense.of(np.stack(arrays, dtype=dtype))


def as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """A number, array, tensor or list of numbers as a numeric array.

    Raises:
        ArgumentError: it is none of these: None, an object array, a mixture.
    """
    if hasattr(value, "detach"):  # a torch tensor, without importing torch to find out
        try:
            value = value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:  # bfloat16, sparse, nested
            raise ArgumentError(
                f"{name!r} is a tensor that numpy cannot hold",
                found=f"{getattr(value, 'dtype', type(value).__name__)}: {error}",
                remedy="turn it into a dense tensor of a type that numpy has, or give a collate_fn",
            ) from error
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "biufc":
        what = f"{type(value).__name__} of dtype {array.dtype}"
        raise ArgumentError(
            f"{name!r} is not a number, string, bytes or numeric array",
            found=what if hasattr(value, "dtype") else f"{type(value).__name__}: {value!r:.60}",
            remedy="turn it into one of these; objects are not stored, since reading them back would run code",
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _mixture(name: str, values: Sequence[Any]) -> ArgumentError:
    kinds = sorted({type(value).__name__ for value in values})
    return ArgumentError(f"values of {name!r} are of different kinds", found=", ".join(kinds))
