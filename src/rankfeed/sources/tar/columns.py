"""The columns of tar shards: which there are, and their values, as pointers into the mapped files or decoded."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_names, invalid
from rankfeed.columns import (
    Bytes,
    Column,
    Dense,
    Field,
    Mismatch,
    Objects,
    Ragged,
    RowSlices,
    RowTake,
    as_array,
    make_column,
)
from rankfeed.errors import ArgumentError, CorruptError, MissingExtraError, RankfeedError, SourceError, safe_repr
from rankfeed.sources.npy.header import Header, check_size, read_header
from rankfeed.sources.source import check_columns, empty_column, with_where
from rankfeed.sources.tar.decoders import Decoder, decoder_of, pickle_refused
from rankfeed.sources.tar.shards import Missing, Shard, ShardSet

Int64 = npt.NDArray[np.int64]

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


class MembersInShard(NamedTuple):
    """The members of a batch that are in one shard."""

    shard: Shard
    rows: Int64  #: [m], rows of the samples in the shard
    slots: Int64 | None  #: positions of these rows in the batch; None for all, in order
    starts: Int64  #: [m], offset of each member
    sizes: Int64  #: [m], bytes of each; -1 if a sample has no such member

    def all_slots(self) -> Int64:
        """Positions of the rows in the batch."""
        return np.arange(len(self.rows)) if self.slots is None else self.slots


class Members:
    """The members of one extension of some samples."""

    def __init__(self, extension: str, parts: list[MembersInShard]) -> None:
        self.extension, self.parts = extension, parts

    def sizes(self) -> Int64:
        """Bytes of each member in the order of the batch; -1 for none."""
        out = np.empty(sum(len(part.rows) for part in self.parts), np.int64)
        for part in self.parts:
            out[part.all_slots()] = part.sizes
        return out

    def runs(self) -> list[RowSlices]:
        """The members as pointers into the shards."""
        return [
            RowSlices(part.shard.data, part.starts, np.maximum(part.sizes, 0), part.slots) for part in self.parts
        ]

    def values(self, decode: Callable[[bytes], Any]) -> list[Any]:
        """Decoded members in the order of the batch; None for a sample without one. Errors name the member."""
        out: list[Any] = [None] * sum(len(part.rows) for part in self.parts)
        for part in self.parts:
            members = zip(part.all_slots().tolist(), part.starts.tolist(), part.sizes.tolist(), strict=True)
            for slot, start, size in members:
                if size >= 0:
                    try:
                        out[slot] = decode(part.shard.read(start, size))
                    except MissingExtraError:
                        raise
                    except Exception as error:
                        raise self.error(error, slot) from error
        return out

    def error(self, error: Exception, slot: int) -> RankfeedError:
        """An error about a member, with the member."""
        where = self.extension
        for part in self.parts:
            for number in np.flatnonzero(part.all_slots() == slot).tolist():
                key = part.shard.index.key(int(part.rows[number]))
                where = f"{part.shard.path}, sample {key!r}, .{self.extension} at offset {part.starts[number]}"
        if isinstance(error, SourceError):
            return with_where(error, where)
        return CorruptError(
            "a member cannot be decoded",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            where=where,
            remedy="write the sample again; or take its bytes with decode=False",
        )

    def unlike_others(self, field: Field, found: object, slot: int) -> RankfeedError:
        """The error for a member that does not fit the field of its column."""
        error = SourceError(
            "a member is unlike the others of its column",
            expected=field,
            found=found,
            remedy=f'pass decode={{{self.extension!r}: "object"}} to have each as it is, or give a decoder that '
            "makes them alike",
        )
        return self.error(error, slot)


class MemberText(Bytes):
    """A column of text that names the member if one is not UTF-8."""

    def __init__(self, members: Members) -> None:
        super().__init__(members.runs(), text=True)
        self._members = members

    def rows(self) -> list[Any]:
        try:
            return super().rows()
        except CorruptError:
            self._members.values(bytes.decode)  # raises, and names the member
            raise


class SampleBatch:
    """Some samples, whose members are located and decoded when a column needs them."""

    def __init__(self, shards: ShardSet, ids: Int64) -> None:
        self._shards, self._ids = shards, ids
        self._members: dict[str, Members] = {}
        self._values: dict[str, list[Any]] = {}

    @cached_property
    def places(self) -> list[tuple[Shard, Int64, Int64 | None]]:
        """The samples by shard: rows in it, and positions in the batch (None for all)."""
        places = self._shards.places(self._ids)
        return [(self._shards.open(number), rows, slots) for number, rows, slots in places]

    def members(self, extension: str) -> Members:
        """The members of one extension."""
        if extension not in self._members:
            parts = [MembersInShard(*place, *place[0].index.locate(extension, place[1])) for place in self.places]
            self._members[extension] = Members(extension, parts)
        return self._members[extension]

    def values(self, extension: str, decode: Callable[[bytes], Any]) -> list[Any]:
        """Decoded members of one extension; None for a sample without one."""
        if extension not in self._values:
            self._values[extension] = self.members(extension).values(decode)
        return self._values[extension]


def field_of(values: Sequence[Any], *, ragged: bool, kind: str | None = None) -> Field:
    """The field of a column, from the values of some samples.

    ``ragged`` says that the first dimension varies, even if it does not in these values; ``kind`` is "dense" or
    "ragged" if the user said so.

    Examples:
        >>> str(field_of([np.zeros((3, 2)), np.zeros((5, 2))], ragged=False))
        'float64[*, 2]'
        >>> str(field_of([np.zeros((3, 2)), np.zeros((3, 4))], ragged=False))
        'object'
    """
    if not values:
        return Field("object")
    for python_type, name in ((str, "str"), (bytes, "bytes")):
        if all(isinstance(value, python_type) for value in values):
            return Field(name)  # type: ignore[arg-type]
    try:
        arrays = [as_array("", value) for value in values]
        dtype = np.result_type(*{array.dtype for array in arrays})
    except (ArgumentError, TypeError):
        return Field("object")
    shapes = {array.shape for array in arrays}
    first = arrays[0].shape
    if len({(len(shape), shape[1:]) for shape in shapes}) > 1:
        return Field("object")
    varies = kind == "ragged" or (kind is None and (ragged or len(shapes) > 1))
    return Field("ragged", dtype.name, first[1:]) if varies and first else Field("dense", dtype.name, first)


def column_of_values(field: Field, values: list[Any], members: Members) -> Column:
    """A column of decoded values, None for a missing member; a SourceError if a value does not fit."""
    if field.kind == "object":
        return Objects(values)
    if not values:
        return empty_column(field)
    shape = (0, *field.shape) if field.kind == "ragged" else field.shape
    missing: Any = {"str": "", "bytes": b""}.get(field.kind, np.zeros(shape, field.dtype or None))
    try:
        return make_column(members.extension, [missing if each is None else each for each in values], field)
    except Mismatch as error:
        raise members.unlike_others(field, error.found, error.row) from error


class NpyReader:
    """Reads `.npy` members of one extension in place; ``field`` is dense or ragged.

    Members begin at multiples of 512 bytes and their elements 128 bytes later, so rows of a column are not rows of
    one array. But all rows at the same remainder of the row size are rows of one view, so a batch is split by
    remainders.
    """

    def __init__(self, field: Field) -> None:
        self._field = field
        self._row_bytes = np.dtype(field.dtype).itemsize * math.prod(field.shape)
        #: By the first bytes of a member: offset of its elements, rows, offset of its end, and if it is readable
        #: in place.
        self._layouts: dict[bytes, tuple[int, int, int, bool]] = {}

    def column(self, members: Members) -> Dense | Ragged | None:
        """A column that points into the shards; None if that is not possible (other byte order, no elements)."""
        takes, slices = list[RowTake](), list[RowSlices]()
        for part in members.parts:
            if not self._row_bytes or (part.sizes < _HEAD_BYTES).any():
                return None
            found = np.array(self._layouts_of(part, members), np.int64).reshape(-1, 4)
            if not found[:, 3].all():
                return None
            begins, remainders = part.starts + found[:, 0], (part.starts + found[:, 0]) % self._row_bytes
            for remainder in np.unique(remainders).tolist():
                some = remainders == remainder
                slots = part.slots if some.all() else part.all_slots()[some]
                size = (len(part.shard.data) - remainder) // self._row_bytes * self._row_bytes
                rows = part.shard.data[remainder : remainder + size].view(self._field.dtype)
                rows = rows.reshape(-1, *self._field.shape)
                first = begins[some] // self._row_bytes
                takes.append(RowTake(rows, first, slots))
                slices.append(RowSlices(rows, first, found[some, 1], slots))
        if not takes:
            return None
        return Dense(takes) if self._field.kind == "dense" else Ragged(slices)

    def _layouts_of(self, part: MembersInShard, members: Members) -> list[tuple[int, int, int, bool]]:
        out = []
        data: Any = part.shard.data.data
        for number, (start, size) in enumerate(zip(part.starts.tolist(), part.sizes.tolist(), strict=True)):
            head = bytes(data[start : start + _HEAD_BYTES])
            layout = self._layouts.get(head)
            if layout is None or layout[2] > size:
                content, slot = part.shard.read(start, min(size, 1 << 20)), int(part.all_slots()[number])
                try:
                    header = read_header(io.BytesIO(content), "")
                    check_size(header, size, "")
                except RankfeedError as error:
                    raise members.error(error, slot) from error
                if not header.fits(self._field):
                    raise members.unlike_others(self._field, header, slot)
                layout = self._layout_of(header)
                if header.offset <= _HEAD_BYTES and len(self._layouts) < _MAX_HEADERS:
                    self._layouts[head] = layout
            out.append(layout)
        return out

    @staticmethod
    def _layout_of(header: Header) -> tuple[int, int, int, bool]:
        in_place = header.dtype.isnative and not (header.fortran and len(header.shape) > 1)
        rows = header.shape[0] if header.shape else 1
        return header.offset, rows, header.offset + header.nbytes, in_place


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
            keys = [RowSlices(*shard.index.key_runs(rows), slots) for shard, rows, slots in batch.places]
            return Bytes(keys, text=True)
        members, decode = batch.members(self.extension), self.decoder.decode
        if self.role == "valid":
            return Dense.of(members.sizes() >= 0)
        if decode is None:
            return MemberText(members) if self.decoder.kind == "text" else Bytes(members.runs())
        column = None if self.npy is None else self.npy.column(members)
        if column is not None:
            return column
        values = batch.values(self.extension, decode)
        if self.decoder.kind == "audio":
            values = [value and value[self.role == "rate"] for value in values]
        return column_of_values(self.field, values, members)


def _check_decode(decode: Decode, extensions: Sequence[str]) -> None:
    if not isinstance(decode, (bool, Mapping)) and not callable(decode):
        raise invalid("decode", "True, False, a function, or a dict by extension", decode)
    for name, choice in decode.items() if isinstance(decode, Mapping) else ():
        if not any(name in (each, each.rpartition(".")[2]) for each in extensions):
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
            remedy="put no dots into keys (an extension begins at the first of a file's name), or give columns=",
        )
    names = {*extensions} if wanted is None else {*check_names("columns", wanted)}
    samples = sum(summary.samples for summary in shards.summaries)
    chosen = [each for each in extensions if {each, each + _RATE, each + _VALID} & names]
    specs = {KEY: ColumnSpec("", Field("str"), Decoder("text"), "key")}
    for name in chosen:
        decoder, kind = _decoder_for(name, decode, allow_pickle)
        if decoder.kind == "pickle" and not allow_pickle:
            raise pickle_refused(name, found=f".{name}", where=shards.paths[0])
        added: dict[str, ColumnSpec] = {}
        if decoder.kind == "audio":
            added[name + _RATE] = ColumnSpec(name, Field("dense", "int64"), decoder, "rate")
        if missing == "mask" and shards.extensions[name] < samples:
            added[name + _VALID] = ColumnSpec(name, Field("dense", "bool"), decoder, "valid")
        for each in added:
            if each in chosen:
                raise SourceError(
                    f"members .{each} have the name of a column that is added",
                    where=shards.paths[0],
                    remedy="choose columns= without either of them, or rename the members",
                )
        field = decoder.field or _probed_field(shards, name, decoder, kind, probe)
        npy = NpyReader(field) if decoder.kind == "npy" and field.kind in ("dense", "ragged") else None
        specs |= {name: ColumnSpec(name, field, decoder, npy=npy), **added}
    order = [*specs] if wanted is None else check_columns(wanted, dict.fromkeys([*specs, *extensions]))
    return {name: specs[name] for name in order}


def _probed_field(
    shards: ShardSet, extension: str, decoder: Decoder, kind: str | None, probe: SampleBatch
) -> Field:
    """The field of a column, from a few of its members and the sizes of all."""
    assert decoder.decode is not None
    values = [value for value in probe.values(extension, decoder.decode) if value is not None]
    if decoder.kind == "audio":
        values, kind = [samples for samples, _ in values], kind or "ragged"
    extensions = [each for summary in shards.summaries for each in summary.extensions if each.name == extension]
    sizes = {size for each in extensions for size in (each.smallest, each.largest)}
    field = field_of(values, ragged=decoder.kind == "npy" and len(sizes) > 1, kind=kind)
    if values and kind in ("dense", "ragged") and field.kind != kind and decoder.kind != "audio":
        shapes = sorted({str(np.shape(value)) for value in values})
        raise SourceError(
            f"members .{extension} make no {kind} column",
            expected=f"arrays that make one, as decode={{{extension!r}: {kind!r}}} says",
            found=", ".join(shapes[:4]),
            where=shards.paths[0],
            remedy=f'pass decode={{{extension!r}: "object"}}, or give a decoder that makes them alike',
        )
    return field
