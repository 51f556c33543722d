"""Messages between two processes over a socket, while each watches whether the other is alive."""

from __future__ import annotations

import select
import socket
import struct
import time

_LENGTH = struct.Struct("<Q")


class PeerGoneError(ConnectionError):
    """The other process ended, or closed its end."""


class Channel:
    """A socket whose reads and writes end when the peer process does.

    The end of a process is seen by its pidfd, not by the end of the stream: a child of the peer may have inherited
    the socket and keep it open.

    Args:
        connected: one end of a socket pair.
        peer: pidfd of the process at the other end.
    """

    def __init__(self, connected: socket.socket, peer: int) -> None:
        connected.setblocking(False)
        self.socket, self._peer = connected, peer
        self._poll = select.poll()
        self._poll.register(peer, select.POLLIN)

    def send(self, message: bytes) -> None:
        """Send a message; blocks while the peer's buffer is full.

        Raises:
            PeerGoneError: the peer ended.
        """
        self.write(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Receive a message; blocks until there is one.

        Raises:
            PeerGoneError: the peer ended.
        """
        header = bytearray(_LENGTH.size)
        self.read_into(memoryview(header))
        message = bytearray(_LENGTH.unpack(header)[0])
        self.read_into(memoryview(message))
        return bytes(message)

    def write(self, data: bytes | memoryview) -> None:
        """Send bytes without a header; raises as `send` does."""
        view = memoryview(data).cast("B")
        while view:
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as error:
                raise PeerGoneError(str(error)) from None

    def read_into(self, view: memoryview) -> None:
        """Fill a buffer with received bytes; raises as `receive` does."""
        while view:
            try:
                received = self.socket.recv_into(view)
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            except OSError as error:
                raise PeerGoneError(str(error)) from None
            if not received:
                raise PeerGoneError("the other end is closed")
            view = view[received:]

    def poll(self, seconds: float) -> bool:
        """Wait for a message; whether one, or the end of the peer, came in time."""
        deadline = time.monotonic() + seconds
        self._poll.register(self.socket, select.POLLIN)
        while True:
            if self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return True
            if time.monotonic() >= deadline:
                return False

    def _wait(self, event: int) -> None:
        self._poll.register(self.socket, event)
        ready = dict(self._poll.poll())
        if self._peer in ready and not ready.get(self.socket.fileno(), 0) & event:
            raise PeerGoneError("the process ended")

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
