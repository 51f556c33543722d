"""The formats of data: how each is detected from names and first bytes of files, and what reads it.

Readers are named by their modules, and imported when data are opened: detection needs no library.
"""

import json
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from rankfeed._util.validate import check_choice, check_optional
from rankfeed.errors import SourceError
from rankfeed.sources.paths import Paths, expand, files_at, files_in, head, is_side_file, walk
from rankfeed.sources.tar.headers import BLOCK, is_header
from rankfeed.storage.manifest import MANIFEST_NAME

ARROW_SUFFIXES = (".arrow", ".arrows", ".feather", ".ipc")
NUMPY_SUFFIXES = (".npy", ".npz")
PARQUET_SUFFIXES = (".parquet", ".parq", ".pqt", ".pq")
#: Names of tar files, compressed or not.
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")

#: First bytes of a Parquet file, and of an encrypted one.
PARQUET_MAGIC, PARQUET_ENCRYPTED = b"PAR1", b"PARE"
#: Lists of the row groups of other Parquet files.
PARQUET_SUMMARIES = ("_metadata", "_common_metadata")
#: Files of a folder that are looked at to detect Parquet files.
_MAX_PARQUET_FILES = 2_000

#: Written by `save_to_disk` of Hugging Face datasets.
HF_STATE_NAME, HF_INFO_NAME, HF_DICT_NAME = "state.json", "dataset_info.json", "dataset_dict.json"
#: The index of an MDS directory.
MDS_INDEX_NAME = "index.json"
#: The directory in which Energon describes a dataset.
ENERGON_FOLDER = ".nv-meta"

#: Written by PyTorch Geometric beside the graphs.
_PYG_SIDE_FILES = ("pre_transform.pt", "pre_filter.pt")
_ZIP_MAGIC = b"PK\x03\x04"

