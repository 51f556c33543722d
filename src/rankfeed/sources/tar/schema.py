"""What columns a data set of tar shards has: extensions that its samples share, and how each is decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from rankfeed._util.validate import invalid
from rankfeed.columns import Field
from rankfeed.errors import ArgumentError, SourceError, safe_repr
from rankfeed.sources.tar.columns import RATE, Part, field_of, read_values
from rankfeed.sources.tar.decoders import Decoder, decoder_of, refusal
from rankfeed.sources.tar.shards import ShardSet

#: The column of the samples' keys.
KEY = "__key__"
#: Extensions above which a data set is taken for one whose keys have dots.
MOST = 1000
#: Samples that are looked at, where an index does not say what there is.
_PROBES = 8

Decode = bool | Callable[[str, bytes], Any] | Mapping[str, Any]
Missing = Literal["error", "skip", "mask"]


@dataclass(frozen=True)
class Spec:
    """A column.

    Args:
        extension: of the members that it is made of; empty for the keys.
        field: what it holds.
        decoder: how they are read.
        role: "member", "rate" (of a sound), "valid" (whether there is a member) or "key".
    """

    extension: str
    field: Field
    decoder: Decoder
    role: Literal["member", "rate", "valid", "key"] = "member"


def extensions_of(shards: ShardSet) -> dict[str, int]:
    """The extensions of all shards in the order they are met, and how many samples have each.

    Of shards with another's index a few samples are looked at; that the rest is like them is checked as they are
    read.
    """
    found: dict[str, int] = {}
    for number, summary in enumerate(shards.summaries):
        if summary is not None:
            for each in summary.extensions:
                found[each.name] = found.get(each.name, 0) + each.count
        elif shards.counts[number]:
            index, count = shards.lazy[number], int(shards.counts[number])
            for extension in {
                name: 0 for row in sorted({0, count // 2, count - 1}) for name in index.extensions_of(row)
            }:
                found[extension] = found.get(extension, 0) + count
    for index in shards.lazy.values():
        index.allowed = frozenset(found)
    return found


def check_decode(decode: Decode, extensions: Sequence[str]) -> None:
    """Refuse a ``decode`` that cannot be meant.

    Raises:
        ArgumentError: as said.
    """
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
        named = isinstance(choice, str) and choice in ("object", "dense", "ragged")
        if not (isinstance(choice, bool) or callable(choice) or named):
            expected = 'True, False (bytes), a function of bytes, "object", "dense" or "ragged"'
            raise invalid(f"decode for {name!r}", expected, choice)


def decoder_for(extension: str, decode: Decode, allow_pickle: bool) -> tuple[Decoder, str | None]:
    """How an extension is decoded, and as what kind of column where that was said."""
    plain = Decoder("bytes", None, Field("bytes"))
    if callable(decode):
        return Decoder("value", partial(decode, extension)), None
    choice: Any = decode
    if isinstance(decode, Mapping):
        choice = decode.get(extension, decode.get(extension.rpartition(".")[2], True))
    if choice is False:
        return plain, None
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
    probe: Callable[[str, int], list[Part]],
) -> dict[str, Spec]:
    """The columns of a data set.

    Args:
        shards: they.
        extensions: how many samples have each.
        wanted: names of the columns to offer; None for all.
        decode: how members are decoded.
        missing: what is done where a sample lacks a member.
        allow_pickle: whether those may be read that can run code.
        probe: some members of an extension, to look at.

    Raises:
        ArgumentError: no such column.
        UnsafeError: a column may hold pickles.
        SourceError: too many columns to be meant.
    """
    total = int(shards.counts.sum())
    specs = {KEY: Spec("", Field("str"), Decoder("text"), "key")}
    names = list(extensions)
    check_decode(decode, names)
    if wanted is None and len(names) > MOST:
        raise SourceError(
            "too many different extensions to be columns",
            expected=f"at most {MOST}",
            found=f"{len(names)}: " + ", ".join(map(repr, names[:4])),
            where=shards.paths[0],
            remedy="put no dots into keys (an extension begins at the first of a file's name), or give columns=",
        )
    chosen = (
        names if wanted is None else [name for name in names if {name, name + RATE, name + "_valid"} & {*wanted}]
    )
    for name in chosen:
        decoder, kind = decoder_for(name, decode, allow_pickle)
        if decoder.kind == "pickle" and not allow_pickle:
            error = refusal(name)
            raise type(error)(error.summary, found=f".{name}", where=shards.paths[0], remedy=error.remedy)
        field = decoder.field or _judged(shards, name, decoder, kind, probe(name, _PROBES))
        specs[name] = Spec(name, field, decoder)
        if decoder.kind == "audio":
            specs[_free(name + RATE, chosen, shards)] = Spec(name, Field("dense", "int64"), decoder, "rate")
        if missing == "mask" and extensions[name] < total:
            mask = _free(name + "_valid", chosen, shards)
            specs[mask] = Spec(name, Field("dense", "bool"), decoder, "valid")
    if wanted is None:
        return specs
    unknown = [name for name in wanted if name not in specs]
    if isinstance(wanted, str) or unknown:
        raise ArgumentError(
            "no such column", expected="some of " + ", ".join([KEY, *names]), found=", ".join(unknown) or wanted
        )
    return {name: specs[name] for name in wanted}


def _free(name: str, extensions: Sequence[str], shards: ShardSet) -> str:
    """The name of a column that goes with another, if no members have it."""
    if name in extensions:
        raise SourceError(
            f"members .{name} have the name of a column that goes with another",
            where=shards.paths[0],
            remedy="choose columns= without either of them, or rename the members",
        )
    return name


def _judged(shards: ShardSet, extension: str, decoder: Decoder, kind: str | None, parts: list[Part]) -> Field:
    """What a column holds, by a few of its members and the sizes of all."""
    assert decoder.decode is not None
    values = [value for value in read_values(parts, extension, decoder.decode) if value is not None]
    if not values:
        return Field("object")
    if decoder.kind == "audio":
        values, kind = [samples for samples, _ in values], kind or "ragged"
    sizes = {
        size
        for summary in shards.summaries
        if summary is not None
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
