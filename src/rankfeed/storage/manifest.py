"""The manifest of a written dataset, ``rankfeed.json``: its structs, and reading it; the writer writes it last.

It is untrusted input: decoded into typed structs, then checked.
"""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.commit import decodable
from rankfeed.storage.file_errors import os_errors
from rankfeed.storage.untrusted import check_data_name

#: A directory with a file of this name is a written dataset.
MANIFEST_NAME = "rankfeed.json"
#: Directory of an unfinished `rankfeed.write` in its target.
STAGING_NAME = ".rankfeed-write"
#: The file of a shard, by its number; names sort in the order of the shards.
SHARD_NAME = "shard-{:05d}.arrow"
VERSION = 1

_MAX = (1 << 63) - 1
Count = Annotated[int, msgspec.Meta(ge=1, le=_MAX)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


@decodable
class ShardInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard in the manifest."""

    path: Annotated[str, msgspec.Meta(min_length=1)]  # relative to the manifest, with forward slashes
    rows: Count
    bytes: Count
    xxh3: Digest  # of the file, XXH3 with 128 bits
    block_rows: Count  # rows per block, which is read in one piece; the last block may be smaller
    content: Digest  # of the rows, independent of how they are stored


@decodable
class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of a written dataset."""

    num_rows: Count
    fields: dict[str, Field]
    shards: list[ShardInfo]  # in the order of sample ids
    origin: str = ""  # digest of the input and parameters it was written from; empty if the input has no identity
    logical_types: dict[str, str] | UnsetType = UNSET  # those of the source; none in files of earlier versions
    format: Literal["rankfeed-packed"] = "rankfeed-packed"
    version: int = VERSION

    def encode(self) -> bytes:
        """Indented JSON; the same bytes for the same content."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @property
    def fingerprint(self) -> str:
        """Changes with counts, schema and checksums, not with the path of the dataset."""
        return digest_of(msgspec.json.encode((self.num_rows, self.fields, self.shards)))


@decodable
class _Head(msgspec.Struct):
    """Decoded first, so that another version is reported as such and not as damage."""

    format: str
    version: int


def load_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of a dataset; raises SourceError, CorruptError or UnsafeError."""
    path = Path(folder, MANIFEST_NAME)
    with os_errors(SourceError, "the manifest cannot be read", path):
        content = path.read_bytes()
    remedy = "restore the file, or write the dataset again"
    try:
        head = msgspec.json.decode(content, type=_Head)
        if head.format == "rankfeed-packed" and head.version != VERSION:
            raise SourceError(
                "the version of the dataset is not supported",
                expected=f"version {VERSION}",
                found=f"version {head.version}",
                where=path,
                remedy="install a newer rankfeed" if head.version > VERSION else "write it again",
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError("the manifest is damaged", found=error, where=path, remedy=remedy) from error
    if (problem := _problem(manifest)) is not None:
        raise CorruptError("the manifest contradicts itself", found=problem, where=path, remedy=remedy)
    for shard in manifest.shards:
        check_data_name(shard.path, path)
    return manifest


def _problem(manifest: Manifest) -> str | None:
    if not manifest.shards or not manifest.fields:
        return "no shards" if manifest.fields else "no fields"
    if (total := sum(shard.rows for shard in manifest.shards)) != manifest.num_rows:
        return f"num_rows is {manifest.num_rows}, the shards have {total} rows"
    if len({os.path.normpath(shard.path) for shard in manifest.shards}) < len(manifest.shards):
        return "a shard is listed twice"
    for shard in manifest.shards:
        if shard.rows > shard.bytes:  # a row has at least one byte
            return f"{shard.path} has {shard.rows} rows in {shard.bytes} bytes"
    for name, field in manifest.fields.items():
        if not _is_storable(field):
            return f"field {name!r}: {field!r:.80} cannot be stored"
    return None


def _is_storable(field: Field) -> bool:
    with suppress(ArgumentError, ValueError):  # no text has other dtypes; integers may be too long for one
        is_known = field.kind != "object" and Field.of(str(field)) == field
        return is_known and 0 not in field.shape and math.prod(field.shape) <= _MAX
    return False
