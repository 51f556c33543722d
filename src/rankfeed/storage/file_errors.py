"""Converts exceptions of the operating system and of libraries to errors that name the file and the remedy."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rankfeed.errors import CorruptError, RankfeedError, SourceError, safe_str, with_where


@contextmanager
def os_errors(
    kind: type[RankfeedError], summary: str, where: str | os.PathLike[str], remedy: str | None = None
) -> Iterator[None]:
    """Convert an OSError to an error of a class, which names the file of the OSError if it has one."""
    try:
        yield
    except OSError as error:
        found = error.strerror or error
        raise kind(summary, found=found, where=error.filename or where, remedy=remedy) from error


@contextmanager
def file_errors(
    where: str | os.PathLike[str], *damage: type[Exception], remedy: str | None = None
) -> Iterator[None]:
    """Convert an OSError to a SourceError, and exceptions of the classes ``damage`` to a CorruptError.

    Errors name the file of the OSError if it has one, else ``where``, as errors of rankfeed without a place do.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *damage)
    try:
        yield
    except RankfeedError as error:
        if error.where is not None:
            raise
        raise with_where(error, where) from error
    except kinds as error:
        problem = (safe_str(error).splitlines() or [type(error).__name__])[0][:300]
        if isinstance(error, OSError) and error.errno is not None:  # without a number, a library found damage
            problem, where = error.strerror or problem, error.filename or where
            raise SourceError("the file cannot be read", found=problem, where=where, remedy=remedy) from error
        raise CorruptError("the file is damaged", found=problem, where=where, remedy=remedy) from error


def arrow_errors(where: str, remedy: str | None = None) -> AbstractContextManager[None]:
    """As `file_errors`, for exceptions of pyarrow."""
    import pyarrow as pa

    damage = (pa.ArrowException, ValueError, OverflowError, MemoryError, KeyError)
    return file_errors(where, *damage, remedy=remedy)
