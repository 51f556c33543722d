"""What one rank was given in an epoch: its keys on disk in the order in which they came, its steps in memory."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from rankfeed.diagnostics.keys import Words
from rankfeed.errors import AuditError

_CHUNK = 1 << 20
#: In place of a worker's number, where it cannot be told.
NOBODY = -1


@dataclass(frozen=True)
class Place:
    """Where a sample was delivered: the rank, its worker (None: not known), the step and the row, from 0."""

    rank: int
    worker: int | None
    step: int
    row: int

    def __str__(self) -> str:
        worker = "" if self.worker is None else f", worker {self.worker}"
        return f"rank {self.rank}{worker}, step {self.step}, row {self.row}"


class Trace:
    """Written while the rank reads; then read in chunks, as often as needed.

    Args:
        path: of the file, which is made here.
        rank: whose it is.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self.width = 0
        #: Whether all keys came in their own order: nobody meant to shuffle them.
        self.ascending, self._last = True, -(1 << 63)
        self._path, self._file = path, path.open("wb")
        self._sizes, self._workers = array("q"), array("h")
        self._order = xxh3_128()
        self._order_of: dict[int, xxh3_128] = {}

    def add(self, words: Words, worker: int | None) -> None:
        """A batch that came.

        Raises:
            AuditError: its keys are numbers and those before it were not, or the other way round.
            OSError: it cannot be written.
        """
        if len(words):
            if self.width not in (0, words.shape[1]):
                raise AuditError(
                    "keys are whole numbers in some batches and not in others",
                    where=f"rank {self.rank}, step {len(self._sizes)}",
                    remedy="key= names a field that all samples have",
                )
            self.width = words.shape[1]
        content = np.ascontiguousarray(words)
        self._file.write(content.data)
        self._order.update(content.data)
        numbers = words[:, 0].view(np.int64) if words.shape[1] == 1 else None
        if numbers is None:
            self.ascending = False
        elif len(numbers):
            self.ascending &= bool(self._last <= numbers[0] and (numbers[1:] >= numbers[:-1]).all())
            self._last = int(numbers[-1])
        if worker is not None and len(words):
            self._order_of.setdefault(worker, xxh3_128()).update(content.data)
        self._sizes.append(len(words))
        self._workers.append(NOBODY if worker is None else worker)

    def close(self) -> None:
        """No more batches come."""
        self._file.close()

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Samples in each step."""
        return np.array(self._sizes, np.int64)

    @property
    def orders(self) -> dict[int, str]:
        """Digests of the order of keys: of this rank (`NOBODY`), and of each worker that is known."""
        found = {NOBODY: self._order.hexdigest()}
        return found | {worker: order.hexdigest() for worker, order in self._order_of.items()}

    def chunks(self) -> Iterator[Words]:
        """The keys in order."""
        width = max(1, self.width)
        with self._path.open("rb") as file:
            while len(words := np.fromfile(file, np.uint64, _CHUNK * width)):
                yield words.reshape(-1, width)

    def places(self, keys: Words, most: int) -> list[list[Place]]:
        """Where each of some keys was delivered, the first so many times.

        Args:
            keys: some, shape (k, width).
            most: places of each.
        """
        found: list[list[Place]] = [[] for _ in range(len(keys))]
        if self.width != keys.shape[1]:
            return found
        ends, start = np.cumsum(self.sizes), 0
        for words in self.chunks():
            for key, places in zip(keys, found, strict=True):
                hits = (
                    np.flatnonzero((words == key).all(axis=1))[: most - len(places)] if len(places) < most else ()
                )
                for hit in hits:
                    step = int(np.searchsorted(ends, start + hit, side="right"))
                    row = start + int(hit) - int(ends[step - 1] if step else 0)
                    worker = self._workers[step]
                    places.append(Place(self.rank, None if worker == NOBODY else worker, step, row))
            start += len(words)
        return found
