"""Keys of one loop in the store of torch.distributed, over a connection of its own."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from rankfeed.errors import ArgumentError

_T = TypeVar("_T")
#: Seconds that a connection to the store, and a request to it, may take.
_CONNECT, _REQUEST = 5.0, 30.0


class JobStore:
    """Values of msgspec types in a store; methods raise what the store raises."""

    def __init__(self, store: Any, name: str) -> None:
        # A job that torchrun restarts finds the keys of the previous one: they have another prefix.
        run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._prefix = f"rankfeed/lockstep/{run}/{name}"
        self._kept, self._inner = store, store
        while hasattr(self._inner, "underlying_store"):
            self._inner = self._inner.underlying_store
        self.port = int(getattr(self._inner, "port", 0))  # 0: a store without a network
        self.connect()

    def connect(self) -> None:
        from torch import distributed

        dist: Any = distributed  # much of it has no types
        own = self._inner
        if self.port:
            timeout = timedelta(seconds=_CONNECT)
            own = dist.TCPStore(own.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)
            own.set_timeout(timedelta(seconds=_REQUEST))
        self._keys = dist.PrefixStore(self._prefix, own)

    def exists(self) -> bool:
        """Whether it accepts connections, without a request; a slow or unreachable one counts as existing."""
        if not self.port:
            return False  # an error of a store without a network is final
        try:
            socket.create_connection((self._inner.host, self.port), _CONNECT).close()
        except (ConnectionRefusedError, ConnectionResetError):
            return False
        except OSError:
            pass
        return True

    def write(self, key: str, value: Any) -> None:
        self._keys.set(key, msgspec.json.encode(value).decode())

    def read(self, key: str, default: _T) -> _T:
        """Read a key; the default is written if there is none, so that no request waits for it."""
        found = self._keys.compare_set(key, "", msgspec.json.encode(default).decode())
        return msgspec.json.decode(found, type=type(default))

    def read_all(self, keys: Sequence[str], kind: type[_T]) -> list[_T]:
        """Read keys that exist."""
        extended = self._keys.has_extended_api()
        found = self._keys.multi_get(keys) if extended else [self._keys.get(key) for key in keys]
        return [msgspec.json.decode(each, type=kind) for each in found]


def default_store() -> Any:
    """The store of the default process group."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    if store is None:
        raise ArgumentError(
            "Lockstep needs the store of torch.distributed, and this process group has none",
            found=f"the backend {distributed_c10d.get_backend()!r}",
            remedy="use gloo or nccl",
        )
    return store
