"""Untrusted input: names of files that are read from data, and JSON files that come with data.

A name must not lead out of the directory of the data. It is checked in a manifest, descriptor, index or archive,
whether or not a file of that name is opened. Symbolic links on disk are followed for reading: the caches of model
hubs consist of them.
"""

import os
import re
from typing import TypeVar

import msgspec

from rankfeed.errors import CorruptError, UnsafeError, printable
from rankfeed.storage.file_errors import file_errors

_Struct = TypeVar("_Struct")
#: Size of a JSON file.
_MAX_JSON_BYTES = 1 << 30
_UNSAFE = re.compile(
    rb"\A\Z|\0"  # empty, or no valid name
    rb"|\A[/\\]"  # absolute
    rb"|(?:\A|[/\\])\.\.(?:[/\\]|\Z)"  # a component ".."
    rb"|\A[A-Za-z][A-Za-z0-9+.-]*:[/\\]|://"  # a URL, or a Windows drive
    rb"|\A(?:pipe|file):"  # URLs without slashes
)


def check_data_name(name: str | bytes, where: object) -> None:
    """Raise UnsafeError if a name read from data is absolute, contains ``..`` or a URL scheme, or is invalid."""
    try:
        is_unsafe = _UNSAFE.search(name if isinstance(name, bytes) else os.fsencode(name)) is not None
    except UnicodeEncodeError:  # a lone surrogate
        is_unsafe = True
    if is_unsafe:
        raise UnsafeError(
            "a name in the data leads outside their directory",
            expected="a relative path without '..' and without a URL scheme",
            found=repr(printable(name)[:200]),
            where=where,
            remedy="if you trust the data, correct the name, or open the files by a list of their paths",
        )


def resolve_data_name(folder: str | os.PathLike[str], name: str, where: object) -> str:
    """The path of a file that is named in the data, relative to ``folder``; raises UnsafeError."""
    check_data_name(name, where)
    return os.path.join(folder, os.path.normpath(name))


def read_json(path: str | os.PathLike[str], kind: type[_Struct]) -> _Struct:
    """The content of a JSON file as a typed struct."""
    with file_errors(path, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if os.stat(path).st_size > _MAX_JSON_BYTES:
            raise CorruptError("the index is too large", where=path, expected=f"up to {_MAX_JSON_BYTES} bytes")
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=kind)
