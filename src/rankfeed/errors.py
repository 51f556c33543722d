"""Every error that rankfeed raises, and the text of its message.

All derive from :class:`RankfeedError`: a one-line summary and up to four facts, namely what was expected, what was
found, where, and the remedy.

Examples:
    >>> raise CorruptError(
    ...     "checksum mismatch",
    ...     expected="9f3c",
    ...     found="01aa",
    ...     where="data/shard-00003.arrow",
    ...     remedy="write the dataset again, or fetch this shard again",
    ... )
    Traceback (most recent call last):
        ...
    rankfeed.errors.CorruptError: checksum mismatch
      expected: 9f3c
      found: 01aa
      where: data/shard-00003.arrow
      remedy: write the dataset again, or fetch this shard again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar


class RankfeedError(Exception):
    """Base of all errors of rankfeed.

    Args:
        summary: one line that names the failed operation.
        expected: what would have been right.
        found: what was there instead.
        where: file and offset, key, rank, step.
        remedy: what the user can do; None for the remedy of the class, if it has one.
    """

    _remedy: ClassVar[str | None] = None

    def __init__(
        self,
        summary: str,
        *,
        expected: object = None,
        found: object = None,
        where: object = None,
        remedy: str | None = None,
    ) -> None:
        remedy = self._remedy if remedy is None else remedy
        self.summary = safe_str(summary)
        self.expected = expected
        self.found = found
        self.where = where
        self.remedy = remedy
        facts = {"expected": expected, "found": found, "where": where, "remedy": remedy}
        lines = [f"  {name}: {safe_str(value)}" for name, value in facts.items() if value is not None]
        super().__init__(printable("\n".join([self.summary, *lines])))

    def __reduce__(self) -> tuple[Callable[..., RankfeedError], tuple[Any, ...]]:
        # Workers and other ranks send errors by pickle. A fact that cannot be pickled (an exception, a handle)
        # must not prevent that, so facts become text.
        facts = {"expected": self.expected, "found": self.found, "where": self.where, "remedy": self.remedy}
        texts: Any = {name: safe_str(value) for name, value in facts.items() if value is not None}
        return partial(type(self), self.summary, **texts), ()


def printable(text: str | bytes) -> str:
    r"""Printable text: bytes that are not UTF-8, as file names may contain, are escaped.

    Examples:
        >>> printable(b"caf\xe9.npy"), printable("caf\udce9.npy")
        ('caf\\xe9.npy', 'caf\\xe9.npy')
    """
    if isinstance(text, bytes):
        return text.decode("utf-8", "backslashreplace")
    if text.isascii():
        return text
    try:
        encoded = text.encode("utf-8", "surrogateescape")  # as os.fsencode
    except UnicodeEncodeError:  # another surrogate, which no file name has
        encoded = text.encode("utf-8", "backslashreplace")
    return encoded.decode("utf-8", "backslashreplace")


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first of some names, for a message.

    Examples:
        >>> listed(["a", "b"]), listed(["a", "b", "c"], most=2)
        ('a, b', 'a, b, ...')
    """
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def safe_str(value: object) -> str:
    """``str(value)``, or the class of a value whose ``__str__`` raises.

    Examples:
        >>> class Broken(Exception):
        ...     def __str__(self):
        ...         raise RuntimeError("no text")
        >>> safe_str(Broken())
        '<Broken; its __str__ raised RuntimeError>'
        >>> safe_str(ValueError("bad row"))
        'bad row'
    """
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}; its __str__ raised {type(error).__name__}>"


def safe_repr(value: object, limit: int = 200) -> str:
    """``repr(value)`` of at most ``limit`` characters, or the class of a value whose ``__repr__`` raises.

    Examples:
        >>> safe_repr(["a"]), safe_repr("x" * 300, limit=10)
        ("['a']", "'xxxxxx...")
    """
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__}; its __repr__ raised {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def describe_error(error: BaseException) -> str:
    """The class of an exception and its message (the summary of a RankfeedError); never raises.

    Examples:
        >>> describe_error(ValueError("bad row"))
        'ValueError: bad row'
    """
    message = error.summary if isinstance(error, RankfeedError) else error
    return f"{type(error).__name__}: {safe_str(message)}"


def with_where(error: RankfeedError, where: object) -> RankfeedError:
    """The same error about another place."""
    return type(error)(error.summary, expected=error.expected, found=error.found, where=where, remedy=error.remedy)


class ArgumentError(RankfeedError, ValueError):
    """An argument has an invalid type or value."""


class MissingExtraError(RankfeedError, ImportError):
    """A feature needs a package that is not installed; the message names the extra to install."""


class TopologyError(RankfeedError):
    """The environment does not determine rank and world size, or contradicts itself."""


class PlanError(RankfeedError, ValueError):
    """An impossible plan or schedule, such as fewer samples than ranks."""


class StateError(RankfeedError, ValueError):
    """A checkpoint of other data or another plan, or no checkpoint."""


class SourceError(RankfeedError):
    """Data that cannot be read: no such path, an empty dataset, an unknown format or column."""


class CorruptError(SourceError):
    """Damaged data: a truncated file, flipped bits, a missing shard, a manifest of other files."""

    _remedy = "fetch the file again, or write it again"


class UnsafeError(SourceError):
    """Data that could run code or name files outside of their directory; refused unless the caller allows it."""


class WriteError(RankfeedError):
    """A sample cannot be stored in a dataset, or the destination cannot be written."""


class PrepareError(RankfeedError):
    """`prepare_once` failed: the builder raised or cannot write, or waiting for it timed out."""


class TransformError(RankfeedError):
    """A user's transform or collate function raised; names sample id, step and rank."""


class StreamError(RankfeedError):
    """A stream raised on some rank, is empty or exhausted, or differs between the ranks that share it."""


class WorkerError(RankfeedError):
    """A worker process died repeatedly on the same step."""


class AuditError(RankfeedError):
    """The ranks did not deliver each sample once: samples are missing or repeated."""


class LockstepError(RankfeedError):
    """A rank of a running job failed, ended before its peers, or blocks them; raised on all of them."""

    rank: int = -1  # the rank at fault; -1 if unknown
