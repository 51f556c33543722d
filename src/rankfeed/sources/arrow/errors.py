"""Errors of pyarrow, and of values that cannot be read, as errors that name file and row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Field
from rankfeed.errors import CorruptError, RankfeedError, SourceError

REMEDY = "fetch or write the file again"


class InexactDecimalError(ValueError):
    """A decimal that would lose digits as float64."""


@contextmanager
def arrow_errors(where: str, remedy: str = REMEDY) -> Iterator[None]:
    """Convert exceptions of pyarrow to errors that name the file.

    Raises:
        SourceError: the file cannot be opened, or a decimal would lose digits as float64.
        CorruptError: any other exception.
    """
    import pyarrow as pa

    try:
        yield
    except RankfeedError:
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise SourceError("the file cannot be read", found=_first_line(error), where=where) from error
    except InexactDecimalError as error:
        raise SourceError(
            "a decimal would lose digits as float64",
            expected="a value that float64 holds, as all of up to 15 digits are",
            found=error,
            where=where,
            remedy="cast the column when you write it (to int64 or text), or leave it out with columns=",
        ) from error
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError) as error:
        raise CorruptError("the data are damaged", found=_first_line(error), where=where, remedy=remedy) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def null_error(
    field: Field, where: str, first_row: int | npt.NDArray[np.int64], column: str
) -> Callable[[int], SourceError]:
    """A function that creates the error for a null in a row."""

    def error(row: int) -> SourceError:
        number = first_row + row if isinstance(first_row, int) else int(first_row[row])
        return SourceError(
            "a value is null",
            expected=f"a value of {field}",
            found="null",
            where=f"{where}, row {number}, column {column!r}",
            remedy='leave the column out with columns=, or open with nulls="mask"',
        )

    return error
