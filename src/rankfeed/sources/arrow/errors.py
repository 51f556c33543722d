"""Errors of pyarrow as errors that name the file."""

from contextlib import AbstractContextManager

import pyarrow as pa

from rankfeed.storage.file_errors import file_errors

_DAMAGE = (pa.ArrowException, ValueError, OverflowError, MemoryError, KeyError)


def arrow_errors(where: str, remedy: str | None = None) -> AbstractContextManager[None]:
    """As `file_errors`, for exceptions of pyarrow."""
    return file_errors(where, *_DAMAGE, remedy=remedy)
