"""Values of samples, shortened: for people, and for JSON."""

import math
import reprlib
from typing import Any

import numpy as np

#: Characters, bytes and elements that are shown of long ones.
_TEXT, _BYTES, _ELEMENTS = 72, 16, 8


def shown(value: Any) -> str:
    r"""A value in a line.

    Examples:
        >>> shown(b"RIFF" + bytes(1000))
        '1,004 bytes  52 49 46 46 00 00 00 00 00 00 00 00 00 00 00 00 ...'
        >>> shown(np.arange(12, dtype=np.int32).reshape(6, 2))
        'int32[6, 2]  0 1 2 3 4 5 6 7 ...'
        >>> shown("two\nlines"), shown(np.float32(0.25))
        ("'two\\nlines'", '0.25')
    """
    if isinstance(value, str):
        return f"{value!r}" if len(value) <= _TEXT else f"{len(value):,} characters  {value[:_TEXT]!r} ..."
    if isinstance(value, bytes):
        return f"{len(value):,} bytes  {value[:_BYTES].hex(' ')}" + (" ..." if len(value) > _BYTES else "")
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind != "O":
        first = " ".join(f"{each:.4g}" if value.dtype.kind in "fc" else str(each) for each in _first(value))
        more = " ..." if value.size > _ELEMENTS else ""
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]  {first}{more}"
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind != "O":
        return f"{value}"
    return f"{type(value).__name__}  {reprlib.repr(value)}"


def as_json(value: Any) -> Any:
    """A value for JSON: numbers and short texts as they are, others by what they begin with.

    Examples:
        >>> as_json(np.array([1.5, np.inf], np.float32))
        {'dtype': 'float32', 'shape': [2], 'first': [1.5, 'inf']}
        >>> as_json(b"abc"), as_json(np.int64(3))
        ({'bytes': 3, 'head': '616263'}, 3)
    """
    if isinstance(value, str):
        return value if len(value) <= _TEXT else {"characters": len(value), "head": value[:_TEXT]}
    if isinstance(value, bytes):
        return {"bytes": len(value), "head": value[:_BYTES].hex()}
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind != "O":
        first = [_number(each) for each in _first(value)]
        return {"dtype": str(value.dtype), "shape": list(value.shape), "first": first}
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind != "O":
        return _number(value)
    return {"type": type(value).__name__, "repr": reprlib.repr(value)}


def _first(value: Any) -> list[Any]:
    return list(value.flat[:_ELEMENTS])


def _number(value: Any) -> Any:
    plain = value.item()
    if isinstance(plain, (bool, int)) or (isinstance(plain, float) and math.isfinite(plain)):
        return plain
    return str(plain)
