"""The columns of a dataset of tar shards: the extensions of its members, and how each is decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from rankfeed._util.validate import check_names, invalid
from rankfeed.columns import Field
from rankfeed.errors import ArgumentError, SourceError, safe_repr
from rankfeed.sources.source import check_columns
from rankfeed.sources.tar.columns import SampleBatch, field_of
from rankfeed.sources.tar.decoders import Decoder, decoder_of, pickle_refused
from rankfeed.sources.tar.shards import Missing, ShardSet

#: The column of the samples' keys.
KEY = "__key__"
#: Appended to the name of an audio column for the column of frames per second, and to a name for its mask.
_RATE, _VALID = ".rate", "_valid"
#: With more extensions, keys probably contain dots.
_MAX_EXTENSIONS = 1000

Decode = bool | Callable[[str, bytes], Any] | Mapping[str, Any]


@dataclass(frozen=True)
class ColumnSpec:
    """A column of the members of an extension, of the rates or the presence of these, or of the keys."""

    extension: str
    field: Field
    decoder: Decoder
    role: Literal["member", "rate", "valid", "key"] = "member"


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
        specs |= {name: ColumnSpec(name, field, decoder), **added}
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
