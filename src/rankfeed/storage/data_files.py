"""The files of a dataset as a job first saw them: names, sizes, times, and samples of their content.

They identify the data: the fingerprint consists of names, sizes and content samples, and does not depend on mount
point or times. And they detect changes: a file is compared by size and time when it is opened, in any process of
the job, and at intervals while it is open; if these differ, its content decides whether it is a copy of the same
data.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import xxhash

from rankfeed._util.handle_cache import HandleCache
from rankfeed._util.native import lost_mappings
from rankfeed._util.process_info import boot_id
from rankfeed._util.signals import reraise_interrupt
from rankfeed.columns.pointers import Int64, file_of
from rankfeed.errors import CorruptError
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.file_errors import file_errors
from rankfeed.storage.mapped import Bytes, check_not_truncated, map_file

Parsed = TypeVar("Parsed")
#: Of a mapped file: path, bytes, what `file_of` returns, and what `DataFiles.get` parsed.
_Opened = tuple[str, Bytes, Any, Any]

#: Files kept open; a batch keeps those that it points into, even if they are closed here.
OPEN_FILES = 256
#: Files whose content is sampled, chosen by a hash of their names.
SAMPLED_FILES = 64
#: Bytes of each of the three content samples of a file: at its start, middle and end.
SAMPLE_BYTES = 4096
#: Seconds between two checks of the open files.
CHECK_SECONDS = 1.0
#: Open files that are checked: the most recently opened.
_MAX_WATCHED = 512

#: Columns of the table of observed attributes.
_SIZE, _MTIME, _INODE = range(3)
_INT64_MAX = (1 << 63) - 1
_REMEDY = "start the job again; write new data to another folder while a job reads these"


class DataFiles:
    """The files that a source reads. Pickles what the job first saw: about 24 bytes and the name of each file.

    The absolute paths have the same order for the same data. The fingerprint has the ``names``, by default the
    paths relative to their common folder. For formats with checksums, ``content`` says of a file that is not
    sampled whether it has its expected content.
    """

    _PICKLED = ("_root", "_names", "_names_digest", "_host", "_seen", "_samples", "fingerprint", "content")

    def __init__(
        self,
        paths: Sequence[str],
        names: Sequence[str] | None = None,
        *,
        content: Callable[[int], bool] | None = None,
    ) -> None:
        self._root, self._names = split_paths(paths)
        self.content = content
        self._init_transient()
        fingerprint_names = self._names if names is None else b"\0".join(map(os.fsencode, names))
        self._names_digest = digest_of(fingerprint_names)
        self._observe(_choose_sampled(fingerprint_names.split(b"\0")))

    def _init_transient(self) -> None:
        #: Start of each name in `_names`, and the end of the last one plus 1.
        self._starts = np.zeros(self._names.count(b"\0") + 2, np.int64)
        self._starts[1:-1] = np.flatnonzero(np.frombuffer(self._names, np.uint8) == 0) + 1
        self._starts[-1] = len(self._names) + 1
        self._open: HandleCache[_Opened] = HandleCache(OPEN_FILES)
        #: Open files, the most recently opened last.
        self._watched: dict[int, None] = {}
        self._next_check = 0.0

    def _observe(self, sampled: Iterable[int]) -> None:
        """Record the attributes of all files on this host, and the content samples of some."""
        self._host = boot_id()
        self._seen = np.empty((len(self), 3), np.int64)
        #: Hash of the content sample, and ctime, of the sampled files.
        self._samples: dict[int, tuple[int, int]] = {}
        with file_errors(self._root):
            for index in range(len(self)):
                self._seen[index] = _attributes(os.stat(self.path(index)))
        for index in sampled:
            with file_errors(path := self.path(index)):
                status = os.stat(path)
                self._samples[index] = (self._sample(index, status.st_size), status.st_ctime_ns)
        content = np.array([sample for sample, _ in self._samples.values()], np.uint64)
        #: Hexadecimal digits that change with names, sizes and content samples.
        self.fingerprint = digest_of(
            b"files", self._names_digest.encode(), self._seen[:, _SIZE].tobytes(), content.tobytes()
        )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def path(self, index: int) -> str:
        return self._root + os.fsdecode(self._names[self._starts[index] : self._starts[index + 1] - 1])

    @property
    def sizes(self) -> Int64:
        """Bytes of each file: int64 [files]."""
        return self._seen[:, _SIZE]

    def get(self, index: int, parse: Callable[[Bytes, int], Parsed]) -> Parsed:
        """What ``parse`` makes of the bytes of a file and its number; mapped and parsed unless it is open.

        Raises CorruptError if the file was changed before it was opened, or is truncated.
        """
        parsed: Parsed
        path, _, file, parsed = self._open.get(index, partial(self._map, index, parse))
        check_not_truncated(file, path)
        return parsed

    def _map(self, index: int, parse: Callable[[Bytes, int], Any]) -> _Opened:
        path = self.path(index)
        data = map_file(path)
        self.opened(index)
        return path, data, file_of(data), parse(data, index)

    def check_read(self) -> None:
        """Raise CorruptError if an open file has pages that were read as zeros, because it was truncated."""
        if lost_mappings().value:
            for path, _, file, _ in self._open.values():
                check_not_truncated(file, path)

    def check(self, index: int) -> None:
        """Compare a file with what this job first saw; raises CorruptError, or SourceError if it is gone.

        Called after opening it or reading it to its end: it may be replaced before.
        """
        self._adapt_to_host()
        with file_errors(self.path(index)):
            self._compare(index, os.stat(self.path(index)))

    def opened(self, index: int) -> None:
        """As :meth:`check`, for a file that stays open: :meth:`check_open` includes it from now on."""
        self.check(index)
        self._watched.pop(index, None)
        self._watched[index] = None
        if len(self._watched) > _MAX_WATCHED:
            try:
                del self._watched[next(iter(self._watched))]
            except (StopIteration, RuntimeError, KeyError) as error:  # another thread has removed it
                reraise_interrupt(error)

    def check_open(self, *, at_intervals: bool = False) -> None:
        """Check that no open or sampled file was rewritten in place.

        Files that were moved, removed or replaced do not affect processes that have them open; :meth:`check`
        detects this when the path is opened again. ``at_intervals`` skips the check if the last one was less than
        a second ago.
        """
        if at_intervals and time.monotonic() < self._next_check:
            return
        self._adapt_to_host()
        for index in dict.fromkeys([*self._watched, *self._samples]):
            try:
                status = os.stat(self.path(index))
            except OSError as error:  # gone
                reraise_interrupt(error)
                continue
            if status.st_ino & _INT64_MAX == self._seen[index, _INODE]:
                with file_errors(self.path(index)):
                    self._compare(index, status)
        self._next_check = time.monotonic() + CHECK_SECONDS

    def _compare(self, index: int, status: os.stat_result) -> None:
        seen, sample = self._seen[index], self._samples.get(index)
        compared = ""
        if status.st_size == seen[_SIZE]:
            # Sampled files are compared by ctime too, which no tool resets.
            if status.st_mtime_ns == seen[_MTIME] and (sample is None or status.st_ctime_ns == sample[1]):
                return
            if self._is_copy(index):
                self._seen[index] = _attributes(status)
                if sample is not None:
                    self._samples[index] = (sample[0], status.st_ctime_ns)
                return
            compared = ", other content" if sample is not None or self.content is not None else ""
        raise CorruptError(
            "a file was changed or replaced while it was in use",
            expected=f"{seen[_SIZE]} bytes, modified {_time_text(seen[_MTIME])}, as when the data set was opened",
            found=f"{status.st_size} bytes, modified {_time_text(status.st_mtime_ns)}{compared}",
            where=self.path(index),
            remedy=_REMEDY,
        )

    def _is_copy(self, index: int) -> bool:
        """Whether a file of the expected size has the expected content; False if unknown."""
        if index in self._samples:
            return self._sample(index, int(self._seen[index, _SIZE])) == self._samples[index][0]
        return self.content is not None and self.content(index)

    def _sample(self, index: int, size: int) -> int:
        """Hash of the bytes at the start, middle and end of a file."""
        offsets = {0, max(0, (size - SAMPLE_BYTES) // 2), max(0, size - SAMPLE_BYTES)}
        state = xxhash.xxh3_64()
        # O_NONBLOCK: opening a pipe would wait for a writer.
        handle = os.open(self.path(index), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for offset in sorted(offsets):
                state.update(os.pread(handle, SAMPLE_BYTES, offset))
        finally:
            os.close(handle)
        return state.intdigest()

    def _adapt_to_host(self) -> None:
        """Observe the files again on another host, whose copy of the data has other times and inodes."""
        if self._host == boot_id():
            return
        fingerprint = self.fingerprint
        self._observe(list(self._samples))
        if self.fingerprint != fingerprint:
            self._host = ""  # observe again at the next call
            observed, self.fingerprint = self.fingerprint, fingerprint
            raise CorruptError(
                "the data on this host are not those that the job opened on another host",
                expected=f"files with fingerprint {fingerprint}",
                found=observed,
                where=self._root,
                remedy="copy the same data to all hosts",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_transient()


def _attributes(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino & _INT64_MAX


def _time_text(nanoseconds: int) -> str:
    return f"{np.datetime64(int(nanoseconds), 'ns')} UTC"


def split_paths(paths: Sequence[str]) -> tuple[str, bytes]:
    """The common folder of some paths, with a slash at its end, and their names relative to it."""
    prefix = os.path.commonprefix(paths)  # noqa: RUF071  (cut at its last slash)
    root = prefix[: prefix.rfind("/") + 1]
    return root, b"\0".join(os.fsencode(path[len(root) :]) for path in paths)


def _choose_sampled(names: Sequence[bytes]) -> Iterable[int]:
    """Numbers of the files whose content is sampled, ascending: those whose names have the smallest hashes."""
    if len(names) <= SAMPLED_FILES:
        return range(len(names))
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, names), np.uint64, len(names))
    return sorted(hashes.argsort(kind="stable")[:SAMPLED_FILES].tolist())
