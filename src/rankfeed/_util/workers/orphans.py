"""Importing this module makes a process adopt the orphans among its descendants, as init does otherwise.

The servers of the doctor's ranks import it, so that every process that a rank starts, also one in a session of its
own or without environment, stays a descendant of a server after the rank has ended.
"""

import ctypes
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36

with suppress(OSError, AttributeError):  # where it does not exist, orphans belong to init
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
