"""WebDataset shards: tar files whose consecutive members of one key are a sample, read at random in place.

A shard is memory-mapped and indexed once, so that a sample is found without reading what lies before it: shuffling
is global, and the members that need no decoding are delivered from the page cache by one copy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_bool, check_choice, check_name, check_optional
from rankfeed.columns import Bytes, Column, Columns, Dense, Field, RowSlices
from rankfeed.errors import SourceError
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, is_one, matched
from rankfeed.sources.source import Source, check_columns, check_ids
from rankfeed.sources.tar.columns import Part, column_of_values, plain_column, read_values
from rankfeed.sources.tar.decompress import decompressed, looks_like_tar
from rankfeed.sources.tar.descriptions import is_energon, is_wids, tars_in
from rankfeed.sources.tar.index_cache import IndexStore
from rankfeed.sources.tar.npy_columns import NpyColumns
from rankfeed.sources.tar.numbering import Numbering, lacks, refuse_repeated
from rankfeed.sources.tar.schema import Decode, Missing, Spec, extensions_of, schema_of
from rankfeed.sources.tar.shards import ShardSet, described
from rankfeed.storage import DataFiles, digest_of

Int64 = npt.NDArray[np.int64]

#: About what is read in one go.
_BLOCK_BYTES = 4 << 20
#: Batches for which nobody asks whether they are cached, after one that was.
_UNASKED = 15


class WebDatasetSource(Source):
    """Tar shards of WebDataset, read in place.

    A sample is what WebDataset makes of it: consecutive members with equal names up to the first dot. Columns are
    ``__key__`` and one for each extension, in lower case.

    Args:
        where: a ``.tar`` file, a folder of them, a glob or brace pattern, a list of these; a folder that Energon
            prepared (``.nv-meta``); a wids descriptor (``.json``).
        columns: names of those to offer; None for all.
        allow_pickle: whether members may be read that can run code (``.pyd``, ``.pkl``, ``.pth``...).
        cache_dir: where indexes go that cannot lie beside their shards; None for ``~/.cache/rankfeed``.
        decode: True: by extension (see ``decoders``); False: bytes as they lie; a function of extension and bytes;
            or a dict from extensions to: a function of the bytes, False for bytes, or "object", "dense" or
            "ragged" to say what kind of column the decoded values make.
        missing: what is done where a sample lacks a member that others have: "error", "skip" the sample, or
            "mask": an empty value, and False in the column ``<extension>_valid``.
        duplicate_keys: what is done where samples of one shard that do not lie side by side have one key: "error",
            since that is mostly an archive that was not sorted by name, whose samples lie in pieces; or "keep"
            each as a sample of its own, as WebDataset does.
        split: a part of a data set that Energon prepared.
        index: "auto" takes the offsets in others' indexes (``X.tar.idx``, ``.nv-meta/index.sqlite``) where
            there is none of ours, and checks each as it is used; "own" always makes ours.
        decompress: whether shards that are compressed as a whole are decompressed into the cache folder.
        files: what another process of the job saw first; None for the process that opens.

    Raises:
        SourceError, CorruptError, UnsafeError, ArgumentError: the data are not right; names file and offset.
    """

    default_shuffle: ClassVar[Literal["global", "window"]] = "global"
    looks_ahead = 1
    files: DataFiles
    #: Batches to come for which nobody asks whether they are cached.
    _unasked = 0

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
        index: Literal["auto", "own"] = "auto",
        decompress: bool = False,
        files: DataFiles | None = None,
    ) -> None:
        missing = check_choice("missing", missing, get_args(Missing))
        duplicate_keys = check_choice("duplicate_keys", duplicate_keys, ("error", "keep"))
        index = check_choice("index", index, ("auto", "own"))
        split = check_optional(check_name, "split", split)
        decompress = check_bool("decompress", decompress)
        self.where = _absolute(where)
        self._options: dict[str, Any] = {
            "columns": None if columns is None or isinstance(columns, str) else tuple(columns),
            "allow_pickle": allow_pickle,
            "cache_dir": None if cache_dir is None else os.path.abspath(cache_dir),
            "decode": decode,
            "missing": missing,
            "duplicate_keys": duplicate_keys,
            "split": split,
            "index": index,
            "decompress": decompress,
        }
        these = described(self.where, split)
        if decompress:
            these = decompressed(these, cache_dir)
        foreign = index == "auto" and missing == "error"
        self._shards = ShardSet(these, IndexStore(cache_dir, within=these.folder), foreign=foreign, files=files)
        self.files = self._shards.files
        if duplicate_keys == "error":
            refuse_repeated(self._shards)
        extensions = extensions_of(self._shards)
        self._rows = Numbering(self._shards)
        if not len(self):
            raise SourceError("the shards hold no samples", where=self.where)
        self._specs = schema_of(
            self._shards,
            extensions,
            columns,
            decode=decode,
            missing=missing,
            allow_pickle=allow_pickle,
            probe=self._probe,
        )
        if missing != "mask":
            needed = [spec.extension for spec in self._specs.values() if spec.role in ("member", "rate")]
            self._rows.settle_missing(needed, skip=missing == "skip")
        self._arrays = {
            spec.extension: NpyColumns(spec.extension, spec.field)
            for spec in self._specs.values()
            if spec.decoder.kind == "npy" and spec.field.kind in ("dense", "ragged") and spec.role == "member"
        }

    def _probe(self, extension: str, count: int) -> list[Part]:
        """Some members of an extension."""
        ids = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64))
        return self._parts(ids, [extension])[1][extension]

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.where, self._options, self.fingerprint, self.files)

    def _num_samples(self) -> int:
        return int(self._rows.starts[-1])

    def __repr__(self) -> str:
        return f"WebDatasetSource({self.where!r}, {len(self)} samples)"

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return {name: spec.field for name, spec in self._specs.items()}

    @cached_property
    def blocks(self) -> Int64:
        """Runs of samples of about 4 MiB in a shard: int64."""
        out: list[int] = []
        for count, size in zip(self._rows.counts.tolist(), self._shards.sizes, strict=True):
            rows = max(1, _BLOCK_BYTES * count // max(1, size))
            full, rest = divmod(count, rows)
            out += [rows] * full + [rest] * (rest > 0)
        return np.array(out, np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Of names, sizes, counts, where each sample begins, content samples, and which samples are left out."""
        return digest_of(self._shards.fingerprint().encode(), *self._rows.pieces())

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples: bytes, text and arrays as pointers into the mapped shards, others decoded.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or a member is unlike the others of its column.
            CorruptError: a shard is damaged; names file, sample and offset.
        """
        ids = check_ids(sample_ids, len(self))
        names = list(self._specs) if columns is None else check_columns(columns, self.fields)
        self.files.check_open(at_intervals=True)
        specs = {name: self._specs[name] for name in names}
        keys, parts = self._parts(ids, [*{spec.extension: 0 for spec in specs.values() if spec.extension}])
        out: dict[str, Column] = {}
        sounds: dict[str, list[Any]] = {}
        for name, spec in specs.items():
            out[name] = self._column(spec, keys, parts.get(spec.extension, []), sounds)
        return Columns(out, len(ids))

    def _parts(self, ids: Int64, extensions: Sequence[str]) -> tuple[list[Part], dict[str, list[Part]]]:
        """Where the members of some samples lie; and the samples themselves, by shard."""
        samples: list[Part] = []
        parts: dict[str, list[Part]] = {extension: [] for extension in extensions}
        nowhere = np.empty(0, np.int64)
        for number, rows, slots in self._rows.places(ids):
            shard = self._shards.open(number)
            samples.append(Part(shard, rows, slots, nowhere, nowhere))
            for extension, some in parts.items():
                starts, sizes = shard.index.locate(extension, rows)
                if number in self._shards.lazy and (sizes < 0).any():
                    raise lacks(self._shards, number, int(rows[sizes < 0][0]), extension)
                some.append(Part(shard, rows, slots, starts, sizes))
        return samples, parts

    def _column(self, spec: Spec, keys: list[Part], parts: list[Part], sounds: dict[str, list[Any]]) -> Column:
        extension, decoder, field = spec.extension, spec.decoder, spec.field
        if spec.role == "key":
            runs = [(*part.shard.index.key_runs(part.rows), part.slots) for part in keys]
            return Bytes([RowSlices(*run) for run in runs], text=True)
        if spec.role == "valid":
            return Dense.of(_in_order(parts) >= 0)
        if decoder.decode is None:
            return plain_column(parts, extension, decoder)
        if decoder.kind == "audio":
            if extension not in sounds:
                sounds[extension] = read_values(parts, extension, decoder.decode)
            which = 0 if spec.role == "member" else 1
            nothing = None if which == 0 else 0
            values = [nothing if value is None else value[which] for value in sounds[extension]]
            return column_of_values(field, values, parts, extension)
        if extension in self._arrays:
            column = self._arrays[extension].column(parts)
            if column is not None:
                return column
        return column_of_values(field, read_values(parts, extension, decoder.decode), parts, extension)

    def shards_of(self, sample_ids: npt.ArrayLike) -> list[str]:
        """The path of the shard that each sample lies in."""
        numbers = self._rows.starts.searchsorted(check_ids(sample_ids, len(self)), side="right") - 1
        return [self._shards.paths[number] for number in numbers.tolist()]

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """Have the kernel read samples ahead, where the shards are larger than what stays in memory.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: taken for all: the members of a sample lie side by side.
        """
        if not self._shards.exceeds or not hasattr(os, "posix_fadvise"):
            return
        if self._unasked:
            self._unasked -= 1
            return
        cached = True
        for number, rows, _ in self._rows.places(check_ids(sample_ids, len(self))):
            shard = self._shards.open(number)
            offsets = shard.index.offsets
            if not len(rows) or shard.file.is_cached(int(offsets[rows[0]])):
                continue  # and so, most likely, are the others: a hint for each would cost more than it brings
            cached = False
            for first, last in zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True):
                os.posix_fadvise(shard.file.handle, first, last - first, os.POSIX_FADV_WILLNEED)
        self._unasked = _UNASKED if cached else 0


def _in_order(parts: list[Part]) -> Int64:
    """The members' sizes in the order of the batch."""
    out = np.empty(sum(len(part.rows) for part in parts), np.int64)
    for part in parts:
        out[slice(None) if part.slots is None else part.slots] = part.sizes
    return out


def _absolute(where: Paths) -> Paths:
    """Whoever changes the working directory later still reads the same."""
    if isinstance(where, (str, os.PathLike)):
        return os.path.abspath(where)
    return [os.path.abspath(each) for each in where]


def _reopen(where: Paths, options: dict[str, Any], fingerprint: str, files: DataFiles) -> WebDatasetSource:
    source = WebDatasetSource(where, **options, files=files)
    if source.fingerprint != fingerprint:
        raise SourceError(
            "shards were added, removed or changed while they were in use",
            where=where,
            remedy="start the job again",
        )
    return source


def _fits(where: Paths) -> bool:
    if is_one(where):
        path = os.fspath(where)  # type: ignore[arg-type]
        if os.path.isdir(path):
            return is_energon(path) or bool(tars_in(path))
        if is_wids(path):
            return True
    paths = matched(where)
    return bool(paths) and all(
        looks_like_tar(path) or (os.path.isdir(path) and bool(tars_in(path))) for path in paths[:1]
    )


FORMAT = Format("webdataset", "WebDataset tar shards (.tar)", _fits, WebDatasetSource)
