"""Records that several threads may read at once."""

from __future__ import annotations

from typing import TypeVar

import msgspec

_Record = TypeVar("_Record", bound=msgspec.Struct)


def decodable(kind: type[_Record]) -> type[_Record]:
    """Have msgspec learn the types of a struct's fields where it is defined; a class decorator for all of them.

    Else it does so when one is decoded for the first time, and two threads that come to that at once may end the
    process: what one has learnt by half, the other takes for whole (seen with msgspec 0.22).

    Args:
        kind: the struct; those that are in it are defined before it.

    Examples:
        >>> @decodable
        ... class Point(msgspec.Struct):
        ...     x: int
        >>> msgspec.json.decode(b'{"x": 3}', type=Point)
        Point(x=3)
    """
    msgspec.json.Decoder(kind)
    return kind
