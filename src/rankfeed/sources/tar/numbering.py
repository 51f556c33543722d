"""Which samples of the shards count, and what their numbers are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rankfeed.errors import SourceError
from rankfeed.sources.source import by_chunk
from rankfeed.sources.tar.shards import ShardSet

Int64 = npt.NDArray[np.int64]


class Numbering:
    """Numbers the samples of all shards, those left out excepted.

    Args:
        shards: they; what their description leaves out is left out.

    Attributes:
        counts: int64, samples of each shard that count.
        starts: int64 [shards + 1], the number of the first of each.
    """

    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        self._kept: dict[int, Int64] = {}
        for number, rows in excluded_rows(shards):
            self._leave_out(number, rows)
        self._lay_out()

    def places(self, ids: Int64) -> Iterator[tuple[int, Int64, Int64 | None]]:
        """Where samples lie: for each shard that is met its number, rows in it, and which of ``ids`` they are."""
        for number, rows, slots in by_chunk(ids, self.starts):
            yield number, self._kept[number][rows] if number in self._kept else rows, slots

    def pieces(self) -> list[bytes]:
        """What a fingerprint has to know of the samples that are left out."""
        return [str(number).encode() + rows.tobytes() for number, rows in sorted(self._kept.items())]

    def settle_missing(self, extensions: Sequence[str], *, skip: bool) -> None:
        """Leave samples out that lack a member, or refuse them.

        Raises:
            SourceError: a sample lacks one; or, where they are left out, none is left.
        """
        for number, summary in enumerate(self._shards.summaries):
            if summary is None:
                continue
            has = {each.name: each.count for each in summary.extensions}
            for extension in extensions:
                if has.get(extension, 0) == summary.samples:
                    continue
                _, sizes = self._shards.index(number).locate(extension, np.arange(summary.samples))
                lacking = np.flatnonzero(sizes < 0)
                if skip:
                    self._leave_out(number, lacking)
                    continue
                lacking = lacking[np.isin(lacking, self._kept.get(number, lacking))]
                if len(lacking):
                    raise lacks(self._shards, number, int(lacking[0]), extension)
        self._lay_out()
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

    def _lay_out(self) -> None:
        self.counts = self._shards.counts.copy()
        for number, rows in self._kept.items():
            self.counts[number] = len(rows)
        self.starts = np.append(0, np.cumsum(self.counts))


def excluded_rows(shards: ShardSet) -> Iterator[tuple[int, Int64]]:
    """Samples that the description leaves out: shard, and the samples' numbers in it."""
    names = {name: number for number, name in enumerate(shards.these.names)}
    by_shard: dict[int, set[str]] = {}
    for name in shards.these.excluded:
        for cut, sign in enumerate(name):  # both may have slashes: every cut that names a shard counts
            if sign == "/" and name[:cut] in names:
                by_shard.setdefault(names[name[:cut]], set()).add(name[cut + 1 :])
    for number, keys in by_shard.items():
        index = shards.index(number)
        rows = [row for row in range(len(index.offsets) - 1) if index.key(row) in keys]
        yield number, np.array(rows, np.int64)


def refuse_repeated(shards: ShardSet) -> None:
    """Refuse shards in which a key comes back.

    Raises:
        SourceError: as said; names both offsets.
    """
    for number, summary in enumerate(shards.summaries):
        if summary is not None and summary.repeated is not None:
            index = shards.index(number)
            first, second = summary.repeated
            raise SourceError(
                "two samples that do not lie side by side have one key: most likely one sample in two pieces",
                expected="all members of a sample side by side",
                found=f"{index.key(first)!r} at offset {index.offsets[first]} and at {index.offsets[second]}",
                where=f"{shards.paths[number]}, offset {index.offsets[second]}",
                remedy='write the archive again by `tar --sort=name`; or pass duplicate_keys="keep" to have each '
                "as a sample, as WebDataset does",
            )


def lacks(shards: ShardSet, number: int, row: int, extension: str) -> SourceError:
    """Say that a sample lacks a member that others have."""
    index = shards.index(number)
    return SourceError(
        "a sample lacks a member that others have",
        expected=f"a member .{extension}",
        found=f"sample {index.key(row)!r} without",
        where=f"{shards.paths[number]}, offset {index.offsets[row]}",
        remedy='choose columns= that all have, or pass missing="skip" to leave such samples out, or '
        'missing="mask" to have them with an empty value',
    )
