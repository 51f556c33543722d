"""State that must not be inherited across ``fork``: locks and threads of the parent."""

import os
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

# By owner, which it does not keep alive.
_initialisers: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def init_in_each_process(initialise: Callable[[], None]) -> None:
    """Call a bound method now, and again in each forked child before any of its threads can run.

    A lock that a thread of the parent holds at the fork stays locked in the child, where that thread does not
    exist: ``initialise`` creates locks, thread pools and the like.
    """
    initialise()
    method = cast(MethodType, initialise)
    _initialisers[method.__self__] = method.__func__


def _init_child() -> None:
    for owner, initialise in list(_initialisers.items()):
        initialise(owner)


os.register_at_fork(after_in_child=_init_child)
