"""The indexed shards of a dataset, opened when they are read, and the samples in them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rankfeed.columns.chunk_groups import by_chunk
from rankfeed.columns.pointers import Memory
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.source import Int64, starts_of
from rankfeed.sources.tar.headers import BLOCK
from rankfeed.sources.tar.index_cache import IndexCache
from rankfeed.sources.tar.shard_list import ShardList
from rankfeed.sources.tar.tar_index import TarIndex, first_dot_remedy, headers_digest
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import DataFiles
from rankfeed.storage.mapped import Bytes

Missing = Literal["error", "skip", "mask"]


@dataclass(frozen=True)
class Shard:
    """An open shard."""

    path: str
    memory: Memory  #: the whole file, memory-mapped
    index: TarIndex


class ShardSet:
    """Shards with their indexes, and the sample ids in them; some samples may be left out."""

    def __init__(self, listed: ShardList, cache: IndexCache, *, keep_repeated: bool = False) -> None:
        self.paths = listed.paths
        #: The shards as this job first saw them.
        self.files = DataFiles(self.paths, [shard.name for shard in listed.shards])
        self._cache = cache
        self.summaries = cache.summaries(self.paths)
        #: Samples of each extension, in order of appearance.
        self.extensions: Counter[str] = Counter()
        for shard, summary in zip(listed.shards, self.summaries, strict=True):
            self.extensions.update({member.name: member.count for member in summary.extensions})
            if shard.samples not in (None, summary.samples):
                raise SourceError(
                    "a shard has another number of samples than its description says",
                    expected=f"{shard.samples} samples",
                    found=f"{summary.samples} samples",
                    where=f"{shard.path}, described in {listed.where}",
                    remedy="create the description again, or open the .tar files themselves by a pattern",
                )
            if summary.repeated is not None and not keep_repeated:
                index = cache.load(shard.path)
                first, second = (int(index.offsets[row]) for row in summary.repeated)
                raise SourceError(
                    "two samples that are not adjacent have the same key: probably one sample in two pieces",
                    expected="all members of a sample side by side",
                    found=f"{index.key(summary.repeated[0])!r} at offset {first} and at {second}",
                    where=f"{shard.path}, offset {second}",
                    remedy=first_dot_remedy(
                        self.extensions,
                        'write the archive again by `tar --sort=name`, or pass duplicate_keys="keep" to have each '
                        "as a sample, as WebDataset does",
                    ),
                )
        #: Rows that remain, for shards of which some are left out.
        self._kept: dict[int, Int64] = {}
        self._exclude(listed)
        self._count()

    def _count(self) -> None:
        #: int64, samples of each shard that are not left out.
        self.counts = np.array([summary.samples for summary in self.summaries], np.int64)
        for shard_number, rows in self._kept.items():
            self.counts[shard_number] = len(rows)
        #: int64 [shards + 1], first sample id of each shard, and their number at the end.
        self.starts = starts_of(self.counts)

    def fingerprint(self) -> str:
        """Digest of names, sizes, indexes, content samples, and the samples that are left out."""
        pieces = [self.files.fingerprint.encode()]
        pieces += [summary.digest.encode() for summary in self.summaries]
        pieces += [str(shard).encode() + rows.tobytes() for shard, rows in sorted(self._kept.items())]
        return digest_of(*pieces)

    def _load(self, data: Bytes, shard_number: int) -> Shard:
        """An open shard; a CorruptError if it was changed since it was indexed."""
        path, summary = self.paths[shard_number], self.summaries[shard_number]
        shard = Shard(path, Memory(data), self._cache.load(path))
        # An index is found by size and time of the shard, which another archive may have too.
        headers = headers_digest(lambda offset: data[offset : offset + BLOCK].tobytes(), shard.index.offsets)
        if (shard.index.summary.digest, headers) != (summary.digest, summary.headers):
            raise CorruptError(
                "a shard is not the one that was indexed",
                expected=f"the {summary.samples} samples that were there when it was opened or indexed",
                found="other headers, or another index",
                where=path,
                remedy=f"start the job again; if the shard has size and time of an older one, `touch {path}`",
            )
        return shard

    def places(self, ids: Int64) -> Iterator[tuple[Shard, Int64, Int64 | None]]:
        """Samples by shard, which is opened: rows in it, and positions in ``ids`` (None for all)."""
        for shard_number, rows, slots in by_chunk(ids, self.starts):
            kept = self._kept.get(shard_number)
            shard = self.files.get(shard_number, self._load)
            yield shard, rows if kept is None else kept[rows], slots

    def check_missing(self, extensions: Sequence[str], *, skip: bool) -> None:
        """Leave out samples that lack a member (``skip``), or raise a SourceError for the first of them."""
        for shard_number, summary in enumerate(self.summaries):
            counts = {member.name: member.count for member in summary.extensions}
            for extension in extensions:
                if counts.get(extension, 0) == summary.samples:
                    continue
                index = self._cache.load(self.paths[shard_number])
                rows = self._kept.get(shard_number, np.arange(summary.samples))
                lacking = index.locate(extension, rows)[1] < 0
                if skip:
                    self._kept[shard_number] = rows[~lacking]
                elif lacking.any():
                    row = int(rows[np.argmax(lacking)])
                    raise SourceError(
                        "a sample lacks a member that others have",
                        expected=f"a member .{extension}",
                        found=f"sample {index.key(row)!r} without",
                        where=f"{self.paths[shard_number]}, offset {index.offsets[row]}",
                        remedy=first_dot_remedy(
                            [extension],
                            'choose columns= that all have, or pass missing="skip" to leave such samples out, or '
                            'missing="mask" to have them with an empty value',
                        ),
                    )
        self._count()
        if not self.starts[-1]:
            raise SourceError(
                "no sample has all columns",
                expected=", ".join(extensions),
                where=self.paths[0],
                remedy=first_dot_remedy(extensions, 'give columns= that samples share, or missing="mask"'),
            )

    def _exclude(self, listed: ShardList) -> None:
        """Leave out samples by ``shard/key``."""
        numbers = {shard.name: shard_number for shard_number, shard in enumerate(listed.shards)}
        excluded: dict[int, set[str]] = {}
        for name in listed.excluded:
            for cut, character in enumerate(name):  # shard names and keys may have slashes: try every cut
                if character == "/" and name[:cut] in numbers:
                    excluded.setdefault(numbers[name[:cut]], set()).add(name[cut + 1 :])
        for shard_number, keys in excluded.items():
            index = self._cache.load(self.paths[shard_number])
            rows = [row for row in range(index.summary.samples) if index.key(row) not in keys]
            self._kept[shard_number] = np.array(rows, np.int64)
