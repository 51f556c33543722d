"""What an interrupted check has found whole already: a line for each piece, in the user's cache."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from rankfeed.sources.tar.index_cache import cache_folder
from rankfeed.storage.checksum import digest_of


class Checked:
    """Pieces that were found whole.

    A piece is known by its key: other bytes, another time or another checksum make it another one. What is damaged
    is not kept, and all is forgotten when a check comes to its end: the next one reads everything.

    Args:
        name: of the data.
        cache_dir: where to keep it; None for ``~/.cache/rankfeed``.
        resume: whether to go on from what there is.
    """

    def __init__(self, name: str, cache_dir: str | os.PathLike[str] | None = None, *, resume: bool = True) -> None:
        self._path = Path(cache_folder(cache_dir), "verify", digest_of(os.fsencode(name))[:16])
        self._lock = threading.Lock()
        self._known: frozenset[str] = frozenset()
        if resume:
            with suppress(OSError):
                self._known = frozenset(self._path.read_text(errors="replace").splitlines())
        else:
            self.forget()

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return _digits(key) in self._known

    def add(self, key: tuple[object, ...]) -> None:
        """Keep that a piece is whole. Where nothing can be written, the next check begins anew."""
        with self._lock, suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            handle = os.open(self._path, flags, 0o666)
            try:
                os.write(handle, (_digits(key) + "\n").encode())
            finally:
                os.close(handle)

    def forget(self) -> None:
        """The check has come to its end."""
        with suppress(OSError):
            self._path.unlink()


def _digits(key: tuple[object, ...]) -> str:
    return digest_of(repr(key).encode())
