"""Every format, written by its own library and read back by it: what a source has to give, sample for sample.

One set of samples goes into each format as far as the format can hold it, in several files (fragments, row groups,
shards) of unequal sizes. What is expected of a source is never the samples in memory but what the format's own
reader says of the files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tests.sources import libraries as own
from tests.sources.all_types import table_of_all_types
from tests.sources.rows import COUNT, Samples, samples
from tests.support.tables import write_table

import rankfeed as rf


@dataclass(frozen=True)
class Format:
    """How one is written, read by its own library, and opened by rankfeed.

    Args:
        write: writes samples into a folder that is empty.
        read: what the format's own reader gives.
        where: what to open in the folder; "" for the folder itself.
        append: adds samples to what is there; None writes the folder again with more.
        opened: opens it in another way than ``rf.open(folder / where)``.
        leaves: patterns of the files that a source may leave beside the data.
    """

    write: Callable[[Path, Samples], Any]
    read: Callable[[Path], Samples]
    where: str = ""
    append: Callable[[Path, Samples], Any] | None = None
    opened: Callable[[Path], rf.Source] | None = None
    leaves: Sequence[str] = ()


@dataclass(frozen=True)
class Written:
    """A data set of one format, and what its own library reads from it."""

    name: str
    folder: Path
    expected: Samples = field(repr=False)

    def open(self, folder: Path | None = None, **options: Any) -> Any:
        return open_as(self.name, folder or self.folder, **options)


def open_as(name: str, folder: Path, **options: Any) -> Any:
    """A folder that `make` filled, as a source."""
    how = format_of(name)
    return how.opened(folder) if how.opened else rf.open(f"{folder}/{how.where}".rstrip("/"), **options)


@cache
def _originals() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="rankfeed-formats-")


@cache
def _original(name: str) -> Written:
    """A dataset that is written once a process, by its format's own library, and read back by that."""
    folder = Path(_originals().name, name)
    folder.mkdir()
    format_of(name).write(folder, samples())
    return Written(name, folder, format_of(name).read(folder))


def make(name: str, folder: Path) -> Written:
    """A copy of the dataset of a format in a new folder, and what the format's own library reads from it."""
    shutil.copytree(_original(name).folder, folder)
    return Written(name, folder, _original(name).expected)


def format_of(name: str) -> Format:
    return FORMATS[name] if name in FORMATS else VARIANTS[name]


def grow(name: str, folder: Path) -> None:
    """Append seven samples, or where a format cannot, write it again with seven more."""
    more = samples(COUNT + 7)
    append = FORMATS[name].append
    if append is not None:
        append(folder, more[COUNT:])
        return
    shutil.rmtree(folder)
    folder.mkdir()
    FORMATS[name].write(folder, more)


def _halves(folder: Path) -> rf.Source:
    return rf.concat([rf.open(folder / "0.arrow"), rf.open(folder / "1.arrow")])


def _chosen(folder: Path) -> rf.Source:
    return rf.open(f"{folder}/*.arrow").select(range(COUNT - 1, -1, -1))


def _arrow(suffix: str, stream: bool = False, compression: str | None = None, **options: Any) -> Format:
    write = own.arrow_writer(suffix, stream, compression)
    return Format(write, own.arrow_reader(suffix, stream), f"*{suffix}", **options)


_INDEXES = ("*.tar.rankfeed", ".rankfeed-index.lock")

