"""Every error that a user can meet.

All derive from :class:`RankfeedError`. An error is a short summary and up to four facts that turn it into
something to act on: what was expected, what was found, where, and what to do about it.

Examples:
    >>> raise CorruptError(
    ...     "checksum does not match",
    ...     expected="9f3c",
    ...     found="01aa",
    ...     where="data/shard-00003.arrow",
    ...     remedy="pack the data set again, or fetch this shard anew",
    ... )
    Traceback (most recent call last):
        ...
    rankfeed.errors.CorruptError: checksum does not match
      expected: 9f3c
      found: 01aa
      where: data/shard-00003.arrow
      remedy: pack the data set again, or fetch this shard anew
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class RankfeedError(Exception):
    """Base of all errors of rankfeed.

    Args:
        summary: one line that says what went wrong.
        expected: what would have been right.
        found: what there was instead.
        where: file and offset, key, rank, step: whatever leads there.
        remedy: what the user can do.
    """

    def __init__(
        self,
        summary: str,
        *,
        expected: object = None,
        found: object = None,
        where: object = None,
        remedy: str | None = None,
    ) -> None:
        self.summary = safe_str(summary)
        self.expected = expected
        self.found = found
        self.where = where
        self.remedy = remedy
        facts = {"expected": expected, "found": found, "where": where, "remedy": remedy}
        lines = [f"  {name}: {safe_str(value)}" for name, value in facts.items() if value is not None]
        super().__init__(printable("\n".join([self.summary, *lines])))

    def __reduce__(self) -> tuple[Callable[..., RankfeedError], tuple[Any, ...]]:
        # Errors travel from workers and other ranks by pickle; keyword arguments need help to survive that,
        # and a fact that cannot be pickled (an exception, a handle) must not keep the error from arriving.
        facts = tuple(
            None if fact is None else safe_str(fact)
            for fact in (self.expected, self.found, self.where, self.remedy)
        )
        return _rebuild, (type(self), self.summary, *facts)


def printable(text: str | bytes) -> str:
    r"""Text that can be printed: file names may have bytes that are not UTF-8, which are escaped.

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
    """The first of some names, for an error that need not tell all.

    Examples:
        >>> listed(["a", "b"]), listed(["a", "b", "c"], most=2)
        ('a, b', 'a, b, ...')
    """
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def safe_str(value: object) -> str:
    """``str(value)``; for a value whose ``__str__`` fails, such as an exception of user code, its class and that.

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
    """``repr(value)`` of at most ``limit`` characters; for a value whose ``__repr__`` fails, its class.

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
    """The class of an exception and its message, of a :class:`RankfeedError` the summary; never raises.

    Examples:
        >>> describe_error(ValueError("bad row"))
        'ValueError: bad row'
    """
    message = error.summary if isinstance(error, RankfeedError) else error
    return f"{type(error).__name__}: {safe_str(message)}"


def _rebuild(
    kind: type[RankfeedError],
    summary: str,
    expected: str | None,
    found: str | None,
    where: str | None,
    remedy: str | None,
) -> RankfeedError:
    return kind(summary, expected=expected, found=found, where=where, remedy=remedy)


class ArgumentError(RankfeedError, ValueError):
    """An argument has an invalid type or value."""


class MissingExtraError(RankfeedError, ImportError):
    """A feature needs a package that is not installed; the message names the extra that brings it."""


class TopologyError(RankfeedError):
    """The environment does not say, or contradicts itself about, which process of how many this is."""


class PlanError(RankfeedError, ValueError):
    """A plan or schedule that cannot be carried out, such as fewer samples than ranks."""


class StateError(RankfeedError, ValueError):
    """A checkpoint that belongs to other data or another plan, or is no checkpoint at all."""


class SourceError(RankfeedError):
    """Data that cannot be read: no such path, an empty data set, an unknown format, an unknown column."""


class CorruptError(SourceError):
    """Data that are damaged: truncated, flipped bits, a missing shard, a manifest that does not fit."""


class UnsafeError(SourceError):
    """Data whose reading could run code or leave its folder, refused unless the caller allows it."""


class WriteError(RankfeedError):
    """A sample cannot be stored in a dataset, or the destination cannot be written."""


class PrepareError(RankfeedError):
    """Data that could not be prepared: the builder raised or cannot write, or the wait for it was too long."""


class TransformError(RankfeedError):
    """A user's transform or collate function raised; names sample id, step and rank."""


class StreamError(RankfeedError):
    """A stream that raised on some rank, is empty or used up, or differs between ranks that share it out."""


class WorkerError(RankfeedError):
    """A worker process died again and again on the same step."""


class AuditError(RankfeedError):
    """What the ranks delivered is not what the plan promised: samples missing or repeated."""


class LockstepError(RankfeedError):
    """A rank of a running job failed, ended before its peers, or holds them up; raised on all of them.

    Attributes:
        rank: which; -1 where that is not known.
    """

    rank: int = -1
