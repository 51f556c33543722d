"""Reading a file by calls instead of through a mapping.

A page that is seen through a mapping costs several microseconds the first time, and counts as this process's
memory until it is let go. Where data are larger than what may stay mapped, that is paid for every row; a call that
copies the row out of the page cache then costs half, and leaves nothing behind. Files that are mapped anyway are
read through the mapping as far as that may stay, which costs half of a call, and by calls from there on.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError, SourceError
from rankfeed.storage.mapped import give_back, keep


class File:
    """A file open for reading at given places; safe to use from several threads, and after fork.

    Args:
        path: of the file.
        data: uint8, the same file, mapped: its first bytes are read from there, as many as may stay mapped.

    Raises:
        SourceError: it cannot be opened.
    """

    def __init__(self, path: Path, data: npt.NDArray[np.uint8] | None = None) -> None:
        self.path = path
        self.kept = memoryview(b"") if data is None else data.data[: keep(len(data))]
        weakref.finalize(self, give_back, len(self.kept)).atexit = False
        try:
            self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError("the file cannot be read", found=error, where=path) from error

    def is_cached(self, offset: int) -> bool:
        """Whether a byte is in the page cache, as far as the system tells without reading it."""
        if not hasattr(os, "RWF_NOWAIT"):
            return False
        try:
            return os.preadv(self.handle, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:
            return False

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "handle"):
            close(self.handle)  # a default, since modules may be gone by now


class Region:
    """The bytes of a file from some place on.

    Args:
        file: it.
        base: where the region begins, in bytes.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "letters")
        >>> path.write_bytes(b"abcdef")
        6
        >>> Region(File(path), 2).read(3, 1)
        b'def'
    """

    def __init__(self, file: File, base: int) -> None:
        self._file = file
        self._base = base
        self._kept = file.kept[base:]
        self._end = len(self._kept)

    def read(self, size: int, offset: int) -> bytes:
        """Bytes as a new object.

        Raises:
            CorruptError: the file ends before.
            SourceError: it cannot be read.
        """
        end = offset + size
        if end <= self._end:
            return bytes(self._kept[offset:end])
        try:
            got = os.pread(self._file.handle, size, self._base + offset)
        except OSError as error:
            raise self._unreadable(error, self._base + offset) from error
        if len(got) < size:
            buffer = bytearray(size)
            self.read_into(memoryview(buffer), offset)
            return bytes(buffer)
        return got

    def read_into(self, view: memoryview, offset: int) -> None:
        """Bytes into a buffer, as many as it holds.

        Raises:
            CorruptError: the file ends before.
            SourceError: it cannot be read.
        """
        end = offset + len(view)
        if end <= self._end:
            view[:] = self._kept[offset:end]
            return
        offset += self._base
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._file.handle, [view[done:]], offset + done)
            except OSError as error:
                raise self._unreadable(error, offset + done) from error
            if got == 0:
                raise CorruptError(
                    "a shard ends too early",
                    expected=f"{len(view)} bytes at {offset}",
                    found=f"{done} bytes",
                    where=self._file.path,
                    remedy="fetch the shard anew, or pack the data set again",
                )
            done += got

    def _unreadable(self, error: OSError, offset: int) -> SourceError:
        return SourceError("the file cannot be read", found=error, where=f"{self._file.path}, offset {offset}")
