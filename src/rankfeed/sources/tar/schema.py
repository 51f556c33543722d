"""The columns of a dataset of tar shards: the extensions of its members, and how each is decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from rankfeed._util.validate import invalid
from rankfeed.columns import Field
from rankfeed.errors import ArgumentError, SourceError, safe_repr
from rankfeed.sources.tar.columns import Members, field_of, read_values
from rankfeed.sources.tar.decoders import Decoder, decoder_of, pickle_refused
from rankfeed.sources.tar.shards import ShardSet

#: The column of the samples' keys.
KEY = "__key__"
#: Appended to the name of an audio column for the column of frames per second.
RATE = ".rate"
#: With more extensions, keys probably contain dots.
_MOST_EXTENSIONS = 1000
_PROBES = 8

Decode = bool | Callable[[str, bytes], Any] | Mapping[str, Any]
Missing = Literal["error", "skip", "mask"]


@dataclass(frozen=True)
class ColumnSpec:
    """A column.

    Args:
        extension: of its members; empty for the keys.
        field: of the column.
        decoder: of its members.
        role: "member", "rate" (of audio), "valid" (whether there is a member) or "key".
    """

    extension: str
    field: Field
    decoder: Decoder
    role: Literal["member", "rate", "valid", "key"] = "member"


def extensions_of(shards: ShardSet) -> dict[str, int]:
    """The extensions of all shards in order of appearance, and the number of samples with each."""
    found: dict[str, int] = {}
    for summary in shards.summaries:
        for each in summary.extensions:
            found[each.name] = found.get(each.name, 0) + each.count
    return found


def _check_decode(decode: Decode, extensions: Sequence[str]) -> None:
    if isinstance(decode, bool) or callable(decode):
        return
    if not isinstance(decode, Mapping):
        raise invalid("decode", "True, False, a function, or a dict by extension", decode)
    for name, choice in decode.items():
        if not any(name in (each, each.rpartition(".")[2]) for each in extensions):
            raise ArgumentError(
                "decode names an extension that no sample has",
                expected="some of " + ", ".join(extensions),
                found=safe_repr(name),
            )
        is_kind = isinstance(choice, str) and choice in ("object", "dense", "ragged")
        if not (isinstance(choice, bool) or callable(choice) or is_kind):
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
    extensions: Mapping[str, int],
    wanted: Sequence[str] | None,
    *,
    decode: Decode,
    missing: Missing,
    allow_pickle: bool,
    probe: Callable[[str, int], list[Members]],
) -> dict[str, ColumnSpec]:
    """The columns of a dataset by name.

    Args:
        shards: the shards.
        extensions: number of samples with each extension.
        wanted: names of the columns to offer; None for all.
        decode: how members are decoded.
        missing: what to do with samples that lack a member.
        allow_pickle: whether members that can run code may be read.
        probe: returns some members of an extension.
    """
    specs = {KEY: ColumnSpec("", Field("str"), Decoder("text"), "key")}
    names = list(extensions)
    _check_decode(decode, names)
    if wanted is None and len(names) > _MOST_EXTENSIONS:
        raise SourceError(
            "too many different extensions to be columns",
            expected=f"at most {_MOST_EXTENSIONS}",
            found=f"{len(names)}: " + ", ".join(map(repr, names[:4])),
            where=shards.paths[0],
            remedy="put no dots into keys (an extension begins at the first of a file's name), or give columns=",
        )
    chosen = (
        names if wanted is None else [name for name in names if {name, name + RATE, name + "_valid"} & {*wanted}]
    )
    for name in chosen:
        decoder, kind = _decoder_for(name, decode, allow_pickle)
        if decoder.kind == "pickle" and not allow_pickle:
            raise pickle_refused(name, found=f".{name}", where=shards.paths[0])
        field = decoder.field or _probed_field(shards, name, decoder, kind, probe(name, _PROBES))
        specs[name] = ColumnSpec(name, field, decoder)
        if decoder.kind == "audio":
            specs[_free(name + RATE, chosen, shards)] = ColumnSpec(name, Field("dense", "int64"), decoder, "rate")
        if missing == "mask" and extensions[name] < int(shards.counts.sum()):
            mask = _free(name + "_valid", chosen, shards)
            specs[mask] = ColumnSpec(name, Field("dense", "bool"), decoder, "valid")
    if wanted is None:
        return specs
    unknown = [name for name in wanted if name not in specs]
    if isinstance(wanted, str) or unknown:
        raise ArgumentError(
            "no such column", expected="some of " + ", ".join([KEY, *names]), found=", ".join(unknown) or wanted
        )
    return {name: specs[name] for name in wanted}


def _free(name: str, extensions: Sequence[str], shards: ShardSet) -> str:
    """The name of an added column, unless members have it."""
    if name in extensions:
        raise SourceError(
            f"members .{name} have the name of a column that is added",
            where=shards.paths[0],
            remedy="choose columns= without either of them, or rename the members",
        )
    return name


def _probed_field(
    shards: ShardSet, extension: str, decoder: Decoder, kind: str | None, parts: list[Members]
) -> Field:
    """The field of a column, from a few of its members and the sizes of all."""
    assert decoder.decode is not None
    values = [value for value in read_values(parts, extension, decoder.decode) if value is not None]
    if not values:
        return Field("object")
    if decoder.kind == "audio":
        values, kind = [samples for samples, _ in values], kind or "ragged"
    sizes = {
        size
        for summary in shards.summaries
        for each in summary.extensions
        if each.name == extension
        for size in (each.smallest, each.largest)
    }
    field = field_of(values, ragged=decoder.kind == "npy" and len(sizes) > 1, kind=kind)
    if kind in ("dense", "ragged") and field.kind != kind and decoder.kind != "audio":
        shapes = sorted({str(np.shape(value)) for value in values})
        raise SourceError(
            f"members .{extension} make no {kind} column",
            expected=f"arrays that make one, as decode={{{extension!r}: {kind!r}}} says",
            found=", ".join(shapes[:4]),
            where=shards.paths[0],
            remedy=f'pass decode={{{extension!r}: "object"}}, or give a decoder that makes them alike',
        )
    return field
