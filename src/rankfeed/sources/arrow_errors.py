"""What goes wrong with Arrow's data, as errors that name file and row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Field
from rankfeed.errors import CorruptError, RankfeedError, SourceError


class InexactDecimalError(ValueError):
    """A decimal that would lose digits as float64."""


@contextmanager
def arrow_errors(where: str, remedy: str = "fetch the file anew, or write it again") -> Iterator[None]:
    """Turns what pyarrow raises into errors that name the file.

    Raises:
        SourceError: the file cannot be opened, or a decimal would lose digits as float64.
        CorruptError: anything else.
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
            expected="a value that float64 gives back, as all of up to 15 digits are",
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
    """What is raised for a row in which a value is null.

    Args:
        field: of the column.
        where: the file, and part of it.
        first_row: number of the first row there, or int64 [rows], that of each.
        column: its name.
    """

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
