"""Batches on their way between processes: the bytes of tensors and arrays separate from everything else.

The receiver reads them into recycled memory, on which the tensors are built.
"""

import pickle
import struct
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from rankfeed._util.pickling import dumps
from rankfeed._util.workers import Channel
from rankfeed.columns import Allocate


class SerializedBatch(NamedTuple):
    """A pickle, and the buffers that are sent separately."""

    content: bytes
    buffers: list[memoryview]

    def send(self, channel: Channel) -> None:
        count = len(self.buffers)
        header = struct.pack(f"<Q{count}Q", count, *(buffer.nbytes for buffer in self.buffers))
        channel.send(header + self.content)
        for buffer in self.buffers:
            channel.write(buffer)


def serialize(value: Any, by_name: Collection[str] = ()) -> SerializedBatch:
    """Pickle a value without sending it, so that a failure can still be reported."""
    return SerializedBatch(*dumps(value, by_name))


def receive(message: bytes, channel: Channel, allocate: Allocate) -> Any:
    """The value of a message that `SerializedBatch.send` sent."""
    (count,) = struct.unpack_from("<Q", message)
    buffers = []
    for size in struct.unpack_from(f"<{count}Q", message, 8):
        buffers.append(allocate((size,), np.dtype(np.uint8)).data)
        channel.read_into(buffers[-1])
    return pickle.loads(memoryview(message)[8 + 8 * count :], buffers=buffers)  # noqa: S301  (of our own worker)
