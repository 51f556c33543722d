"""Validation of arguments: each function returns the value in its canonical type or raises ArgumentError.

Public functions and classes check their arguments with these functions first. numpy scalars are accepted in place
of the Python types that they correspond to. A bool is never an integer, and only a bool is a bool:
``allow_pickle="False"`` is an error, not true.

Examples:
    >>> import numpy as np
    >>> check_int("batch_size", np.uint8(4), at_least=1)
    4
    >>> check_bool("allow_pickle", "False")
    Traceback (most recent call last):
        ...
    rankfeed.errors.ArgumentError: invalid allow_pickle
      expected: True or False
      found: 'False'
"""

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rankfeed._util.signals import reraise_interrupt
from rankfeed.errors import ArgumentError, safe_repr

_T = TypeVar("_T")

#: Enough for any seed; much longer integers cannot be printed.
_MAX_BITS = 128
_INT64_MAX = 2**63 - 1
#: threading.TIMEOUT_MAX is about 292 years; queues and pools add to it.
_MAX_SECONDS = 1e9


def invalid(name: str, expected: object, value: object, remedy: str | None = None) -> ArgumentError:
    """The error for an argument with an invalid value; the caller raises it."""
    return ArgumentError(f"invalid {name}", expected=expected, found=safe_repr(value), remedy=remedy)


def check_optional(check: Callable[..., _T], name: str, value: object, **limits: Any) -> _T | None:
    """None, or what ``check`` returns for the value."""
    return None if value is None else check(name, value, **limits)


