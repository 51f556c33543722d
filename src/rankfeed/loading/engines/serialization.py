"""Batches on their way between processes: the bytes of tensors and arrays separate from everything else.

The receiver reads them into recycled memory, on which the tensors are built.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankfeed._util.pickling import dumps
from rankfeed._util.workers import Channel
from rankfeed.columns import Allocate


@dataclass(frozen=True)
class SerializedBatch:
    """A pickle, and the buffers that are sent separately."""

    content: bytes
    buffers: list[memoryview]

    def send(self, channel: Channel) -> None:
        """Send it."""
        count = len(self.buffers)
        header = struct.pack(f"<Q{count}Q", count, *(buffer.nbytes for buffer in self.buffers))
        channel.send(header + self.content)
        for buffer in self.buffers:
            channel.write(buffer)


def serialize(value: Any) -> SerializedBatch:
    """Pickle a value without sending it, so that a failure can still be reported."""
    return SerializedBatch(*dumps(value))


def receive(message: bytes, channel: Channel, allocate: Allocate) -> Any:
    """The value of a message that `SerializedBatch.send` sent."""
    (count,) = struct.unpack_from("<Q", message)
    start = 8 * (1 + count)
    buffers = []
    for size in struct.unpack_from(f"<{count}Q", message, 8):
        buffer = allocate((size,), np.dtype(np.uint8)).data
        channel.read_into(buffer)
        buffers.append(buffer)
    return pickle.loads(memoryview(message)[start:], buffers=buffers)  # noqa: S301  (from a worker of our own)
