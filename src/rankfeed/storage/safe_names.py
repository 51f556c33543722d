"""Untrusted names: those read from data must not lead out of the directory of the data.

Checked for every name in a manifest, descriptor, index or archive, whether or not a file of that name is opened.
Symbolic links on disk are followed for reading: the caches of model hubs consist of them.
"""

import os
import re

from rankfeed.errors import UnsafeError, printable

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