TextKind = Literal["csv", "jsonl"]
_TEXT_SUFFIXES: dict[TextKind, tuple[str, ...]] = {
    "csv": (".csv", ".tsv"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
}
#: A byte order mark before UTF-8.
BOM = b"\xef\xbb\xbf"
#: Bytes at the start of a text that are looked at.
_PROBED_BYTES = 1 << 16


def _is_arrow(paths: list[str]) -> bool:
    """Whether these are Arrow IPC files or streams, or folders of them."""
    try:
        files = files_at(paths, ARROW_SUFFIXES)
    except SourceError:  # a folder without any
        return False
    # A folder of Hugging Face datasets lists its files itself.
    is_dataset = any(os.path.isfile(os.path.join(path, HF_STATE_NAME)) for path in paths)
    return not is_dataset and all(_is_arrow_file(path) for path in (files[0], files[-1]))


def _is_arrow_file(path: str) -> bool:
    start = head(path, 16)
    if start.startswith(b"ARROW1"):
        return True
    # A stream: continuation marker, then the small length of the metadata.
    return len(start) == 16 and start[:4] == b"\xff" * 4 and 0 < int.from_bytes(start[4:8], "little") < 1 << 28


def _is_saved_to_disk(paths: list[str]) -> bool:
    has_state = all(os.path.isfile(os.path.join(paths[0], name)) for name in (HF_STATE_NAME, HF_INFO_NAME))
    return has_state or os.path.isfile(os.path.join(paths[0], HF_DICT_NAME))


def _is_numpy(paths: list[str]) -> bool:
    """Whether these are `.npy` or `.npz` files, or a directory with some, also in subdirectories."""
    if len(paths) > 1 or not os.path.isdir(paths[0]):
        return all(path.endswith(NUMPY_SUFFIXES) for path in paths)
    with os.scandir(paths[0]) as entries:
        names = [
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and entry.is_file() and not is_side_file(entry.path)
        ]
    return any(name.endswith(NUMPY_SUFFIXES) for name in names) if names else nested_array(paths[0]) is not None


def nested_array(root: str) -> str | None:
    """A `.npy` or `.npz` file in a subdirectory at any depth."""
    below = (os.path.join(parent, name) for parent, names in walk(root) if parent != root for name in names)
    return next((path for path in below if path.endswith(NUMPY_SUFFIXES)), None)


def _is_mds(paths: list[str]) -> bool:
    heads = [head(os.path.join(folder, MDS_INDEX_NAME), 4096) for folder in mds_folders(paths)]
    return all(start.lstrip()[:1] == b"{" and b'"shards"' in start for start in heads)


def mds_folders(where: Paths) -> list[str]:
    """The directories of MDS datasets, each given itself or by its index."""
    return [
        os.path.dirname(path) or "." if os.path.basename(path) == MDS_INDEX_NAME else path
        for path in expand(where)
    ]


def _is_webdataset(paths: list[str]) -> bool:
    """Whether these are tar shards, directories of them, or a description of them."""
    first = paths[0]
    if len(paths) == 1 and (is_energon(first) or is_wids(first)):
        return True
    if os.path.isdir(first):
        return bool(files_in(first, (".tar",)))
    return first.endswith(_TAR_SUFFIXES) or is_header(head(first, BLOCK))


def is_energon(where: str) -> bool:
    """Whether a directory was prepared by Energon."""
    return any(os.path.isfile(os.path.join(where, ENERGON_FOLDER, name)) for name in (".info.json", ".info.yaml"))


def is_wids(where: str) -> bool:
    """Whether a file is a wids descriptor."""
    return where.endswith(".json") and os.path.isfile(where) and b'"wids_version"' in head(where, 1 << 20)


def _is_parquet(paths: list[str]) -> bool:
    """Whether these are Parquet files or directories with some, by their names or first bytes."""
    return all(
        _has_parquet(path) if os.path.isdir(path) else is_parquet_file(path) for path in (paths[0], paths[-1])
    )


def is_parquet_file(path: str) -> bool:
    """Whether a file is a Parquet file, by its name or first bytes."""
    return path.endswith(PARQUET_SUFFIXES) or head(path, 4) in (PARQUET_MAGIC, PARQUET_ENCRYPTED)


def _has_parquet(folder: str) -> bool:
    """Whether there is a Parquet file among the first files at any depth."""
    files = islice(((parent, name) for parent, names in walk(folder) for name in names), _MAX_PARQUET_FILES)
    return any(
        is_parquet_file(os.path.join(parent, name))
        for parent, name in files
        if name in PARQUET_SUMMARIES or (name[0] != "_" and (name.endswith(PARQUET_SUFFIXES) or "." not in name))
    )


def _is_pyg(paths: list[str]) -> bool:
    path = Path(paths[0])
    if path.is_file():
        return path.suffix == ".pt" and head(path, 4) == _ZIP_MAGIC
    folder = processed_folder(path)
    return folder is not None and (bool(graph_files(folder)) or (folder / "sqlite.db").is_file())


def processed_folder(path: Path) -> Path | None:
    """The directory of processed graphs, if this is one or has one."""
    names = (*_PYG_SIDE_FILES, "data.pt", "sqlite.db")
    for folder in (path / "processed", path):
        if any((folder / name).is_file() for name in names):
            return folder
    return None


def graph_files(folder: Path) -> list[str]:
    """The files of graphs in a directory of processed graphs."""
    names = [path for path in files_in(folder, [".pt"]) if os.path.basename(path) not in _PYG_SIDE_FILES]
    return [path for path in names if head(path, 4) == _ZIP_MAGIC] or names


def text_kind(where: Paths) -> TextKind | None:
    """The kind of text files, by their names and first bytes; None for another format."""
    for kind in _TEXT_SUFFIXES:
        with suppress(SourceError):  # a directory with files of another kind
            paths = text_files(where, kind)
            if paths and all(_is_text_file(path, kind) for path in (paths[0], paths[-1])):
                return kind
    return None


def text_files(where: Paths, kind: TextKind) -> list[str]:
    """The text files; a directory may only contain files of this kind."""
    suffixes = tuple(suffix + end for suffix in _TEXT_SUFFIXES[kind] for end in ("", ".gz"))
    for path in expand(where):
        if os.path.isdir(path) and len(files_in(path, suffixes)) != len(files_in(path, ("",))):
            raise SourceError(
                f"the folder holds other files than {kind}", expected=", ".join(suffixes), where=path
            )
    return files_at(where, suffixes)


def _is_text_file(path: str, kind: TextKind) -> bool:
    name = path.removesuffix(".gz")
    if not name.endswith(_TEXT_SUFFIXES[kind]):
        return False
    start = head(path, _PROBED_BYTES)
    if path.endswith(".gz"):
        try:
            start = zlib.decompressobj(31).decompress(start, _PROBED_BYTES)
        except zlib.error:
            return False
    start = start.removeprefix(BOM)
    if b"\0" in start or not start.strip():
        return False
    if kind == "csv":
        return True
    lines = [line for line in start.split(b"\n") if line.strip()]
    if not lines[0].lstrip().startswith(b"{"):
        return False
    complete = lines if len(start) < _PROBED_BYTES else lines[:-1]
    if name.endswith(".json"):  # usually one document; JSON lines have an object in each line
        with suppress(ValueError, RecursionError):
            return len(complete) >= 2 and all(isinstance(json.loads(line), dict) for line in complete[:2])
        return False
    return not complete or b"wids-shard-index" not in complete[0]


@dataclass(frozen=True)
class Format:
    """A format that `rankfeed.open` knows."""

    description: str  # in error messages
    #: Whether data at paths, of which there is one or more, are in it; an OSError if there are no such files.
    is_format: Callable[[list[str]], bool]
    reader: str  # "module:function" of ``reader(where, *, columns=None, ...) -> Source``, imported when called
    is_single: bool = False  # whether the data are at a single path, not at a pattern or list


#: In the order of detection.
FORMATS = {
    "packed": Format(
        "a folder that rankfeed.write wrote",
        lambda paths: os.path.isfile(os.path.join(paths[0], MANIFEST_NAME)),
        "packed:PackedSource",
        is_single=True,
    ),
    "numpy": Format(".npy or .npz files", _is_numpy, "npy.layout:open_numpy"),
    "lance": Format(
        "a Lance table (a folder with _versions)",
        lambda paths: any(name.endswith(".manifest") for name in os.listdir(os.path.join(paths[0], "_versions"))),
        "lance.lance_source:LanceSource",
        is_single=True,
    ),
    "webdataset": Format("WebDataset tar shards (.tar)", _is_webdataset, "tar.tar_source:WebDatasetSource"),
    "parquet": Format("Parquet files (or a folder of them)", _is_parquet, "parquet.parquet_source:ParquetSource"),
    "huggingface": Format(
        "a folder of Hugging Face datasets (save_to_disk)",
        _is_saved_to_disk,
        "huggingface:HuggingFaceSource",
        is_single=True,
    ),
    "arrow": Format("Arrow IPC files or streams (.arrow, .feather)", _is_arrow, "arrow.arrow_source:ArrowSource"),
    "mds": Format("an MDS folder of MosaicML Streaming (with index.json)", _is_mds, "mds.mds_source:MdsSource"),
    "pyg": Format(
        "a dataset that PyTorch Geometric saved (processed/data.pt)",
        _is_pyg,
        "pyg.pyg_source:PyGFileSource",
        is_single=True,
    ),
    "csv": Format("CSV files", lambda paths: text_kind(paths) == "csv", "text.text_source:CsvSource"),
    "jsonl": Format(
        "files with a JSON object in each line",
        lambda paths: text_kind(paths) == "jsonl",
        "text.text_source:JsonlSource",
    ),
}


def detect_format(where: Paths, format: str | None = None) -> str | None:
    """The name of the format of data, ``format`` itself if they are in it; None if they are in no such format."""
    check_format(format)
    return fitting_format(where, expand(where), format)


def check_format(format: str | None) -> None:
    """Refuse what is no name of a format, before paths are looked at."""
    check_optional(check_choice, "format", format, choices=tuple(FORMATS))


def fitting_format(where: Paths, paths: list[str], format: str | None) -> str | None:
    """The same, of data whose paths are given."""
    for name in FORMATS if format is None else [format]:
        if not paths or (FORMATS[name].is_single and paths != [where]):
            continue
        with suppress(OSError):
            if FORMATS[name].is_format(paths):
                return name
    return None
