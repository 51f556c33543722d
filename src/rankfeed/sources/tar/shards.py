"""The shards of a data set: which files, how many samples each, and opening them when they are read."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from errno import EMFILE, ENFILE
from functools import partial

import numpy as np
import numpy.typing as npt

from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.paths import Paths, common_root, expand, is_one
from rankfeed.sources.tar.columns import Places, Shard, stamp_of
from rankfeed.sources.tar.descriptions import (
    META,
    Described,
    foreign_offsets,
    is_energon,
    is_wids,
    read_energon,
    read_wids,
    tars_in,
)
from rankfeed.sources.tar.headers import TarReader, Window
from rankfeed.sources.tar.index import Summary, TarIndex
from rankfeed.sources.tar.index_cache import IndexStore
from rankfeed.sources.tar.scan import readable, split_name
from rankfeed.sources.tar.third_party_index import LazyIndex
from rankfeed.storage import DataFiles, digest_of, map_file
from rankfeed.storage.mapped import ReadHandle

Int64 = npt.NDArray[np.int64]

#: Shards larger than this in all are announced to the kernel before they are read.
PREFETCH_BYTES = 768 << 20
#: Shards that a process holds open, over all its data sets: each takes three file descriptors, and 1,024 are the
#: usual limit. What a batch points into stays, however many others are opened.
OPEN_SHARDS = 128
#: Headers that are compared with the index when a shard is opened.
_LOOKS = 8


def described(where: Paths, split: str | None = None) -> Described:
    """The shards that are meant.

    Args:
        where: a shard, a folder of them, a glob or brace pattern, a list of these; a folder that Energon prepared;
            a wids descriptor.
        split: a part of a folder that Energon prepared.

    Raises:
        SourceError, CorruptError, UnsafeError, ArgumentError: there are none, or their description is not right.
    """
    if is_one(where):
        path = os.fspath(where)  # type: ignore[arg-type]
        if os.path.isdir(path) and is_energon(path):
            return read_energon(path, split)
        if is_wids(path):
            _no_split(split)
            return read_wids(path)
    _no_split(split)
    shards: list[str] = []
    for path in expand(where):
        shards += tars_in(path) if os.path.isdir(path) else [path]
    if not shards:
        raise SourceError("no .tar files", where=where)
    shards = [os.path.abspath(path) for path in shards]
    root = common_root(shards)
    return Described(shards, [os.path.relpath(path, root) for path in shards], [None] * len(shards))


def _no_split(split: str | None) -> None:
    if split is not None:
        raise ArgumentError(
            "only folders that Energon prepared have splits",
            expected=f"a folder with {META}/split.yaml",
            found=split,
        )


class ShardSet:
    """Shards with their indexes: our own, made where there is none, or others'.

    Args:
        these: which shards.
        store: where our own indexes are.
        foreign: whether others' offsets are taken for shards that we have not indexed.
        files: what another process of the job saw first; None for the process that opens.

    Attributes:
        files: the shards, as this job first saw them.
        summaries: what each holds; None for a shard with another's index, of which less is known.
        lazy: the indexes of those.
        counts: int64, samples in each.
        sizes: bytes of each.
    """

    def __init__(
        self, these: Described, store: IndexStore, *, foreign: bool, files: DataFiles | None = None
    ) -> None:
        self.these = these
        self.paths = these.shards
        self.files = DataFiles(self.paths, these.names) if files is None else files.reopened(self.paths)
        self.lazy: dict[int, LazyIndex] = {}
        self._store = store
        self._open: dict[int, Shard] = {}
        _sets.add(self)
        known = store.known(self.paths)
        for number, path in enumerate(self.paths):
            # Whoever leaves samples out has to know all keys.
            if foreign and not these.excluded and known[path] is None:
                found = foreign_offsets(path, these.where or None, these.names[number])
                if found is not None:
                    self.lazy[number] = LazyIndex(path, *found, check=partial(self.files.check, number))
        new = [path for number, path in enumerate(self.paths) if known[path] is None and number not in self.lazy]
        known.update(zip(new, store.summaries(new), strict=True))
        self.summaries: list[Summary | None] = [
            None if number in self.lazy else known[path] for number, path in enumerate(self.paths)
        ]
        self.counts = np.array([self._count(number) for number in range(len(self.paths))], np.int64)
        self.sizes: list[int] = self.files.sizes.tolist()
        self.exceeds = sum(self.sizes) > PREFETCH_BYTES
        self._check_counts()

    def _count(self, number: int) -> int:
        summary = self.summaries[number]
        return len(self.lazy[number].offsets) - 1 if summary is None else summary.samples

    def _check_counts(self) -> None:
        for number, count in enumerate(self.these.counts):
            if count is not None and count != self.counts[number]:
                raise SourceError(
                    "a shard has another number of samples than its description says",
                    expected=f"{count} samples",
                    found=f"{self.counts[number]} samples",
                    where=f"{self.paths[number]}, described in {self.these.where}",
                    remedy="make the description anew, or open the .tar files themselves by a pattern",
                )

    def fingerprint(self) -> str:
        """Of names, sizes, counts, where each sample begins (by whichever index), and content samples."""
        pieces = []
        for number, name in enumerate(self.these.names):
            summary = self.summaries[number]
            digest = digest_of(self.lazy[number].offsets.tobytes()) if summary is None else summary.offsets_digest
            pieces += [os.fsencode(name), str(self.sizes[number]).encode(), digest.encode()]
        return digest_of(*pieces, self.files.fingerprint.encode())

    def __len__(self) -> int:
        return len(self.paths)

    def index(self, number: int) -> Places:
        """Where the samples of a shard lie."""
        return self.lazy[number] if number in self.lazy else self._store.load(self.paths[number])

    def open(self, number: int) -> Shard:
        """A shard that can be read; opened where it is not open.

        Raises:
            SourceError, CorruptError: it is gone, or has changed since it was indexed.
        """
        found = self._open.get(number)
        if found is not None and found.is_unchanged():
            return found
        # No lock, which a fork could leave held: two threads that open one shard do no harm.
        try:
            shard = self._opened(number)
        except SourceError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in (EMFILE, ENFILE):
                raise
            _close_all_but(0)
            shard = self._opened(number)
        self._open[number] = shard
        _close_all_but(OPEN_SHARDS)
        return shard

    def _opened(self, number: int) -> Shard:
        path = self.paths[number]
        self.files.check(number)  # before another shard is indexed
        index = self.index(number)
        data = map_file(path)
        file = ReadHandle(path)
        shard = Shard(path, data, index, file, stamp_of(file))
        self.files.opened(number)
        if not self._is_as_indexed(number, index):
            raise CorruptError(
                "a shard was changed while it was in use",
                expected=f"{self.sizes[number]} bytes and {self.counts[number]} samples, as they were",
                found=f"{shard.stamp[0]} bytes, written since",
                where=path,
                remedy="start the job again",
            )
        if number not in self.lazy:
            self._look_at(shard, int(self.counts[number]))
        return shard

    def close_one(self) -> None:
        """Let go of the shard that was opened first."""
        with suppress(StopIteration, RuntimeError):  # another thread was there first
            self._open.pop(next(iter(self._open)), None)

    @property
    def num_open(self) -> int:
        """Shards that are held open."""
        return len(self._open)

    def _is_as_indexed(self, number: int, index: Places) -> bool:
        """Whether an index is of the same samples as when the data set was opened."""
        then = self.summaries[number]
        return (
            then is None or not isinstance(index, TarIndex) or index.summary.offsets_digest == then.offsets_digest
        )

    def _look_at(self, shard: Shard, count: int) -> None:
        """Compare some headers with the index, which was believed because size and time of the file agree."""
        with Window(shard.path) as window:
            for row in np.unique(np.linspace(0, count - 1, min(_LOOKS, count)).astype(np.int64)).tolist():
                offset = int(shard.index.offsets[row])
                member = TarReader(window, offset).next()
                parts = None if member is None else split_name(member.name)
                if parts is None or readable(parts[0]).decode() != shard.index.key(row):
                    raise CorruptError(
                        "a shard is not the one that was indexed, although size and time agree",
                        expected=f"sample {shard.index.key(row)!r}",
                        found="another member" if member is None else repr(member.name[:200]),
                        where=f"{shard.path}, offset {offset}",
                        remedy=f"`touch` the shard, or remove its index ({shard.path}.rankfeed)",
                    )

    def __getstate__(self) -> None:
        raise TypeError("a set of open shards is not pickled: its source opens it anew")


#: All that there are in this process.
_sets: weakref.WeakSet[ShardSet] = weakref.WeakSet()


def _close_all_but(most: int) -> None:
    """Have no more shards open than that, over all data sets: those with most of them give first."""
    while True:
        with suppress(RuntimeError):  # another thread opens a data set
            sets = list(_sets)
            if sum(each.num_open for each in sets) <= most:
                return
            max(sets, key=lambda each: each.num_open).close_one()


def renamed(these: Described, shards: Sequence[str]) -> Described:
    """The same data set with its shards elsewhere (decompressed)."""
    return replace(these, shards=list(shards))
