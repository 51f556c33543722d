"""Decoders of members by the last part of their extension, as in WebDataset.

Members are untrusted: nothing here runs code that they contain unless the caller allows it, and nothing takes more
memory than :data:`LIMIT` for one of them. Errors of the libraries are converted by `decode_each`.
"""

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from rankfeed._util.imports import need
from rankfeed.columns.field import Field
from rankfeed.errors import CorruptError, SourceError, UnsafeError
from rankfeed.sources.npy.arrays import array_at, check_size, load_objects, members_of, read_header, read_member

#: Bytes that one member may expand to.
LIMIT = 1 << 29

#: Formats that Pillow may detect: others run programs, or fetch fonts.
_PILLOW = ("JPEG", "PNG", "PPM", "BMP", "GIF", "WEBP", "TIFF")


@dataclass(frozen=True)
class Decoder:
    """How members of an extension are decoded."""

    kind: Literal["bytes", "text", "npy", "audio", "pickle", "value"]
    decode: Callable[[bytes], Any] | None = None  #: None for bytes, text and refused pickles: not decoded
    field: Field | None = None  #: of the column, if it is known without looking at members


def decoder_of(extension: str, *, allow_pickle: bool = False) -> Decoder:
    """The decoder of an extension, which is in lower case; ``.gz`` at its end is decompressed first."""
    if extension.endswith(".gz"):
        inner = decoder_of(extension[:-3], allow_pickle=allow_pickle)
        decode = inner.decode or (bytes.decode if inner.kind == "text" else bytes)
        kind = inner.kind if inner.kind in ("audio", "pickle") else "value"
        return Decoder(kind, partial(_decode_gzipped, decode), inner.field)
    last = extension.rpartition(".")[2]
    if last in _PICKLES:
        return Decoder("pickle", partial(_pickle, last) if allow_pickle else None, Field("object"))
    if last == "npy":
        return Decoder("npy", partial(_npy, allow_pickle=allow_pickle))
    if last == "npz":
        return Decoder("value", partial(_npz, allow_pickle=allow_pickle), Field("object"))
    return _DECODERS.get(last, Decoder("bytes", None, Field("bytes")))


def _integer(data: bytes) -> int:
    return int(np.int64(int(data)))  # an OverflowError for more than 64 bits


def _decode_gzipped(decode: Callable[[bytes], Any], data: bytes) -> Any:
    # Not zlib alone: a member may be many streams, and zlib copies the rest of it at each.
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise UnsafeError(
            "a compressed member expands too much",
            expected=f"up to {LIMIT} bytes",
            found=f"more, from {len(data)} bytes",
            remedy="if this is intended, read it as bytes (decode=False) and decompress it yourself",
        )
    return decode(content)


def _npy(data: bytes, *, allow_pickle: bool) -> Any:
    header = read_header(io.BytesIO(data), "", allow_pickle=allow_pickle)
    if header.dtype.hasobject:
        return load_objects(io.BytesIO(data), header, "", allow_pickle=allow_pickle)
    check_size(header, len(data), "")
    array = array_at(np.frombuffer(data, np.uint8), header)
    return array.astype(array.dtype.newbyteorder("="), order="C")


def _npz(data: bytes, *, allow_pickle: bool) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        nbytes = sum(info.file_size for info in archive.infolist())
        if nbytes > LIMIT:
            raise UnsafeError("a compressed member expands too much", found=f"{nbytes} bytes")
        arrays = members_of(archive, "", allow_pickle=allow_pickle, only_arrays=False)
        # Members that are not arrays are delivered as bytes, as numpy does.
        return {
            name: read_member(archive, arrays[name], allow_pickle=allow_pickle)
            if name in arrays
            else archive.read(info)
            for info in archive.infolist()
            for name in [info.filename.removesuffix(".npy")]
        }


def _image(data: bytes) -> Any:
    """An image as uint8 [height, width, 3], as WebDataset's "rgb8"."""
    pillow = need("PIL.Image", extra="image")
    with pillow.open(io.BytesIO(data), formats=_PILLOW) as image:
        if image.width * image.height * 4 > LIMIT:
            raise UnsafeError("an image is too large", found=f"{image.width} x {image.height} pixels")
        if image.mode[:1] in "IF":
            raise SourceError(
                "an image has more than 8 bits a channel",
                expected="8 bits",
                found=f"mode {image.mode}",
                remedy="pass decode={extension: a function of its bytes}",
            )
        return np.array(image.convert("RGB"))


def _audio(data: bytes) -> tuple[Any, int]:
    """A sound as float32 [frames, channels], and its frames per second."""
    soundfile = need("soundfile", extra="audio")
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        if not 0 <= file.frames * file.channels * 4 <= LIMIT:
            raise UnsafeError("a sound is too long", found=f"{file.frames} frames x {file.channels} channels")
        samples = file.read(dtype="float32", always_2d=True)
        if len(samples) != file.frames:
            raise CorruptError("a sound is truncated", expected=f"{file.frames} frames", found=len(samples))
        return samples, int(file.samplerate)


def _pickle(extension: str, data: bytes) -> Any:
    if extension in ("ten", "tb"):
        return need("webdataset.tenbin", extra="webdataset").decode_buffer(data)
    if extension in ("pth", "pt"):
        import torch

        return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")
    import pickle

    return pickle.loads(data)  # noqa: S301  (allowed by the caller)


_PICKLES = ("pyd", "pkl", "pickle", "pth", "pt", "ten", "tb")
_DECODERS = {
    last: decoder
    for extensions, decoder in (
        ("txt text transcript", Decoder("text", None, Field("str"))),
        ("cls cls2 index inx id", Decoder("value", _integer, Field("dense", "int64"))),
        ("json jsn", Decoder("value", json.loads, Field("object"))),
        ("mp msg", Decoder("value", msgspec.msgpack.decode, Field("object"))),
        ("jpg jpeg jpe jfif png ppm pgm pbm pnm bmp gif webp tif tiff", Decoder("value", _image, Field("object"))),
        ("wav flac ogg opus mp3 aiff", Decoder("audio", _audio)),
    )
    for last in extensions.split()
}
