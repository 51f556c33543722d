"""The native library (``_native.c``), which is built when the package is installed with a C compiler.

ctypes releases the GIL for each call. Without the library numpy does the same, with the same result.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

_Nothing = ctypes.c_char * 0


class CopyJob(ctypes.Structure):
    """The ``job_t`` of the native library, whose threads may use it until ``rankfeed_wait`` returns."""

    _fields_ = (
        ("rows", ctypes.c_char_p),
        ("at", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("result", ctypes.c_int64),
        ("done", ctypes.c_int64),
        ("nanoseconds", ctypes.c_int64),
        ("taken", ctypes.c_int64),
        ("active", ctypes.c_int64),
        ("next", ctypes.c_void_p),
    )


@cache
def native_library() -> Any:
    """The library; None if it was not built."""
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_native.so")))
    except OSError:
        return None
    pointer: Any = ctypes.c_void_p
    int64: Any = ctypes.c_int64
    unsigned: Any = ctypes.c_uint64
    job: Any = ctypes.POINTER(CopyJob)
    flag: Any = ctypes.c_int32
    rows = [ctypes.c_char_p, int64, int64]
    #: By function: the types of its arguments and of its result.
    signatures: dict[str, tuple[list[Any], Any]] = {
        "copy_rows": ([*rows, pointer, pointer, int64], int64),
        "submit": ([job, int64], flag),
        "wait": ([job], flag),
        "use_nontemporal_stores": ([], None),
        "use_long_slices": ([], None),
        "advise": ([*rows, flag], None),
        "guard": ([int64, int64], pointer),
        "unguard": ([pointer], None),
        "permute": ([pointer, int64, pointer, pointer, unsigned, pointer, int64, unsigned, int64], None),
        "find_chunks": ([pointer, int64, pointer, int64, pointer, pointer], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, f"rankfeed_{name}")
        function.argtypes, function.restype = arguments, result
    return library


@cache
def lost_mappings() -> ctypes.c_int64:
    """How many mapped files had pages that could not be read, and were replaced by zeros, so far."""
    library = native_library()
    return ctypes.c_int64(0) if library is None else ctypes.c_int64.in_dll(library, "rankfeed_lost")


def address_of(array: Any) -> int:
    """The address of the first element of a C-contiguous array."""
    try:
        return ctypes.addressof(_Nothing.from_buffer(array))  # a third of the time of what follows
    except (TypeError, ValueError, BufferError):  # read-only
        address: int = array.__array_interface__["data"][0]
        return address


def address_or_zero(array: Any) -> int:
    """The same; 0 for None."""
    return 0 if array is None else address_of(array)