def check_int(name: str, value: object, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """An integer of any integer type (Python, numpy, a tensor of one element), as an int."""
    integer, bounds = _as_int(value), _bounds(at_least, at_most)
    if integer is None:
        remedy = None
        if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
            remedy = f"pass a number instead of text: {name}={value.strip()}"
        raise invalid(name, f"an integer{bounds}", value, remedy)
    if integer.bit_length() > _MAX_BITS or not _within(integer, at_least, at_most):
        raise invalid(name, f"an integer{bounds or f' of at most {_MAX_BITS} bits'}", value)
    return integer


def check_int_array(name: str, value: object) -> npt.NDArray[np.int64]:
    """Integers of any shape (a list, a range, an array, a tensor on the CPU), as an int64 array."""
    try:
        array = np.asarray(value)
    except Exception as error:
        reraise_interrupt(error)
        raise invalid(name, "integers", value) from None
    if array.size and array.dtype.kind not in "iu":
        raise invalid(name, "integers", value)
    if array.dtype.kind == "u" and array.size and array.max() > _INT64_MAX:
        raise invalid(name, "integers below 2**63", array.max())
    return array.astype(np.int64, copy=False)


def check_bool(name: str, value: object) -> bool:
    """True or False, of Python or numpy, as a bool."""
    if not isinstance(value, bool | np.bool_):
        raise invalid(name, "True or False", value)
    return bool(value)


def check_float(
    name: str,
    value: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    noun: str = "a number",
) -> float:
    """A finite real number, as a float."""
    real = math.nan
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        with suppress(OverflowError):
            real = float(value)
    is_inside = (above is None or real > above) and (below is None or real < below)
    if not (math.isfinite(real) and is_inside and _within(real, at_least, at_most)):
        raise invalid(name, noun + _bounds(at_least, at_most, above, below), value)
    return real


def check_seconds(name: str, value: object, *, at_least: float | None = None, above: float | None = None) -> float:
    """A finite number of seconds, at least 0 if no bound is given."""
    if at_least is None and above is None:
        at_least = 0
    # Longer timeouts are an OverflowError in threading and select.
    noun = "a number of seconds"
    return check_float(name, value, at_least=at_least, above=above, below=_MAX_SECONDS, noun=noun)


def check_choice(name: str, value: object, choices: Sequence[_T]) -> _T:
    """The one of ``choices`` that equals the value and has its type."""
    plain = bool(value) if isinstance(value, np.bool_) else value
    for choice in choices:
        if isinstance(plain, type(choice)) and plain == choice:
            return choice
    raise invalid(name, " | ".join(map(repr, choices)), value)


def check_callable(name: str, value: Any) -> Any:
    """A function, or an object or class that can be called."""
    if not callable(value):
        raise invalid(name, "a function", value)
    return value


def check_iterable(name: str, value: Any, expected: str = "an iterable") -> Any:
    """An object that can be iterated; strings and classes are refused."""
    if isinstance(value, str | bytes | type) or not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
        raise invalid(name, expected, value)
    return value


def check_instance(name: str, value: object, kind: type[_T], expected: str) -> _T:
    """An instance of a class."""
    if not isinstance(value, kind):
        raise invalid(name, expected, value)
    return value


def check_str(name: str, value: object, expected: str = "a str") -> str:
    """A string that can be encoded as UTF-8 and holds no NUL."""
    with suppress(UnicodeEncodeError):
        if isinstance(value, str) and b"\0" not in value.encode():
            return str(value)
    raise invalid(name, expected, value)


def check_name(name: str, value: object) -> str:
    """A string that is not empty, can be encoded as UTF-8 and holds no NUL."""
    expected = "a name: a str that is not empty"
    text = check_str(name, value, expected)
    if not text:
        raise invalid(name, expected, value)
    return text


def check_names(name: str, value: object) -> list[str]:
    """Several strings, in order: a list, a tuple, an array or any other iterable but a string."""
    if isinstance(value, str):
        raise invalid(name, "a list of names", value, remedy=f"pass [{safe_repr(value)}]")
    refused = (bytes, Mapping, set, frozenset)
    return _check_each(name, value, "a list of names", refused, str.__str__)  # a TypeError for anything but a str


def check_columns_option(columns: object) -> list[str]:
    """The value of a ``columns=`` that is not None: the names of at least one column."""
    names = check_names("columns", columns)
    if not names:
        raise invalid("columns", "the names of at least one column, or None for all", columns)
    return names


def check_environ(value: Mapping[str, str]) -> Mapping[str, str]:
    """Environment variables: a mapping of strings to strings."""
    given: Any = value
    if not isinstance(given, Mapping) or not all(isinstance(part, str) for pair in given.items() for part in pair):
        raise invalid("environ", "a mapping of names to values, such as os.environ", value)
    return value


def check_path(name: str, value: object) -> str:
    """A path of a str, bytes or ``os.PathLike``, as a str."""
    try:
        path = os.fsdecode(value)  # type: ignore[arg-type]
        os.fsencode(path)
    except Exception as error:
        reraise_interrupt(error)
        raise invalid(name, "a path", value) from None
    if not path or "\0" in path:
        raise invalid(name, "a path", value)
    return path


def check_paths(name: str, value: object) -> list[str]:
    """Several paths, in order: a list or another iterable, but not one path."""
    refused = (str, bytes, os.PathLike, Mapping)
    return _check_each(name, value, "a list of paths", refused, lambda path: check_path(f"path in {name}", path))


def _check_each(
    name: str, value: object, expected: str, refused: tuple[type, ...], check: Callable[[Any], str]
) -> list[str]:
    """Check the elements of an iterable one by one: it may be infinite."""
    if isinstance(value, refused) or not isinstance(value, Iterable):
        raise invalid(name, expected, value)
    try:
        return [check(element) for element in value]
    except ArgumentError:
        raise
    except Exception as error:
        reraise_interrupt(error)
        raise invalid(name, expected, value) from None


def _as_int(value: object) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, bool | np.bool_) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception as error:
        reraise_interrupt(error)
        return None


def _within(value: float, at_least: float | None, at_most: float | None) -> bool:
    return (at_least is None or value >= at_least) and (at_most is None or value <= at_most)


def _bounds(
    at_least: float | None, at_most: float | None, above: float | None = None, below: float | None = None
) -> str:
    """The limits in words, to follow the noun."""
    if at_least is not None and at_most is not None:
        return f" from {at_least} to {at_most}"
    words = (("of at least", at_least), ("above", above), ("of at most", at_most), ("below", below))
    limits = [f"{word} {limit}" for word, limit in words if limit is not None and limit != _MAX_SECONDS]
    return " " + " and ".join(limits) if limits else ""
