"""msgspec structs that several threads can decode."""

from typing import TypeVar

import msgspec

_Record = TypeVar("_Record", bound=msgspec.Struct)


def decodable(kind: type[_Record]) -> type[_Record]:
    """Class decorator that makes msgspec resolve the field types of a struct at its definition.

    msgspec otherwise resolves them when the struct is decoded first, and two threads that do so at the same time
    can crash the process (seen with msgspec 0.22). Structs that it contains must be defined before it.
    """
    msgspec.json.Decoder(kind)
    return kind
