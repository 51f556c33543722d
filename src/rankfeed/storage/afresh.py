"""Asking a network file system what is there now, and not what it told this host some seconds or a minute ago.

A host that mounts one keeps what it has seen: that a name is there, or is not, which folder it stands for, how
large a file is and when it was changed. Each of these has a call that the host does not answer by itself.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress


def is_gone(error: OSError) -> bool:
    """Whether an error says that a file or folder is not there any more.

    ESTALE is how a network file system says that another host removed what this one had just found.

    Examples:
        >>> is_gone(FileNotFoundError()), is_gone(OSError(errno.ESTALE, "")), is_gone(PermissionError())
        (True, True, False)
    """
    return isinstance(error, (FileNotFoundError, NotADirectoryError)) or error.errno == errno.ESTALE


def stat_afresh(path: str | os.PathLike[str]) -> os.stat_result:
    """Size and times of a file: opened, since what is kept of a file lasts until then at the longest.

    Raises:
        OSError: it is not there, or cannot be opened.

    Examples:
        >>> stat_afresh(__file__).st_size == os.stat(__file__).st_size
        True
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.fstat(handle)
    finally:
        os.close(handle)


def look_again(path: str | os.PathLike[str]) -> None:
    """Have a name mean what it means now, for all of this host.

    What a folder holds is asked of the server, and so is whether a folder can be made: where there is such a name,
    or seems to be, that is tried. Should it be gone, an empty folder is there for a moment.

    Args:
        path: what others may have made, replaced or removed.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> look_again(folder)
        >>> look_again(folder + "/none")
        >>> os.listdir(folder)
        []
    """
    folder, name = os.path.split(os.path.abspath(path))
    with suppress(OSError):
        if name in os.listdir(folder) or os.path.lexists(path):
            os.mkdir(path)
            os.rmdir(path)  # refused, if somebody has put something there meanwhile
