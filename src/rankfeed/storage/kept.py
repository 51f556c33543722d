"""What is costly to open and stays open: the last ones used, up to a number of them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")


class Kept(Generic[_Value]):
    """Open files by number. Safe to use from several threads, and after fork; it travels empty.

    Examples:
        >>> kept = Kept()
        >>> [kept.get(number, lambda number=number: [number], most=2) for number in (1, 2, 1, 3)]
        [[1], [2], [1], [3]]
        >>> len(kept)
        2
    """

    def __init__(self) -> None:
        self._values: OrderedDict[int, _Value] = OrderedDict()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, number: int, opened: Callable[[], _Value], *, most: int) -> _Value:
        """The value of a number, opened if it has to be; of others, no more than ``most`` in all stay."""
        if self._pid != os.getpid():  # forked: a lock that a thread of the parent held is held for ever
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            if number in self._values:
                self._values.move_to_end(number)
                return self._values[number]
        value = opened()  # outside the lock: others go on reading; two openings do no harm
        with self._lock:
            self._values[number] = value
            while len(self._values) > most:
                self._values.popitem(last=False)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()
