"""State that must not be inherited across ``fork``: locks and threads of the parent."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

_initialisers: set[weakref.WeakMethod[Callable[[], None]]] = set()


def init_in_each_process(initialise: Callable[[], None]) -> None:
    """Call a bound method now, and again in each forked child before any of its threads can run.

    A lock that a thread of the parent holds at the fork stays locked in the child, where that thread does not
    exist: ``initialise`` creates locks, thread pools and the like.
    """
    initialise()
    _initialisers.add(weakref.WeakMethod(initialise, _initialisers.discard))


def _init_child() -> None:
    for reference in list(_initialisers):
        initialise = reference()
        if initialise is not None:
            initialise()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_init_child)
