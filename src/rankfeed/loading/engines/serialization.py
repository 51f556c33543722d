"""Batches on their way between processes: the tensors' bytes apart from everything else.

Pickle's protocol 5 hands large buffers out beside the pickle itself; the receiver reads them straight into
recycled memory, and the tensors stand on that. Nothing is named, so nothing is left over by a crash.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from rankfeed.columns import Allocate


@dataclass(frozen=True)
class SerializedBatch:
    """A value made ready to be sent: its pickle, and the buffers that go beside it."""

    content: bytes
    buffers: list[memoryview]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # torch would put each tensor's bytes into the pickle itself; as numpy arrays they go beside it.
        if type(value) is not torch.Tensor or value.requires_grad or value.layout is not torch.strided:
            return NotImplemented
        try:
            return torch.from_numpy, (value.contiguous().numpy(),)
        except (TypeError, RuntimeError):  # bfloat16, nested, conjugated, on a device: what numpy cannot hold
            return NotImplemented


def serialize(value: Any) -> SerializedBatch:
    """Make any picklable value ready; nothing is sent, so what fails here can still be reported."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return SerializedBatch(stream.getvalue(), [buffer.raw() for buffer in buffers])


def send(connection: Connection, batch: SerializedBatch) -> None:
    """Send what :func:`serialize` made ready."""
    connection.send((batch.content, [view.nbytes for view in batch.buffers]))
    for view in batch.buffers:
        if view.nbytes:
            connection.send_bytes(view)


def receive(connection: Connection, allocate: Allocate) -> Any:
    """Receive what :func:`send` sent.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    content, sizes = connection.recv()
    buffers = []
    for size in sizes:
        buffer = allocate((size,), np.dtype(np.uint8)).data
        if size:
            connection.recv_bytes_into(buffer)
        buffers.append(buffer)
    return pickle.loads(content, buffers=buffers)  # noqa: S301  (from a worker of our own)
