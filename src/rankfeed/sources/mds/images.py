"""Images in MDS shards, decoded with Pillow."""

from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np

from rankfeed.errors import safe_str
from rankfeed.sources.extras import need


def _decode(value: bytes) -> Any:
    """A JPEG or PNG."""
    library = need("PIL.Image", extra="image")
    try:
        image = library.open(BytesIO(value), formats=("JPEG", "PNG"))
        image.load()
    except (OSError, SyntaxError, library.DecompressionBombError) as error:
        raise ValueError(f"{type(error).__name__}: {safe_str(error)}") from error
    return image


def _decode_raw(value: bytes) -> Any:
    """An image as Pillow stores it: width, height and length of the mode's name (uint32), the name, pixels."""
    library = need("PIL.Image", extra="image")
    width, height, length = _numbers(value, 0, 3)
    mode = value[12 : 12 + length].decode("ascii")
    pixels = value[12 + length :]
    bits = {"1": 1, "L": 8, "P": 8, "LA": 16, "La": 16, "PA": 16, "I;16": 16, "RGB": 24, "YCbCr": 24, "LAB": 24}
    bits |= {"HSV": 24, "RGBA": 32, "RGBa": 32, "RGBX": 32, "CMYK": 32, "I": 32, "F": 32}
    # Checked before Pillow allocates memory for it.
    if not width or not height or (width * bits.get(mode, 0) + 7) // 8 * height != len(pixels):
        raise ValueError(f"{len(pixels)} bytes for {width} x {height} in mode {mode!r}")
    return library.frombytes(mode, (width, height), pixels)


def _decode_list(decode: Callable[[bytes], Any], start: int, value: bytes) -> list[Any]:
    """A list of images: their number at ``start``, their sizes (uint32), then the images."""
    (count,) = _numbers(value, start, 1)
    sizes = _numbers(value, start + 4, count)
    images, place = [], start + 4 + 4 * count
    for size in sizes:
        if place + size > len(value):
            raise ValueError(f"an image of {size} bytes where {len(value) - place} are left")
        images.append(decode(value[place : place + size]))
        place += size
    return images


def _numbers(value: bytes, start: int, count: int) -> list[int]:
    if start + 4 * count > len(value):
        raise ValueError(f"{count} numbers where {len(value) - start} bytes are left")
    numbers: list[int] = np.frombuffer(value, "<u4", count, start).tolist()
    return numbers


#: Encoding -> decoder.
IMAGES: dict[str, Callable[[bytes], Any]] = {
    "pil": _decode_raw,
    "jpeg": _decode,
    "png": _decode,
    "jpeg_array": partial(_decode_list, _decode, 0),
    "jpegarray": partial(_decode_list, _decode, 0),
    "list[pil]": partial(_decode_list, _decode_raw, 4),
    "list[jpeg]": partial(_decode_list, _decode, 4),
    "list[png]": partial(_decode_list, _decode, 4),
}
