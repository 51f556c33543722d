"""What tells graphs from other graphs, without reading all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rankfeed.storage import digest_of

#: Values of a list, and stretches of a tensor, that are looked at.
SAMPLES, _STRETCHES, _STRETCH = 256, 16, 4096


def digests(data: Any, slices: Any = None) -> list[bytes]:
    """Names, types, shapes and a sample of the content; slices whole."""
    pieces = []
    for name, value in _values(data, slices):
        facts = f"{name} {type(value).__name__}"
        if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested:
            facts += f" {value.dtype} {tuple(value.shape)} {_sampled(value.detach(), name.startswith('slices'))}"
        elif isinstance(value, (list, tuple)):
            facts += (
                f" {len(value)} {[each for each in value[:: max(1, len(value) // SAMPLES)] if type(each) is str]}"
            )
        elif isinstance(value, (int, float, str)):
            facts += f" {value!r}"
        pieces.append(facts.encode())
    return pieces


def _sampled(tensor: Any, whole: bool) -> str:
    flat = tensor.reshape(-1).cpu().view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    if whole or flat.nbytes <= _STRETCHES * _STRETCH:
        return digest_of(flat.data)
    starts = np.linspace(0, flat.nbytes - _STRETCH, _STRETCHES, dtype=np.int64).tolist()
    return digest_of(*(flat[start : start + _STRETCH].data for start in starts))


def _values(data: Any, slices: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of stored graphs and of their slices, with a name for each."""
    for store in data.stores:
        for name, value in store.items():
            yield f"{store._key}.{name}", value
    pending: list[tuple[str, Any]] = [("slices", slices)]
    while pending:
        name, node = pending.pop()
        if isinstance(node, dict):
            pending += [(f"{name}.{key}", value) for key, value in node.items()]
        elif isinstance(node, Sequence) and not isinstance(node, str):
            pending += [(f"{name}.{number}", value) for number, value in enumerate(node)]
        else:
            yield name, node
