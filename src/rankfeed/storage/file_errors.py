"""Exceptions of the operating system and of libraries as errors that name the file and the remedy."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rankfeed.errors import CorruptError, RankfeedError, SourceError, safe_str, with_where


@contextmanager
def file_errors(
    where: str | os.PathLike[str], *damage: type[Exception], remedy: str | None = None
) -> Iterator[None]:
    """Convert an OSError to a SourceError, and exceptions of the classes ``damage`` to a CorruptError.

    Errors of rankfeed that name no place get this one.
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
            problem = error.strerror or problem
            raise SourceError("the file cannot be read", found=problem, where=where, remedy=remedy) from error
        raise CorruptError("the file is damaged", found=problem, where=where, remedy=remedy) from error
