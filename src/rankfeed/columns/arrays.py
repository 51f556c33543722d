"""Numbers, tensors and lists as numeric arrays, without loss."""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from copy import copy
from numbers import Integral, Number
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import ArgumentError

#: Whole numbers up to this are the same in float64.
_EXACT = 2.0**53
#: Types of values that need no copy.
_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None)})


def as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """A number, array, tensor or list of numbers as a numeric array of a type that torch has.

    Raises:
        ArgumentError: it is none of these (None, an object array, a mixture), or no type keeps all its digits.

    Examples:
        >>> as_array("x", [1, 2**63 + 1])
        array([                  1, 9223372036854775809], dtype=uint64)
    """
    if is_tensor(value):
        try:
            value = value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:  # bfloat16, sparse, nested
            raise ArgumentError(
                f"{name!r} is a tensor that numpy cannot hold",
                found=f"{getattr(value, 'dtype', type(value).__name__)}: {error}",
                remedy="turn it into a dense tensor of a type that numpy has, or give a collate_fn",
            ) from error
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ArgumentError(
            f"{name!r} is an array with masked values",
            found=f"{int(np.ma.getmaskarray(value).sum())} of {value.size} values masked",
            remedy="fill them (value.filled(0)), and return the mask as a field of its own",
        )
    try:
        array = np.asarray(value)
    except Exception:  # whatever the user's own __array__ raises
        array = np.empty(0, object)
    if array.dtype.kind not in "biufc":
        what = f"{type(value).__name__} of dtype {array.dtype}"
        raise ArgumentError(
            f"{name!r} is not a number, string, bytes or numeric array",
            found=what if hasattr(value, "dtype") else f"{type(value).__name__}: {_shown(value)}",
            remedy="turn it into one of these; objects are not stored, since reading them back would run code",
        )
    if array.dtype.kind in "fc":
        if array.dtype.itemsize > (8 if array.dtype.kind == "f" else 16):
            raise ArgumentError(
                f"{name!r} is of a type that neither torch nor Arrow has",
                found=f"dtype {array.dtype}",
                remedy="convert it to float64, where its digits are not needed",
            )
        if isinstance(value, (list, tuple)) and bool((np.abs(array) >= _EXACT).any()):
            array = _with_all_digits(name, value, array)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, without importing torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def copied(value: Any) -> Any:
    """A sample that a transform may change in place, and whose arrays the user's code may fill again.

    Containers, arrays and tensors are copied, and what has a ``__copy__``.

    Examples:
        >>> row = np.zeros(2)
        >>> sample = copied({"x": row, "name": "a"})
        >>> row += 1
        >>> sample
        {'x': array([0., 0.]), 'name': 'a'}

    Raises:
        ArgumentError: it is nested too deeply.
    """
    try:
        return _copied(value)
    except RecursionError:
        raise ArgumentError(
            "a sample is nested too deeply",
            found=f"a {type(value).__name__} within a {type(value).__name__} and so on",
            remedy="return samples that do not contain themselves",
        ) from None


def _copied(value: Any) -> Any:
    if type(value) in _IMMUTABLE:
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if is_tensor(value):
        return value.clone()
    if isinstance(value, MutableMapping):
        found = copy(value)
        for name, each in value.items():
            found[name] = _copied(each)
        return found
    if type(value) in (list, tuple):
        return type(value)(each if type(each) in _IMMUTABLE else _copied(each) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    return copy(value) if hasattr(value, "__copy__") else value


def is_list_of_numbers(value: Any) -> bool:
    """Whether a list or tuple (of lists) holds plain numbers alone; an empty one does.

    Examples:
        >>> is_list_of_numbers([[1, 2.5], [3, 4]]), is_list_of_numbers([np.ones(2)]), is_list_of_numbers(["a"])
        (True, False, False)
    """
    return all(
        is_list_of_numbers(item)
        if isinstance(item, (list, tuple))
        else isinstance(item, (Number, np.generic)) and not isinstance(item, (str, bytes))
        for item in value
    )


def _with_all_digits(name: str, value: Any, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What numpy turned into floats, if no whole number in it lost digits; else as unsigned numbers."""
    items = list(_items(value))
    whole = [int(item) for item in items if isinstance(item, Integral)]
    if len(whole) == len(items) and min(whole) >= 0 and max(whole) < 2**64:
        return np.array(value, np.uint64)
    if len(whole) == len(items) or any(int(float(item)) != item for item in whole):
        raise ArgumentError(
            f"{name!r} has whole numbers that no type holds together with the others",
            found=f"{max(whole, key=abs)} in a {type(value).__name__} of {len(items)}",
            remedy="convert them in the sample, or give a collate_fn",
        )
    return array


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _items(item)
    elif hasattr(value, "reshape"):
        yield from value.reshape(-1).tolist()
    else:
        yield value


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except Exception:  # a repr of the user's own may do anything
        return "..."
