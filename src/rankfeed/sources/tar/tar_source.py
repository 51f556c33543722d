"""WebDataset tar shards, read in place with random access.

A shard is memory-mapped and indexed once, so that a sample is found without reading the ones before it.
"""

import os
from collections.abc import Sequence
from resource import RUSAGE_SELF, getrusage
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_bool, check_choice, check_name, check_optional
from rankfeed.columns.columns import Column
from rankfeed.columns.pointers import RowPointers, file_of
from rankfeed.errors import SourceError
from rankfeed.sources.paths import Paths, label
from rankfeed.sources.source import BLOCK_BYTES, Int64, Source, check_ids, even_blocks, probe_ids
from rankfeed.sources.tar.index_cache import IndexCache, decompressed
from rankfeed.sources.tar.shard_list import list_shards
from rankfeed.sources.tar.shards import Missing, ShardSet
from rankfeed.sources.tar.tar_columns import Decode, SampleBatch, derived_of, schema_of
from rankfeed.storage.data_files import DataFiles
from rankfeed.storage.mapped import check_not_truncated

#: Smaller datasets stay in the page cache: announcing reads would only cost time.
_PREFETCH_BYTES = 768 << 20
#: Batches that are announced after the process waited for a page, as by `RowLookup`.
_COLD_BATCHES = 256


class WebDatasetSource(Source):
    """WebDataset tar shards.

    Samples are those of WebDataset: consecutive members with equal names up to the first dot. Columns are
    ``__key__`` and one for each extension, in lower case.

    Args:
        where: a ``.tar`` file, a folder of them, a glob or brace pattern, a list of these; a folder that Energon
            prepared (``.nv-meta``); a wids descriptor (``.json``).
        columns: names of the columns to offer; None for all.
        allow_pickle: whether members that can run code may be read (``.pyd``, ``.pkl``, ``.pth``...).
        cache_dir: directory for indexes that cannot be stored beside their shards; None for ``~/.cache/rankfeed``.
        decode: True: by extension (see ``decoders``); False: the bytes; a function of extension and bytes; or a
            dict from extensions to: a function of the bytes, False for the bytes, or "object", "dense" or "ragged"
            for the kind of column that the decoded values make.
        missing: for samples that lack a member that others have: "error", "skip" the sample, or "mask": an empty
            value, and False in the column ``<extension>_valid``.
        duplicate_keys: for samples of one shard that are not adjacent and have the same key: "error", since it is
            mostly an archive that was not sorted by name, with samples in pieces; or "keep" each as a sample, as
            WebDataset does.
        split: a part of a dataset that Energon prepared.
        decompress: whether to keep decompressed copies of compressed shards in the cache directory.

    Errors are those of `rankfeed.open`; they name file and offset.
    """

    files: DataFiles
    _page_faults = _batches_to_announce = 0

    def __init__(
        self,
        where: Paths,
        *,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        decode: Decode = True,
        missing: Missing = "error",
        duplicate_keys: Literal["error", "keep"] = "error",
        split: str | None = None,
        decompress: bool = False,
    ) -> None:
        check_choice("missing", missing, get_args(Missing))
        check_choice("duplicate_keys", duplicate_keys, ("error", "keep"))
        cache_dir = None if cache_dir is None else os.path.abspath(cache_dir)
        listed = list_shards(where, check_optional(check_name, "split", split))
        if check_bool("decompress", decompress):
            listed = decompressed(listed, cache_dir)
        cache = IndexCache(cache_dir, within=listed.folder)
        self._shards = ShardSet(listed, cache, keep_repeated=duplicate_keys == "keep")
        self.files = self._shards.files
        if not (samples := int(self._shards.starts[-1])):
            raise SourceError("there are no samples", where=label(self._shards.paths))
        probe = SampleBatch(self._shards, probe_ids(samples))
        self._specs = schema_of(
            self._shards, columns, probe, decode=decode, missing=missing, allow_pickle=allow_pickle
        )
        if missing != "mask":
            needed = [spec.extension for spec in self._specs.values() if spec.role in ("member", "rate")]
            self._shards.check_missing(needed, skip=missing == "skip")
        self.reads_in_place = all(spec.decoder.decode is None for spec in self._specs.values())
        if not self.reads_in_place and self.files.sizes.sum() > _PREFETCH_BYTES:
            self.prefetch_distance = 1
        sizes = zip(self._shards.counts.tolist(), self.files.sizes.tolist(), strict=True)
        blocks = [even_blocks(rows, BLOCK_BYTES * rows // max(1, size)) for rows, size in sizes]
        fields = {name: spec.field for name, spec in self._specs.items()}
        self.derived = derived_of(self._specs)
        self._init_samples(label(self._shards.paths), fields, np.concatenate(blocks), self._shards.fingerprint())

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        batch = SampleBatch(self._shards, ids)
        columns = {name: self._specs[name].read(batch) for name in names}
        for shard, _, _ in batch.places:
            check_not_truncated(file_of(shard.index.offsets), f"the index of {shard.path}")
            if not self.reads_in_place:  # copies check it, decoders do not
                check_not_truncated(file_of(shard.memory.array), shard.path)
        return columns

    def shards_of(self, sample_ids: npt.ArrayLike) -> list[str]:
        """The path of the shard that contains each sample."""
        numbers = self._shards.starts.searchsorted(check_ids(sample_ids, len(self)), side="right") - 1
        return [self._shards.paths[index] for index in numbers.tolist()]

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """Announce reads to the kernel, unless the samples are in the page cache."""
        faults = getrusage(RUSAGE_SELF).ru_majflt
        if faults > self._page_faults:
            self._page_faults, self._batches_to_announce = faults, _COLD_BATCHES
        if not self.prefetch_distance or not self._batches_to_announce:
            return
        self._batches_to_announce -= 1
        for shard, rows, _ in self._shards.places(check_ids(sample_ids, len(self))):
            starts, ends = shard.index.offsets[rows], shard.index.offsets[rows + 1]
            RowPointers.into_bytes(shard.memory, starts, ends - starts, 1, None).advise()
