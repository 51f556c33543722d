"""Errors of pyarrow as errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager

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
    except InexactDecimalError as error:
        raise SourceError(
            "a decimal would lose digits as float64",
            expected="a value that float64 holds, as all of up to 15 digits are",
            found=error,
            where=where,
            remedy="cast the column when you write it (to int64 or text), or leave it out with columns=",
        ) from error
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0][:300]
        if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError)):
            raise SourceError("the file cannot be read", found=found, where=where) from error
        raise CorruptError("the data are damaged", found=found, where=where, remedy=remedy) from error