FORMATS: dict[str, Format] = {
    "lance": Format(own.write_lance, own.read_lance, "data.lance", own.append_lance),
    "webdataset": Format(
        own.tar_writer(own.arrays_of),
        own.read_tar,
        "*.tar",
        own.tar_writer(own.arrays_of, first=5),
        leaves=_INDEXES,
    ),
    "parquet": Format(own.write_hive, own.read_hive, "", own.append_hive),
    "parquet_checksums": Format(
        own.write_parquet, lambda folder: own.rows_of(own.pq.read_table(folder / "data.parquet")), "data.parquet"
    ),
    "arrow_file": _arrow(".arrow"),
    "arrow_file_lz4": _arrow(".feather", compression="lz4"),
    "arrow_stream": _arrow(".arrows", stream=True),
    "arrow_stream_zstd": _arrow(".arrows", stream=True, compression="zstd"),
    "huggingface": Format(own.write_hf, own.read_hf, "saved"),
    "mds": Format(own.mds_writer(None), own.read_mds, "mds"),
    "mds_zstd": Format(own.mds_writer("zstd"), own.read_mds, "mds"),
    "csv": Format(own.write_csv, own.read_csv, "*.csv"),
    "jsonl": Format(own.write_jsonl, own.read_jsonl, "*.jsonl"),
    "packed": Format(own.write_packed, own.read_packed, "packed"),
    "npz": Format(own.write_npz, own.read_npz),
    "npy": Format(
        own.write_npy, lambda folder: [{"array": row} for row in np.load(folder / "rows.npy")], "rows.npy"
    ),
    "concat": _arrow(".arrow", opened=_halves),
    "select": Format(
        own.arrow_writer(".arrow", False, None),
        lambda folder: own.arrow_reader(".arrow", False)(folder)[COUNT - 1 :: -1],
        opened=_chosen,
    ),
    "pyg": Format(own.write_graphs, own.read_graphs),
    "pyg_dataset": Format(
        own.write_graphs, own.read_graphs, opened=lambda folder: rf.from_dataset(own.graphs(folder))
    ),
}


#: Formats that are opened by a path.
BY_PATH = [name for name, form in FORMATS.items() if form.opened is None]


def _decompressed(folder: Path) -> rf.Source:
    return rf.open(f"{folder}/*.tar.gz", decompress=True, cache_dir=folder / "cache")


def read_types(folder: Path) -> Samples:
    (path,) = folder.iterdir()
    return list(rf.open(path))


#: Other ways to write the same formats: read by the same code for the most part, damaged by the fuzzing campaign.
VARIANTS: dict[str, Format] = {
    "npy_fortran": Format(
        own.write_npy_fortran,
        lambda folder: [{"array": row.astype("=f8")} for row in np.load(folder / "rows.npy")],
        "rows.npy",
    ),
    "npz_rows": Format(own.write_npz_rows, own.read_npz_rows, "rows.npz"),
    "parquet_lz4": Format(own.write_parquet_lz4, own.read_parquet, "data.parquet"),
    "parquet_lz4_checksums": Format(
        lambda folder, rows: own.write_parquet_lz4(
            folder, rows, write_page_checksum=True, data_page_version="2.0"
        ),
        own.read_parquet,
        "data.parquet",
    ),
    "arrow_stream_lz4": _arrow(".arrows", stream=True, compression="lz4"),
    "arrow_dictionaries_lz4": Format(own.write_dictionaries, own.arrow_reader(".arrows", True), "*.arrows"),
    "tar_images": Format(own.tar_writer(own.images_of), own.read_tar_images, "*.tar", leaves=_INDEXES),
    "tar_sounds": Format(own.tar_writer(own.sounds_of), own.read_tar_sounds, "*.tar", leaves=_INDEXES),
    "tar_gz": Format(
        own.tar_writer(own.arrays_of, suffix=".tar.gz"),
        lambda folder: own.read_tar(folder, "*.tar.gz"),
        opened=_decompressed,
    ),
    # Of every type: read by rankfeed itself, as `tests/sources/arrow` compares these with what pyarrow reads.
    "arrow_types": Format(
        lambda folder, rows: write_table(table_of_all_types(30), folder / "0.arrow", rows=9), read_types, "0.arrow"
    ),
    "parquet_types": Format(
        lambda folder, rows: write_table(table_of_all_types(30), folder / "0.parquet", row_group_size=9),
        read_types,
        "0.parquet",
    ),
    "huggingface_files": Format(own.write_hf_files, own.read_hf_files, "saved"),
    "mds_images": Format(own.write_mds_images, own.read_mds, "mds"),
}
