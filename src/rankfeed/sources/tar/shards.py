"""The indexed shards of a dataset, opened when they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankfeed._util.handle_cache import HandleCache
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.source import by_chunk, starts_of
from rankfeed.sources.tar.headers import TarReader, Window
from rankfeed.sources.tar.index import TarIndex
from rankfeed.sources.tar.index_cache import IndexCache
from rankfeed.sources.tar.scan import readable_key, split_name
from rankfeed.sources.tar.shard_list import ShardList
from rankfeed.storage import DataFiles, check_not_truncated, digest_of, map_file

Int64 = npt.NDArray[np.int64]

#: Shards that are held open; each takes two file descriptors.
OPEN_SHARDS = 128
#: Headers that are compared with the index when a shard is opened.
_COMPARED_HEADERS = 8


@dataclass(frozen=True)
class Shard:
    """An open shard.

    Args:
        path: of the archive.
        data: uint8, the whole file, memory-mapped.
        index: where its samples are.
    """

    path: str
    data: npt.NDArray[np.uint8]
    index: TarIndex

    def read(self, start: int, size: int) -> bytes:
        """The bytes of a member."""
        return self.data[start : start + size].tobytes()


class ShardSet:
    """Shards with their indexes.

    Args:
        listed: the shards.
        cache: of their indexes.
        files: what another process of the job saw first; None for the process that opens.

    Attributes:
        files: the shards as this job first saw them.
        summaries: of each shard.
        counts: int64, samples in each.
        sizes: bytes of each.
    """

    def __init__(self, listed: ShardList, cache: IndexCache, *, files: DataFiles | None = None) -> None:
        self.listed = listed
        self.paths = listed.shards
        self.files = DataFiles(self.paths, listed.names) if files is None else files.reopened(self.paths)
        self._cache = cache
        self._open: HandleCache[Shard] = HandleCache(OPEN_SHARDS)
        self.summaries = cache.summaries(self.paths)
        self.counts = np.array([summary.samples for summary in self.summaries], np.int64)
        self.sizes: list[int] = self.files.sizes.tolist()
        for number, count in enumerate(listed.counts):
            if count is not None and count != self.counts[number]:
                raise SourceError(
                    "a shard has another number of samples than its description says",
                    expected=f"{count} samples",
                    found=f"{self.counts[number]} samples",
                    where=f"{self.paths[number]}, described in {listed.where}",
                    remedy="create the description again, or open the .tar files themselves by a pattern",
                )

    def fingerprint(self) -> str:
        """Digest of names, sizes, sample offsets and content samples."""
        pieces = []
        for name, size, summary in zip(self.listed.names, self.sizes, self.summaries, strict=True):
            pieces += [os.fsencode(name), str(size).encode(), summary.offsets_digest.encode()]
        return digest_of(*pieces, self.files.fingerprint.encode())

    def index(self, number: int) -> TarIndex:
        """The index of a shard."""
        return self._cache.load(self.paths[number])

    def open(self, number: int) -> Shard:
        """A shard, opened if it is not open; a CorruptError if it was changed since it was indexed."""
        shard = self._open.get(number, lambda: self._opened(number))
        check_not_truncated(shard.data, shard.path)
        return shard

    def _opened(self, number: int) -> Shard:
        path = self.paths[number]
        self.files.check(number)  # before a changed shard is indexed
        index = self.index(number)
        data = map_file(path)
        shard = Shard(path, data, index)
        self.files.opened(number)
        if index.summary.offsets_digest != self.summaries[number].offsets_digest:
            raise CorruptError(
                "a shard was changed while it was in use",
                expected=f"{self.sizes[number]} bytes and {self.counts[number]} samples, as before",
                found=f"{len(data)} bytes, written since",
                where=path,
                remedy="start the job again",
            )
        _compare_headers(shard, int(self.counts[number]))
        return shard

    def __getstate__(self) -> None:
        raise TypeError("a ShardSet is not pickled: its source opens the shards again")


def _compare_headers(shard: Shard, count: int) -> None:
    """Compare some headers with the index, which was chosen by size and time of the file."""
    rows = np.unique(np.linspace(0, count - 1, min(_COMPARED_HEADERS, count)).astype(np.int64))
    with Window(shard.path) as window:
        for row in rows.tolist():
            offset = int(shard.index.offsets[row])
            member = TarReader(window, offset).next()
            parts = None if member is None else split_name(member.name)
            if parts is None or readable_key(parts[0]).decode() != shard.index.key(row):
                raise CorruptError(
                    "a shard is not the one that was indexed, although size and time agree",
                    expected=f"sample {shard.index.key(row)!r}",
                    found="another member" if member is None else repr(member.name[:200]),
                    where=f"{shard.path}, offset {offset}",
                    remedy=f"`touch` the shard, or remove its index ({shard.path}.rankfeed)",
                )


class SampleNumbers:
    """Sample ids of all shards, without the samples that are left out.

    Attributes:
        counts: int64, samples of each shard that are not left out.
        starts: int64 [shards + 1], first sample id of each, and their number at the end.
    """

    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        #: Rows that remain, for shards of which some are left out.
        self._kept: dict[int, Int64] = {}
        for number, rows in _excluded_rows(shards):
            self._leave_out(number, rows)
        self._count()

    def places(self, ids: Int64) -> Iterator[tuple[int, Int64, Int64 | None]]:
        """Samples by shard: number of the shard, rows in it, and positions in ``ids`` (None for all)."""
        for number, rows, slots in by_chunk(ids, self.starts):
            yield number, self._kept[number][rows] if number in self._kept else rows, slots

    def digest_pieces(self) -> list[bytes]:
        """What the fingerprint has to contain about samples that are left out."""
        return [str(number).encode() + rows.tobytes() for number, rows in sorted(self._kept.items())]

    def check_missing(self, extensions: Sequence[str], *, skip: bool) -> None:
        """Leave out samples that lack a member (``skip``), or raise a SourceError for the first of them."""
        for number, summary in enumerate(self._shards.summaries):
            counts = {each.name: each.count for each in summary.extensions}
            for extension in extensions:
                if counts.get(extension, 0) == summary.samples:
                    continue
                _, sizes = self._shards.index(number).locate(extension, np.arange(summary.samples))
                lacking = np.flatnonzero(sizes < 0)
                if skip:
                    self._leave_out(number, lacking)
                    continue
                lacking = lacking[np.isin(lacking, self._kept.get(number, lacking))]
                if len(lacking):
                    raise _missing_member(self._shards, number, int(lacking[0]), extension)
        self._count()
        if not self.starts[-1]:
            raise SourceError(
                "no sample has all columns",
                expected=", ".join(extensions),
                where=self._shards.paths[0],
                remedy='give columns= that samples share, or missing="mask"',
            )

    def _leave_out(self, number: int, rows: Int64) -> None:
        kept = self._kept.get(number, np.arange(self._shards.counts[number]))
        self._kept[number] = kept[~np.isin(kept, rows)]

    def _count(self) -> None:
        self.counts = self._shards.counts.copy()
        for number, rows in self._kept.items():
            self.counts[number] = len(rows)
        self.starts = starts_of(self.counts)


def _excluded_rows(shards: ShardSet) -> Iterator[tuple[int, Int64]]:
    """Samples that the description excludes: number of the shard, and rows in it."""
    numbers = {name: number for number, name in enumerate(shards.listed.names)}
    by_shard: dict[int, set[str]] = {}
    for name in shards.listed.excluded:
        for cut, character in enumerate(name):  # shard names and keys may have slashes: try every cut
            if character == "/" and name[:cut] in numbers:
                by_shard.setdefault(numbers[name[:cut]], set()).add(name[cut + 1 :])
    for number, keys in by_shard.items():
        index = shards.index(number)
        rows = [row for row in range(len(index.offsets) - 1) if index.key(row) in keys]
        yield number, np.array(rows, np.int64)


def refuse_repeated_keys(shards: ShardSet) -> None:
    """Raise a SourceError if samples that are not adjacent have the same key; it names both offsets."""
    for number, summary in enumerate(shards.summaries):
        if summary.repeated is not None:
            index = shards.index(number)
            first, second = summary.repeated
            raise SourceError(
                "two samples that are not adjacent have the same key: probably one sample in two pieces",
                expected="all members of a sample side by side",
                found=f"{index.key(first)!r} at offset {index.offsets[first]} and at {index.offsets[second]}",
                where=f"{shards.paths[number]}, offset {index.offsets[second]}",
                remedy='write the archive again by `tar --sort=name`; or pass duplicate_keys="keep" to have each '
                "as a sample, as WebDataset does",
            )


def _missing_member(shards: ShardSet, number: int, row: int, extension: str) -> SourceError:
    """The error for a sample that lacks a member that others have."""
    index = shards.index(number)
    return SourceError(
        "a sample lacks a member that others have",
        expected=f"a member .{extension}",
        found=f"sample {index.key(row)!r} without",
        where=f"{shards.paths[number]}, offset {index.offsets[row]}",
        remedy='choose columns= that all have, or pass missing="skip" to leave such samples out, or '
        'missing="mask" to have them with an empty value',
    )
