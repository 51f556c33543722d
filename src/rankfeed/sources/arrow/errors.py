"""Errors of pyarrow as errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from rankfeed.errors import RankfeedError
from rankfeed.sources.source import with_where
from rankfeed.storage.file_errors import file_errors


@contextmanager
def arrow_errors(where: str, remedy: str | None = None) -> Iterator[None]:
    """As `file_errors`, for exceptions of pyarrow; errors of rankfeed that name no place get this one."""
    damage = (pa.ArrowException, ValueError, OverflowError, MemoryError, KeyError)
    with file_errors(where, *damage, remedy=remedy):
        try:
            yield
        except RankfeedError as error:
            if error.where is not None:
                raise
            raise with_where(error, where) from error
