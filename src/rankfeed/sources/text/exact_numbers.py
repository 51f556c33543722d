"""Detecting integers in text that float64 would round: Arrow infers float64 above int64, or beside a fraction."""

from decimal import Decimal
from typing import Any

import numpy as np

from rankfeed.errors import SourceError

#: Integers up to this are exact in float64.
_EXACT = 2**53


def has_large(column: Any) -> bool:
    """Whether a `pyarrow.ChunkedArray` has float64 values, at any depth, that may be rounded integers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_list(column.type):
        return has_large(pc.list_flatten(column))
    if pa.types.is_struct(column.type):
        return any(map(has_large, column.flatten()))
    return column.type == pa.float64() and bool((np.abs(np.asarray(column)) >= _EXACT).any())


def is_inexact(integer: int | str) -> bool:
    """Whether float64 would round an integer, of any number of digits."""
    return Decimal(integer) != Decimal(float(str(integer)))


def inexact_error(value: object, where: str, column: str, remedy: str) -> SourceError:
    """The error for an integer that float64 would round."""
    return SourceError(
        "an integer would lose digits: its column has fractions, or numbers of other ranges",
        expected="int64, uint64, or what float64 holds exactly",
        found=value,
        where=f"{where}, column {column!r}",
        remedy=f"{remedy}; if its exact value does not matter, types={{{column!r}: 'float64'}}",
    )
