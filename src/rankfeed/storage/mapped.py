"""Memory-mapped files, and a bound on how much of them counts as this process's memory.

A page of a mapped file that this process alone has looked at counts as its private memory, although the kernel
takes it back at will. With data far larger than memory that figure would grow until all of memory is "used",
and whoever watches it (a scheduler, a person) would be misled. So readers say what they touched, and
once more than :data:`RESIDENT_BYTES` of mapped files are resident, some of the pages are let go. They stay in the
page cache: the next read finds them there.

Readers that can do without a mapping (`region`) ask how much of theirs may stay for good: in all, no more than
:data:`KEPT_BYTES`, whatever the size of the data.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError, SourceError

#: Resident bytes of mapped files above which pages are let go. A page that was let go costs about 5 us to see
#: again, more than the copy of a small row: data sets up to this size are read at full speed.
RESIDENT_BYTES = 768 << 20
_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
#: Bytes of mapped files that may stay for good, beside those: a sixteenth of the machine's memory. A row of 60 KB
#: is read from there in half the time of a call.
KEPT_BYTES = max(RESIDENT_BYTES, _MEMORY // 16)
#: Touched bytes between two looks at what is resident.
CHECK_BYTES = 32 << 20
#: What the kernel maps around a page that is missing.
_AROUND = 64 << 10
#: Address space that is let go at once.
_SLICE = 64 << 20

#: A batch that lies in more files than these looks at none of them (`check_whole`): each look takes 1 to 4 us.
LOOKS = 8

_PAGE = mmap.PAGESIZE


def map_file(path: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """The bytes of a file as a read-only array, read from disk where they are looked at.

    Arrays over it keep the mapping alive. It may be inherited by a forked child and used by several threads.

    Raises:
        SourceError: there is no such file, or it cannot be read.

    Examples:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "three")
        >>> path.write_bytes(b"abc")
        3
        >>> map_file(path)
        array([97, 98, 99], dtype=uint8)
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            if size == 0:
                return np.empty(0, np.uint8)  # nothing cannot be mapped
            mapping = mmap.mmap(handle, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        raise SourceError("the file cannot be read", found=error, where=os.fspath(path)) from error
    _residency.add(mapping, size)
    return np.frombuffer(mapping, np.uint8)


def check_whole(array: npt.NDArray[Any], where: str | os.PathLike[str]) -> None:
    """See that a mapped file is not shorter than it was: to look at what was cut off ends the process (SIGBUS).

    Args:
        array: of :func:`map_file`, or a view of it; nothing is said of one that is in memory.
        where: the file, for errors.

    Raises:
        CorruptError: it was cut, or is no more.
    """
    base: Any = array.base
    while type(base) is np.ndarray:
        base = base.base
    mapping: Any = base.obj if type(base) is memoryview else None
    if type(mapping) is not mmap.mmap:
        return
    found: Any
    try:
        if (size := mapping.size()) >= len(mapping):
            return
        found = f"{size} bytes"
    except OSError as error:  # on a network disk, another machine removed it
        found = error
    raise CorruptError(
        "a file was changed while it was in use",
        expected=f"{len(mapping)} bytes, as it had",
        found=found,
        where=where,
        remedy="start the job again",
    )


def touched(nbytes: Callable[[], int], places: int = 1) -> None:
    """Say that bytes of mapped files are about to be looked at.

    Args:
        nbytes: tells how many; asked only where more is mapped than may stay.
        places: in how many separate runs; the kernel maps some more around each.
    """
    if _residency.is_watching:
        _residency.touched(nbytes() + places * _AROUND)


def keep(nbytes: int) -> int:
    """How many bytes of a mapped file may stay mapped for good, beside those that do already.

    Args:
        nbytes: wished for; what is granted counts until it is given back (`give_back`).
    """
    return _residency.keep(nbytes)


def give_back(nbytes: int) -> None:
    """Say that bytes which :func:`keep` granted are mapped no more."""
    _residency.give_back(nbytes)


class _Residency:
    """Counts what is touched, and lets pages go. One for the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mappings: list[tuple[weakref.ref[mmap.mmap], int]] = []
        self._mapped = 0
        self._touched = 0
        self._kept = 0
        self._hand = 0
        self._baseline: int | None = None

    def keep(self, nbytes: int) -> int:
        with self._lock:
            granted = max(0, min(nbytes, KEPT_BYTES - self._kept))
            self._kept += granted
        return granted

    def give_back(self, nbytes: int) -> None:
        # No lock: a finalizer calls this, perhaps while its own thread holds it. A lost update does little harm.
        self._kept -= nbytes

    def add(self, mapping: mmap.mmap, size: int) -> None:
        with self._lock:
            self._mappings = [entry for entry in self._mappings if entry[0]() is not None]
            self._mappings.append((weakref.ref(mapping), size))
            self._mapped = sum(entry[1] for entry in self._mappings)
            if self._baseline is None:
                self._baseline = _shared_resident_bytes()

    @property
    def is_watching(self) -> bool:
        """Whether more is mapped than may stay."""
        return self._mapped > RESIDENT_BYTES

    def touched(self, nbytes: int) -> None:
        with self._lock:
            self._touched += nbytes
            if self._touched < CHECK_BYTES:
                return
            self._touched = 0
            resident, baseline = _shared_resident_bytes(), self._baseline
            if resident is None or baseline is None:
                return
            mine = resident - baseline - self._kept
            if mine > RESIDENT_BYTES:
                self._let_go(mine - RESIDENT_BYTES * 15 // 16)

    def _let_go(self, surplus: int) -> None:
        """Walk on over the mappings, as the hand of a clock, until enough pages are let go."""
        before = _shared_resident_bytes()
        slices = [
            (mapping, start)
            for entry in self._mappings
            if (mapping := entry[0]()) is not None
            for start in range(0, entry[1], _SLICE)
        ]
        for _ in range(len(slices)):
            self._hand = (self._hand + 1) % len(slices)
            mapping, start = slices[self._hand]
            length = min(_SLICE, len(mapping) - start)
            try:
                # Safe under a reader: the mapping is of a file and read-only, so the page comes back as it was.
                mapping.madvise(mmap.MADV_DONTNEED, start, length)
            except (AttributeError, OSError, ValueError):
                return
            now = _shared_resident_bytes()
            if before is None or now is None or before - now >= surplus:
                return
        # All was let go and it is still too much: the surplus is somebody else's (libraries, shared memory).
        self._baseline = _shared_resident_bytes()


def _shared_resident_bytes() -> int | None:
    """Resident bytes of this process that belong to files and shared memory; None where nobody says."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[2]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None


_residency = _Residency()


def _start_anew_in_child() -> None:
    # The lock may have been held by a thread that does not exist here; what was mapped is inherited.
    global _residency
    inherited: list[Any] = _residency._mappings
    kept = _residency._kept
    _residency = _Residency()
    _residency._kept = kept
    for reference, size in inherited:
        mapping = reference()
        if mapping is not None:
            _residency.add(mapping, size)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew_in_child)
