"""Moves batches to an accelerator."""

from typing import Any

import torch

from rankfeed._util.validate import check_int
from rankfeed.errors import ArgumentError, safe_repr


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device; tensors on the CPU are copied to CUDA through pinned memory."""
    if not callable(getattr(batch, "to", None)):
        if isinstance(batch, dict):
            return {name: to_device(field, device) for name, field in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*(to_device(field, device) for field in batch))
        if isinstance(batch, (list, tuple)):
            return type(batch)(to_device(part, device) for part in batch)
        return batch
    # A tensor, or what moves its own tensors: a batch of graphs, a PackedSequence (a tuple that leaves one here).
    is_tensor = isinstance(batch, torch.Tensor)
    can_pin = batch.device.type == "cpu" and not batch.is_nested if is_tensor else hasattr(batch, "pin_memory")
    if device.type == "cuda" and can_pin:
        batch = batch.pin_memory()
    return batch.to(device, non_blocking=True)


def check_device(device: str | int | torch.device | None) -> torch.device | None:
    """The device that an argument names."""
    if device is None:
        return None
    chosen = device if isinstance(device, str | torch.device) else check_int("device", device, at_least=0)
    try:
        resolved = torch.device(chosen)
        if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
            raise RuntimeError("there is no such accelerator here")
        if resolved.type not in ("cpu", "cuda", "meta"):
            torch.empty(0, device=resolved)  # CUDA alone is expensive to initialise
        return resolved
    except Exception as error:
        expected = "a device that torch has here"
        raise ArgumentError("unknown device", expected=expected, found=safe_repr(device)) from error
