"""The files of a data set as a job first saw them: names, sizes, times, and samples of their content.

They answer two questions. Which data are these? The fingerprint is made of the names, the sizes and the content
samples; it does not depend on the mount point or on times. Are they still the same? A file is compared by size and
time when it is opened, in any process of the job, and again at intervals while it is open; where they differ, its
content decides whether it is a copy of the same data or other data.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rankfeed._util.process_info import boot_id
from rankfeed.errors import CorruptError, SourceError
from rankfeed.storage.checksum import digest_of

Int64 = npt.NDArray[np.int64]

#: Files whose content is sampled, chosen by a hash of their names.
SAMPLED_FILES = 64
#: Bytes of each content sample; a file has three: at its start, in its middle and at its end.
SAMPLE_BYTES = 4096
#: Seconds between two checks of the open files.
CHECK_SECONDS = 1.0
#: Open files that are checked, those opened last.
_WATCHED = 512

#: Columns of the table of what was seen.
_SIZE, _MTIME, _INODE = range(3)
_MOST = (1 << 63) - 1


class DataFiles:
    """The files that a source reads. Pickles to what this job saw first, about 24 bytes and the name of each file.

    Args:
        paths: of the files, absolute, in an order that is the same for the same data.
        names: what the fingerprint calls them; None for their paths relative to the folder they share.
        content: for formats that know a checksum of every file: tells whether a file has the content that it
            should have. Asked for files whose content was not sampled. It does not travel with a pickle.

    Raises:
        SourceError: a file cannot be read.

    Examples:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/data.bin"
        >>> _ = open(path, "wb").write(b"some bytes")
        >>> files = DataFiles([path])
        >>> files.check(0)
        >>> _ = open(path, "wb").write(b"other data")
        >>> os.utime(path, ns=(0, 0))
        >>> files.check(0)
        Traceback (most recent call last):
            ...
        rankfeed.errors.CorruptError: a file was changed or replaced while it was in use
          ...
    """

    def __init__(
        self,
        paths: Sequence[str],
        names: Sequence[str] | None = None,
        *,
        content: Callable[[int], bool] | None = None,
    ) -> None:
        self._root, self._names = _split(paths)
        self.content = content
        self._start()
        named = self._names if names is None else b"\0".join(map(os.fsencode, names))
        self._named = digest_of(named)
        self._observe(_chosen(named.split(b"\0")))

    def _start(self) -> None:
        """What need not travel."""
        #: Where each name begins, and at the end the length of all with a byte between them.
        self._starts = np.zeros(self._names.count(b"\0") + 2, np.int64)
        self._starts[1:-1] = np.flatnonzero(np.frombuffer(self._names, np.uint8) == 0) + 1
        self._starts[-1] = len(self._names) + 1
        #: Open files, those opened last at the end.
        self._watched: dict[int, None] = {}
        self._due = 0.0

    def _observe(self, sampled: Iterable[int]) -> None:
        """Look at all files, as this host sees them, and at the content of some."""
        self._host = boot_id()
        self._seen = np.empty((len(self), 3), np.int64)
        for number in range(len(self)):
            self._seen[number] = _facts(self._stat(number))
        #: Of the files whose content is sampled: a checksum of the sample, and the ctime.
        self._samples: dict[int, tuple[int, int]] = {}
        for number in sampled:
            found = self._stat(number)
            self._samples[number] = (self._sample(number, found.st_size), found.st_ctime_ns)
        content = np.array([sample for sample, _ in self._samples.values()], np.uint64)
        #: Hexadecimal digits that change with names, sizes and content samples.
        self.fingerprint = digest_of(
            b"files", self._named.encode(), self._seen[:, _SIZE].tobytes(), content.tobytes()
        )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def path(self, number: int) -> str:
        """The path of a file."""
        return self._root + os.fsdecode(self._names[self._starts[number] : self._starts[number + 1] - 1])

    @property
    def sizes(self) -> Int64:
        """Bytes of each file: int64 [files]."""
        return self._seen[:, _SIZE]

    def check(self, number: int) -> None:
        """Compare a file with what this job saw first: call this after it was opened, or read to its end.

        Not before: a file that is replaced between the check and the opening would not be noticed.

        Raises:
            CorruptError: it is another one.
            SourceError: it is gone.
        """
        self._adapt_to_host()
        self._compare(number, self._stat(number))

    def opened(self, number: int) -> None:
        """As :meth:`check`, for a file that stays open: from now on it is among those of :meth:`check_open`."""
        self.check(number)
        self._watched.pop(number, None)
        self._watched[number] = None
        if len(self._watched) > _WATCHED:
            with suppress(StopIteration, RuntimeError, KeyError):  # another thread was there first
                del self._watched[next(iter(self._watched))]

    def check_open(self, *, at_intervals: bool = False) -> None:
        """Find that an open file, or one whose content was sampled, was rewritten in place.

        A file that was moved, removed or replaced by another one of its name does no harm to those who have it
        open: they read on in what they opened. :meth:`check` finds it where the name is opened next.

        Args:
            at_intervals: only if the last check was a second ago.

        Raises:
            CorruptError: one was.
        """
        if at_intervals and time.monotonic() < self._due:
            return
        self._adapt_to_host()
        for number in dict.fromkeys([*self._watched, *self._samples]):
            with suppress(OSError):  # gone
                found = os.stat(self.path(number))
                if found.st_ino & _MOST == self._seen[number, _INODE]:
                    self._compare(number, found)
        self._due = time.monotonic() + CHECK_SECONDS

    def reopened(self, paths: Sequence[str]) -> DataFiles:
        """What this job saw first, for a source that finds its files again in another process.

        Args:
            paths: of the files that it found.

        Raises:
            CorruptError: they are not the files that there were, or one was changed.
            SourceError: one cannot be read.
        """
        if _split(paths) != (self._root, self._names):
            raise CorruptError(
                "files were added, removed or renamed while the data set was in use",
                expected=f"{len(self)} files, as when it was opened",
                found=f"{len(paths)} files",
                where=self._root,
                remedy=_REMEDY,
            )
        for number in range(len(self)):
            self.check(number)
        return self

    def _compare(self, number: int, found: os.stat_result) -> None:
        seen, sample = self._seen[number], self._samples.get(number)
        compared = ""
        if found.st_size == seen[_SIZE]:
            # A file whose content is known is compared by ctime too, which no tool sets back.
            if found.st_mtime_ns == seen[_MTIME] and (sample is None or found.st_ctime_ns == sample[1]):
                return
            if self._is_copy(number):  # of the same data: remembered
                self._seen[number] = _facts(found)
                if sample is not None:
                    self._samples[number] = (sample[0], found.st_ctime_ns)
                return
            compared = ", other content" if sample is not None or self.content is not None else ""
        raise CorruptError(
            "a file was changed or replaced while it was in use",
            expected=f"{seen[_SIZE]} bytes, modified {_shown(seen[_MTIME])}, as when the data set was opened",
            found=f"{found.st_size} bytes, modified {_shown(found.st_mtime_ns)}{compared}",
            where=self.path(number),
            remedy=_REMEDY,
        )

    def _is_copy(self, number: int) -> bool:
        """Whether a file of the right size has the right content; False where that cannot be known."""
        if number in self._samples:
            return self._sample(number, int(self._seen[number, _SIZE])) == self._samples[number][0]
        return self.content is not None and self.content(number)

    def _sample(self, number: int, size: int) -> int:
        """A checksum of the bytes at the start, in the middle and at the end of a file."""
        places = {0, max(0, (size - SAMPLE_BYTES) // 2), max(0, size - SAMPLE_BYTES)}
        state = xxhash.xxh3_64()
        try:
            handle = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                for place in sorted(places):
                    state.update(os.pread(handle, SAMPLE_BYTES, place))
            finally:
                os.close(handle)
        except OSError as error:
            raise self._unreadable(number, error) from error
        return state.intdigest()

    def _stat(self, number: int) -> os.stat_result:
        try:
            return os.stat(self.path(number))
        except OSError as error:
            raise self._unreadable(number, error) from error

    def _unreadable(self, number: int, error: OSError) -> SourceError:
        return SourceError("the file cannot be read", found=error.strerror or error, where=self.path(number))

    def _adapt_to_host(self) -> None:
        """Another host may have the same data on a disk of its own, where times and inodes are others."""
        if self._host == boot_id():
            return
        fingerprint = self.fingerprint
        self._observe(list(self._samples))
        if self.fingerprint != fingerprint:
            self._host = ""  # look again at the next call
            found, self.fingerprint = self.fingerprint, fingerprint
            raise CorruptError(
                "the data on this host are not those that the job opened on another host",
                expected=f"files with fingerprint {fingerprint}",
                found=found,
                where=self._root,
                remedy="copy the same data to all hosts",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "paths": (self._root, self._names),
            "named": self._named,
            "host": self._host,
            "seen": self._seen.tobytes(),
            "samples": self._samples,
            "fingerprint": self.fingerprint,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._root, self._names = state["paths"]
        self._named, self._host, self.fingerprint = state["named"], state["host"], state["fingerprint"]
        self._seen = np.frombuffer(bytearray(state["seen"]), np.int64).reshape(-1, 3)
        self._samples = state["samples"]
        self.content = None
        self._start()


_REMEDY = "start the job again; write new data to another folder while a job reads these"


def _facts(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ino & _MOST


def _shown(nanoseconds: int) -> str:
    seconds, rest = divmod(int(nanoseconds), 10**9)
    with suppress(ValueError, OverflowError, OSError):
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"
    return f"at {nanoseconds} ns"


def _split(paths: Sequence[str]) -> tuple[str, bytes]:
    """The folder that paths have in common, with a slash at its end, and their names relative to it."""
    first, last = min(paths, default=""), max(paths, default="")  # all others begin as these both do
    same = next((at for at, (one, two) in enumerate(zip(first, last, strict=False)) if one != two), len(first))
    root = first[: first.rfind("/", 0, same) + 1]
    return root, b"\0".join(os.fsencode(path[len(root) :]) for path in paths)


def _chosen(names: Sequence[bytes]) -> Iterable[int]:
    """Numbers of the files whose content is sampled, ascending: those with the smallest hashes of their names."""
    if len(names) <= SAMPLED_FILES:
        return range(len(names))
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, names), np.uint64, len(names))
    return sorted(hashes.argsort(kind="stable")[:SAMPLED_FILES].tolist())
