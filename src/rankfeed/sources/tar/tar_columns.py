"""The columns of tar shards: which there are, and their values, as pointers into the mapped files or decoded."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from rankfeed._util.validate import check_names, invalid
from rankfeed.columns.columns import Column, Dense, Objects, column_from_parts, make_column
from rankfeed.columns.field import Field
from rankfeed.columns.layout import Mismatch, flat_fields, infer_layout, resolve_dtypes
from rankfeed.columns.pointers import RowPointers
from rankfeed.errors import ArgumentError, RankfeedError, SourceError, UnsafeError, safe_repr
from rankfeed.sources.npy.arrays import check_size, read_header
from rankfeed.sources.scattered import ByteSlices, decode_each, place_of, undecodable
from rankfeed.sources.source import Int64, check_columns
from rankfeed.sources.tar.decoders import Decoder, decoder_of
from rankfeed.sources.tar.shards import Missing, Shard, ShardSet
from rankfeed.sources.tar.tar_index import first_dot_remedy

#: The column of the samples' keys.
KEY = "__key__"
#: Appended to the name of an audio column for the column of frames per second, and to a name for its mask.
_RATE, _VALID = ".rate", "_valid"
#: With more extensions, keys probably contain dots.
_MAX_EXTENSIONS = 1000
#: Bytes of a `.npy` member before its elements, unless shapes or field names are long.
_HEAD_BYTES = 128
_MAX_HEADERS = 1 << 14

Decode = bool | Callable[[str, bytes], Any] | Mapping[str, Any]


def _unlike_others(extension: str, field: Field, actual: object, part: ByteSlices, row: int) -> SourceError:
    return SourceError(
        "a member is unlike the others of its column",
        expected=field,
        found=actual,
        where=place_of(part, row),
        remedy=f'pass decode={{{extension!r}: "object"}} to have each as it is, or give a decoder that '
        "makes them alike",
    )


class SampleBatch:
    """Some samples, whose members are located and decoded when a column needs them."""

    def __init__(self, shards: ShardSet, ids: Int64) -> None:
        self._shards, self._ids = shards, ids
        self._members: dict[str, list[ByteSlices]] = {}
        self._values: dict[str, list[Any]] = {}

    @cached_property
    def places(self) -> list[tuple[Shard, Int64, Int64 | None]]:
        """The samples by shard: rows in it, and positions in the batch (None for all)."""
        return list(self._shards.places(self._ids))

    def members(self, extension: str) -> list[ByteSlices]:
        """The members of one extension, by shard; of length -1 for a sample without one."""

        def place(shard: Shard, rows: Int64, starts: Int64, row: int) -> str:
            key = shard.index.key(int(rows[row]))
            return f"{shard.path}, sample {key!r}, .{extension} at offset {starts[row]}"

        if extension not in self._members:
            members = self._members[extension] = []
            for shard, rows, slots in self.places:
                starts, sizes = shard.index.locate(extension, rows)
                members.append(ByteSlices(shard.memory, starts, sizes, slots, partial(place, shard, rows, starts)))
        return self._members[extension]

    def values(self, extension: str, decode: Callable[[bytes], Any]) -> list[Any]:
        """Decoded members of one extension; None for a sample without one."""
        if extension not in self._values:
            decoded: list[Any] = [None] * len(self._ids)
            for part in self.members(extension):
                for slot, value in zip(part.positions.tolist(), decode_each(part, decode), strict=True):
                    decoded[slot] = value
            self._values[extension] = decoded
        return self._values[extension]


def _column_of_values(field: Field, values: list[Any], extension: str, members: list[ByteSlices]) -> Column:
    """A column of decoded values, None for a missing member; a SourceError if a value does not fit."""
    if field.kind == "object":
        return Objects(values)
    shape = (0, *field.shape) if field.kind == "ragged" else field.shape
    missing: Any = {"str": "", "bytes": b""}.get(field.kind, np.zeros(shape, field.dtype or None))
    try:
        return make_column(extension, [missing if value is None else value for value in values], field)
    except Mismatch as error:
        part = next(member for member in members if error.row in member.positions)
        row = part.positions.tolist().index(error.row)
        raise _unlike_others(extension, field, error.found, part, row) from error


class NpyReader:
    """Reads `.npy` members of one extension in place; ``field`` is dense or ragged."""

    def __init__(self, extension: str, field: Field) -> None:
        self._extension, self._field = extension, field
        self._row_bytes = field.row_bytes()
        #: By the first bytes of a member: offset of its elements, rows, end, and whether it is readable in place.
        self._layouts: dict[bytes, tuple[int, int, int, bool]] = {}

    def column(self, members: Sequence[ByteSlices]) -> Column | None:
        """A column that points into the shards; None if that is not possible (other byte order, no elements)."""
        parts = []
        for part in members:
            if not self._row_bytes or (part.lengths < _HEAD_BYTES).any():
                return None
            layouts = np.array(self._layouts_of(part), np.int64).reshape(-1, 4)
            if not layouts[:, 3].all():
                return None
            rows = layouts[:, 1] if self._field.kind == "ragged" else np.ones(len(layouts), np.int64)
            content = part._replace(starts=part.starts + layouts[:, 0], lengths=rows * self._row_bytes)
            parts.append(content.pointers(self._row_bytes))
        if not any(map(len, parts)):
            return None
        return column_from_parts(self._field, parts, [part.slots for part in members])

    def _layouts_of(self, part: ByteSlices) -> list[tuple[int, int, int, bool]]:
        out = []
        data: Any = part.data.data
        for row, (start, size) in enumerate(zip(part.starts.tolist(), part.lengths.tolist(), strict=True)):
            head = bytes(data[start : start + _HEAD_BYTES])
            layout = self._layouts.get(head)
            if layout is None or layout[2] > size:
                try:
                    header = read_header(io.BytesIO(data[start : start + min(size, 1 << 20)]), "")
                    check_size(header, size, "")
                except RankfeedError as error:
                    raise undecodable(error, part, row) from error
                if not header.fits(self._field):
                    raise _unlike_others(self._extension, self._field, header, part, row)
                in_place = header.dtype.isnative and not (header.fortran and len(header.shape) > 1)
                rows = header.shape[0] if header.shape else 1
                layout = header.offset, rows, header.offset + header.nbytes, in_place
                if header.offset <= _HEAD_BYTES and len(self._layouts) < _MAX_HEADERS:
                    self._layouts[head] = layout
            out.append(layout)
        return out


@dataclass(frozen=True)
class ColumnSpec:
    """A column of the members of an extension, of the rates or the presence of these, or of the keys."""

    extension: str
    field: Field
    decoder: Decoder
    role: Literal["member", "rate", "valid", "key"] = "member"
    npy: NpyReader | None = None  #: reads the members in place

    def read(self, batch: SampleBatch) -> Column:
        """The column of some samples."""
        if self.role == "key":
            keys = [RowPointers.into(*shard.index.key_runs(rows)) for shard, rows, _ in batch.places]
            return column_from_parts(Field("str"), keys, [slots for _, _, slots in batch.places])
        members, decode = batch.members(self.extension), self.decoder.decode
        if self.role == "valid":
            valid = np.empty(sum(len(part.starts) for part in members), np.bool_)
            for part in members:
                valid[part.positions] = part.lengths >= 0
            return Dense.of(valid)
        if decode is None:
            content = [part.pointers() for part in members]
            field = Field("str" if self.decoder.kind == "text" else "bytes")
            return column_from_parts(field, content, [part.slots for part in members])
        if self.npy is not None and (column := self.npy.column(members)) is not None:
            return column
        values = batch.values(self.extension, decode)
        if self.decoder.kind == "audio":
            values = [value and value[self.role == "rate"] for value in values]
        return _column_of_values(self.field, values, self.extension, members)


def _check_decode(decode: Decode, extensions: Sequence[str]) -> None:
    if not isinstance(decode, (bool, Mapping)) and not callable(decode):
        raise invalid(
            "decode",
            "True, False, a function, or a dict by extension",
            decode,
            "leave it out: images become uint8 arrays; for other forms, pass a function of (extension, bytes)",
        )
    for name, choice in decode.items() if isinstance(decode, Mapping) else ():
        if not any(name in (extension, extension.rpartition(".")[2]) for extension in extensions):
            raise ArgumentError(
                "decode names an extension that no sample has",
                expected="some of " + ", ".join(extensions),
                found=safe_repr(name),
            )
        if not (isinstance(choice, bool) or callable(choice) or choice in ("object", "dense", "ragged")):
            expected = 'True, False (bytes), a function of bytes, "object", "dense" or "ragged"'
            raise invalid(f"decode for {name!r}", expected, choice)


def _decoder_for(extension: str, decode: Decode, allow_pickle: bool) -> tuple[Decoder, str | None]:
    """The decoder of an extension, and the kind of column if ``decode`` names one."""
    if callable(decode):
        return Decoder("value", partial(decode, extension)), None
    choice: Any = decode
    if isinstance(decode, Mapping):
        choice = decode.get(extension, decode.get(extension.rpartition(".")[2], True))
    if choice is False:
        return Decoder("bytes", None, Field("bytes")), None
    if callable(choice):
        return Decoder("value", choice), None
    standard = decoder_of(extension, allow_pickle=allow_pickle)
    if not isinstance(choice, str) or standard.decode is None:
        return standard, None
    return replace(standard, field=Field("object") if choice == "object" else None), choice


def schema_of(
    shards: ShardSet,
    wanted: Sequence[str] | None,
    probe: SampleBatch,
    *,
    decode: Decode,
    missing: Missing,
    allow_pickle: bool,
) -> dict[str, ColumnSpec]:
    """The wanted columns (None for all) by name; their fields are learned from some samples."""
    extensions = list(shards.extensions)
    _check_decode(decode, extensions)
    if wanted is None and len(extensions) > _MAX_EXTENSIONS:
        raise SourceError(
            "too many different extensions to be columns",
            expected=f"at most {_MAX_EXTENSIONS}",
            found=f"{len(extensions)}: " + ", ".join(map(repr, extensions[:4])),
            where=shards.paths[0],
            remedy=first_dot_remedy(extensions, "give columns="),
        )
    names = {*extensions} if wanted is None else {*check_names("columns", wanted)}
    samples = sum(summary.samples for summary in shards.summaries)
    chosen = [extension for extension in extensions if {extension, extension + _RATE, extension + _VALID} & names]
    specs = {KEY: ColumnSpec("", Field("str"), Decoder("text"), "key")}
    for name in chosen:
        decoder, kind = _decoder_for(name, decode, allow_pickle)
        if decoder.kind == "pickle" and not allow_pickle:
            raise UnsafeError(
                f"a .{name} member is a pickle or may hold one: reading it runs code that it contains",
                where=shards.paths[0],
                remedy=f"leave the column out with columns=, take its bytes with decode={{{name!r}: False}}, "
                "or pass allow_pickle=True if you trust its author",
            )
        added: dict[str, ColumnSpec] = {}
        if decoder.kind == "audio":
            added[name + _RATE] = ColumnSpec(name, Field("dense", "int64"), decoder, "rate")
        if missing == "mask" and shards.extensions[name] < samples:
            added[name + _VALID] = ColumnSpec(name, Field("dense", "bool"), decoder, "valid")
        for column in added:
            if column in chosen:
                raise SourceError(
                    f"members .{column} have the name of a column that is added",
                    where=shards.paths[0],
                    remedy="choose columns= without either of them, or rename the members",
                )
        field = decoder.field or _probed_field(shards, name, decoder, kind, probe)
        npy = NpyReader(name, field) if decoder.kind == "npy" and field.kind in ("dense", "ragged") else None
        specs |= {name: ColumnSpec(name, field, decoder, npy=npy), **added}
    columns = {**dict.fromkeys(extensions), **specs}
    longer = [name for name in extensions if name.endswith(tuple(f".{column}" for column in wanted or ()))]
    remedy = first_dot_remedy(longer, "request the extension as it is") if longer else None
    order = [*specs] if wanted is None else check_columns(wanted, columns, derived_of(specs), remedy=remedy)
    return {name: specs[name] for name in order}


def derived_of(specs: Mapping[str, ColumnSpec]) -> dict[str, list[str]]:
    """The columns of rates and masks, by the column of the members that they describe."""
    derived: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if spec.role in ("rate", "valid"):
            derived.setdefault(spec.extension, []).append(name)
    return derived


def _probed_field(
    shards: ShardSet, extension: str, decoder: Decoder, kind: str | None, probe: SampleBatch
) -> Field:
    """The field of a column, from a few of its members and the sizes of all."""
    assert decoder.decode is not None
    values = [value for value in probe.values(extension, decoder.decode) if value is not None]
    if not values:
        return Field("object")
    if decoder.kind == "audio":
        values, kind = [samples for samples, _ in values], kind or "ragged"
    entries = [entry for summary in shards.summaries for entry in summary.extensions if entry.name == extension]
    sizes = {size for entry in entries for size in (entry.smallest, entry.largest)}
    is_ragged = kind == "ragged" or (kind is None and decoder.kind == "npy" and len(sizes) > 1)
    declared = {extension: Field("ragged")} if is_ragged else None
    try:
        fields = flat_fields(resolve_dtypes(infer_layout([{extension: value} for value in values], declared)))
    except ArgumentError:  # the values have nothing in common
        fields = None
    field = Field("object") if fields is None else fields[extension]
    if kind in ("dense", "ragged") and field.kind != kind and decoder.kind != "audio":
        shapes = sorted({str(np.shape(value)) for value in values})
        raise SourceError(
            f"members .{extension} do not form a {kind} column",
            expected=f"arrays that make one, as decode={{{extension!r}: {kind!r}}} says",
            found=", ".join(shapes[:4]),
            where=shards.paths[0],
            remedy=f'pass decode={{{extension!r}: "object"}}, or give a decoder that makes them alike',
        )
    return field
