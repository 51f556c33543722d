"""What holds locks starts anew in a forked child, before any thread of the child could look at it.

A lock that a thread of the parent held at the fork stays held in the child, where that thread is not.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class StartsAnew(Protocol):
    """Has locks, or threads, that mean nothing in a forked child."""

    def start_anew(self) -> None:
        """Make them, in whichever process this is."""


#: Those of this process.
_all: weakref.WeakSet[StartsAnew] = weakref.WeakSet()


def start_in_each_process(thing: StartsAnew) -> None:
    """Start it here, and anew in each child that is forked from here on."""
    thing.start_anew()
    _all.add(thing)


def _start_anew_in_child() -> None:
    for thing in list(_all):
        thing.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew_in_child)
