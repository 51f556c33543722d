"""Moves batches to an accelerator."""

from __future__ import annotations

from typing import Any

import torch

from rankfeed._util.validate import check_int
from rankfeed.errors import ArgumentError, safe_repr


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device; tensors on the CPU are copied to CUDA through pinned memory.

    Examples:
        >>> to_device({"x": torch.zeros(2), "names": ["a"]}, torch.device("cpu"))["names"]
        ['a']
    """
    if isinstance(batch, torch.Tensor):
        if device.type == "cuda" and batch.device.type == "cpu" and not batch.is_nested:
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    if callable(getattr(batch, "to", None)):  # a batch of graphs, for example, which moves its own tensors
        if device.type == "cuda" and callable(getattr(batch, "pin_memory", None)):
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)
    return batch


def check_device(device: str | int | torch.device | None) -> torch.device | None:
    """The device that an argument names.

    Examples:
        >>> check_device("cpu")
        device(type='cpu')
    """
    if device is None:
        return None
    given = device if isinstance(device, str | torch.device) else check_int("device", device, at_least=0)
    try:
        found = torch.device(given)
        if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
            raise RuntimeError("there is no such accelerator here")
        if found.type not in ("cpu", "cuda", "meta"):
            torch.empty(0, device=found)  # CUDA alone is expensive to initialise
        return found
    except Exception as error:
        raise ArgumentError(
            "unknown device", expected="a device that torch has here", found=safe_repr(device)
        ) from error
