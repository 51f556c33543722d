"""How often rows were found decoded already: counted in the thread that reads them, without a lock.

A batch is made in one thread, so what the count of that thread grows by is the batch's own, however many others
are being made beside it.
"""

from __future__ import annotations

import threading


class Lookups(threading.local):
    """Rows that this thread has read of decoded chunks, and how many of them were there already.

    Examples:
        >>> lookups = Lookups()
        >>> lookups.add(3, found=True)
        >>> lookups.add(1, found=False)
        >>> lookups.so_far
        (3, 4)
    """

    so_far: tuple[int, int] = (0, 0)

    def add(self, rows: int, *, found: bool) -> None:
        """Count rows of a chunk."""
        hits, all_of_them = self.so_far
        self.so_far = hits + rows * found, all_of_them + rows


#: Those of this process.
LOOKUPS = Lookups()
