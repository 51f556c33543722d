"""Messages between two processes over a socket, while each watches whether the other is alive."""

import os
import select
import socket
import struct
from collections.abc import Callable

from rankfeed._util.signals import reraise_interrupt

_LENGTH = struct.Struct("<Q")


class PeerGoneError(ConnectionError):
    """The other process ended, or closed its end."""


class Channel:
    """A socket whose reads and writes raise PeerGoneError when the peer process ends.

    The end of a process is seen by its pidfd, not by the end of the stream: a child of the peer may have inherited
    the socket and keep it open. ``memory`` is a memfd that both processes may map; -1 for none.
    """

    def __init__(self, connected: socket.socket, peer: int, memory: int = -1) -> None:
        connected.setblocking(False)
        self.socket, self.memory, self._peer = connected, memory, peer

    def send(self, message: bytes) -> None:
        """Send a message; blocks while the peer's buffer is full."""
        view = memoryview(_LENGTH.pack(len(message)) + message)
        self._transfer(view, lambda rest: self.socket.send(rest, socket.MSG_NOSIGNAL), select.POLLOUT)

    def receive(self) -> bytearray:
        """The next message; blocks until it is there."""
        return self._read(*_LENGTH.unpack(self._read(_LENGTH.size)))

    def _read(self, size: int) -> bytearray:
        message = bytearray(size)
        self._transfer(memoryview(message), self.socket.recv_into, select.POLLIN)
        return message

    def _transfer(self, view: memoryview, transfer: Callable[[memoryview], int], event: int) -> None:
        while view:
            try:
                count = transfer(view)
            except BlockingIOError:
                self._wait(event)
                continue
            except OSError as error:
                reraise_interrupt(error)
                raise PeerGoneError(str(error)) from None
            if not count:
                raise PeerGoneError("the other end is closed")
            view = view[count:]

    def poll(self, seconds: float) -> bool:
        """Wait for a message; whether one, or the end of the peer, came in time."""
        return bool(poll_descriptors({self.socket.fileno(): select.POLLIN, self._peer: select.POLLIN}, seconds))

    def _wait(self, event: int) -> None:
        ours = self.socket.fileno()
        ready = poll_descriptors({ours: event, self._peer: select.POLLIN})
        if self._peer in ready and not ready.get(ours, 0) & event:
            raise PeerGoneError("the process ended")

    def close(self) -> None:
        self.socket.close()
        if self.memory >= 0:
            os.close(self.memory)


def poll_descriptors(events: dict[int, int], seconds: float | None = None) -> dict[int, int]:
    """The events of file descriptors that occurred, waiting for one for at most ``seconds``."""
    poll = select.poll()
    for descriptor, event in events.items():
        poll.register(descriptor, event)
    return dict(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))
