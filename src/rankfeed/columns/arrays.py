"""Conversion of numbers, tensors and lists to numeric arrays, without loss."""

import sys
from collections.abc import Iterator, MutableMapping
from copy import copy
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import ArgumentError, safe_repr

#: float64 holds all integers up to this.
_EXACT = 2.0**53
#: Types of values that need no copy.
_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None)})


def as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """A number, array, tensor or list of numbers as a numeric array of a dtype that torch has.

    Raises:
        ArgumentError: the value is none of these (None, an object array, a mixture), or no dtype holds all digits.

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
                remedy="convert it to a dense tensor of a numpy dtype, or pass a collate_fn",
            ) from error
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ArgumentError(
            f"{name!r} is an array with masked values",
            found=f"{int(np.ma.getmaskarray(value).sum())} of {value.size} values masked",
            remedy="fill them (value.filled(0)), and return the mask as a separate field",
        )
    try:
        array = np.asarray(value)
    except Exception:  # the value's own __array__ may raise anything
        array = np.empty(0, object)
    if array.dtype.kind not in "biufc":
        kind = type(value).__name__
        raise ArgumentError(
            f"{name!r} is not a number, string, bytes or numeric array",
            found=f"{kind} of dtype {array.dtype}"
            if hasattr(value, "dtype")
            else f"{kind}: {safe_repr(value, 60)}",
            remedy="convert it to one of these; objects are not stored, because reading them would run code",
        )
    if array.dtype.kind in "fc":
        if array.dtype.itemsize > (8 if array.dtype.kind == "f" else 16):
            raise ArgumentError(
                f"{name!r} has a dtype that neither torch nor Arrow has",
                found=f"dtype {array.dtype}",
                remedy="convert it to float64 if its precision is sufficient",
            )
        if isinstance(value, (list, tuple)) and bool((np.abs(array) >= _EXACT).any()):
            array = _with_exact_integers(name, value, array)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _with_exact_integers(name: str, value: Any, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The floats that numpy made of a list if no integer lost digits, else the list as uint64."""
    items = list(_items(value))
    integers = [int(item) for item in items if isinstance(item, Integral)]
    only_integers = len(integers) == len(items)
    if only_integers and min(integers) >= 0 and max(integers) < 2**64:
        return np.array(value, np.uint64)
    if only_integers or any(int(float(item)) != item for item in integers):
        raise ArgumentError(
            f"{name!r} has integers that no dtype holds together with the other numbers",
            found=f"{max(integers, key=abs)} in a {type(value).__name__} of {len(items)}",
            remedy="convert them in the sample, or pass a collate_fn",
        )
    return array


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _items(item)
    else:
        yield from value.reshape(-1).tolist() if hasattr(value, "reshape") else (value,)


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def copy_sample(value: Any) -> Any:
    """A copy of a sample (containers, arrays, tensors, copyable objects) that a transform may change in place.

    Raises:
        ArgumentError: the sample is nested too deeply.
    """
    try:
        return _copy(value)
    except RecursionError:
        raise ArgumentError(
            "a sample is nested too deeply",
            found=f"a {type(value).__name__} within a {type(value).__name__} and so on",
            remedy="return samples that do not contain themselves",
        ) from None


def _copy(value: Any) -> Any:
    if type(value) in _IMMUTABLE:
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if is_tensor(value):
        return value.clone()
    if isinstance(value, MutableMapping):
        copied = copy(value)
        for name, each in value.items():
            copied[name] = _copy(each)
        return copied
    if type(value) in (list, tuple):
        return type(value)(each if type(each) in _IMMUTABLE else _copy(each) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copy, value))
    return copy(value) if hasattr(value, "__copy__") else value
