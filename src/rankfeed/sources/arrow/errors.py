"""Errors of pyarrow as errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager

from rankfeed.errors import SourceError
from rankfeed.storage import file_errors


class InexactDecimalError(ValueError):
    """A decimal that would lose digits as float64."""


@contextmanager
def arrow_errors(where: str, remedy: str | None = None) -> Iterator[None]:
    """As `file_errors`, for exceptions of pyarrow; also for a decimal that would lose digits as float64."""
    import pyarrow as pa

    damage = (pa.ArrowException, ValueError, OverflowError, MemoryError, KeyError)
    with file_errors(where, *damage, remedy=remedy):
        try:
            yield
        except InexactDecimalError as error:
            raise SourceError(
                "a decimal would lose digits as float64",
                expected="a value that float64 holds, as all of up to 15 digits are",
                found=error,
                where=where,
                remedy="cast the column when you write it (to int64 or text), or leave it out with columns=",
            ) from error
